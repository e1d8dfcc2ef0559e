"""From a Gemma 2 folder of transformers to a T5Gemma folder, and back there.

The way of a user: import, adapt, export, load with transformers.
"""

import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import convert
from encdec_adapt.runtime import command
from tests.parity import test_families

pytestmark = pytest.mark.parity

VOCAB = test_families.SHAPE['vocab_size']
GEMMA2 = dict(
  sliding_window=4,
  query_pre_attn_scalar=7,
  attn_logit_softcapping=5.0,
  final_logit_softcapping=8.0,
  max_position_embeddings=77,
)
WIDTHS = {'balanced': (32, 32), 'unbalanced': (48, 32)}


def convert_(*argv) -> int:
  return command.run_subcommand('', convert.COMMANDS, [str(a) for a in argv])


@pytest.fixture(params=WIDTHS)
def exported(request, hugging_face, tmp_path):
  """A T5Gemma folder made of two Gemma 2 folders by the commands."""
  hf = hugging_face
  sources = []
  for side, width in zip(
    ('encoder', 'decoder'), WIDTHS[request.param], strict=True
  ):
    shape = {**test_families.SHAPE, 'hidden_size': width, **GEMMA2}
    settings = hf.transformers.Gemma2Config(**shape)
    test_families.save(hf, 'Gemma2ForCausalLM', settings, tmp_path / side)
    run = tmp_path / f'{side}_run'
    convert_('import', f'--source={tmp_path / side}', f'--output={run}')
    sources.append(run)
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  flags = [f'--encoder={sources[0]}', f'--decoder={sources[1]}']
  assert convert_('adapt', *flags, f'--output={pair}') == 0
  assert convert_('export', f'--checkpoint={pair}', f'--output={output}') == 0
  return output


def load_theirs(hf, folder):
  """The class that the folder names, every weight accounted for."""
  raw = json.loads((folder / 'config.json').read_text())
  (name,) = raw['architectures']
  model, info = getattr(hf.transformers, name).from_pretrained(
    folder, output_loading_info=True, attn_implementation='eager'
  )
  for problem in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not info[problem], problem
  return model.eval()


def test_gemma2_to_t5gemma(hugging_face, exported, rows):
  hf = hugging_face
  theirs = load_theirs(hf, exported)
  for part in (theirs.config.encoder, theirs.config.decoder):
    assert part.max_position_embeddings == 77
    assert (part.pad_token_id, part.eos_token_id, part.bos_token_id) == (
      (0, 1, 2)
    )
  # transformers 5.23 with eager attention sees one key more on either side.
  ours = encdec_adapt.load(exported, encoder_window='inclusive')
  encoder, decoder = rows((13, 10), 13, VOCAB), rows((9, 12), 12, VOCAB, 1)
  logits = ours.logits(decoder[0], encoder[0], encoder[1] > 0, decoder[1] > 0)
  ids, mask, decoder_ids, decoder_mask = (
    hf.torch.tensor(np.asarray(x)).long() for x in (*encoder[:2], *decoder[:2])
  )
  with hf.torch.no_grad():
    out = theirs(
      input_ids=ids,
      attention_mask=mask,
      decoder_input_ids=decoder_ids,
      decoder_attention_mask=decoder_mask,
      use_cache=False,
    )
    texts = theirs.generate(
      input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False
    )
  real = np.asarray(decoder[1]) > 0
  np.testing.assert_allclose(
    np.asarray(logits)[real], out.logits.numpy()[real], atol=hf.tolerance
  )
  generated = ours.generate(encoder[0], encoder[1] > 0, max_tokens=12)
  for row, tokens in enumerate(texts.numpy()):
    assert tokens[0] == theirs.config.decoder.bos_token_id
    length = int(generated.lengths[row])
    assert length > 1
    np.testing.assert_array_equal(
      np.asarray(generated.tokens)[row, :length], tokens[1 : length + 1]
    )
    # What follows is padding, on both sides.
    assert not tokens[length + 1 :].any()


EOI = 61


@pytest.fixture(params=['balanced', 'unbalanced'])
def t5gemma2(request, hugging_face, tmp_path):
  """A T5Gemma 2 folder made of one or two Gemma 3 folders by the commands."""
  hf = hugging_face
  shapes = {'encoder': {}, 'decoder': {}}
  if request.param == 'unbalanced':  # In all but the width.
    shapes['encoder'] = dict(
      num_hidden_layers=4,
      layer_types=test_families.GEMMA3['layer_types'][:4],
      num_attention_heads=2,
      num_key_value_heads=1,
      sliding_window=4,
    )
  flags = []
  for side, changes in shapes.items():
    shape = {**test_families.SHAPE, **test_families.GEMMA3, **changes}
    settings = hf.transformers.Gemma3TextConfig(**shape)
    folder = tmp_path / side
    test_families.save(hf, 'Gemma3ForCausalLM', settings, folder)
    flags.append(f'--{side}={folder}')
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  flags += ['--target=t5gemma2', f'--eoi_token={EOI}']
  assert convert_('adapt', *flags, f'--output={pair}') == 0
  flags = [f'--checkpoint={pair}', f'--output={output}']
  assert convert_('export', *flags, '--layout=transformers') == 0
  return pair, output


def test_gemma3_to_t5gemma2(hugging_face, t5gemma2, rows):
  hf = hugging_face
  pair, exported = t5gemma2
  cls = hf.transformers.T5Gemma2ForConditionalGeneration
  settings = cls.config_class.from_pretrained(exported)
  assert settings.eoi_token_index == EOI
  # A small vision part: the folder has none of it.
  settings.encoder.vision_config = hf.transformers.SiglipVisionConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
  )
  settings.encoder.mm_tokens_per_image = 1
  theirs, info = cls.from_pretrained(
    exported,
    config=settings,
    output_loading_info=True,
    attn_implementation='eager',
  )
  for problem in ('unexpected_keys', 'mismatched_keys'):
    assert not info[problem], problem
  assert not [
    key
    for key in info['missing_keys']
    if 'vision_tower' not in key and 'multi_modal_projector' not in key
  ]
  encoder, decoder = rows((13, 10), 13, 60), rows((9, 12), 12, 60, seed=1)
  # The token that has a vector of its own, on both sides.
  encoder = (encoder[0].at[0, 3].set(EOI), *encoder[1:])
  decoder = (decoder[0].at[:, 2].set(EOI), *decoder[1:])
  ids, mask, decoder_ids, decoder_mask = (
    hf.torch.tensor(np.asarray(x)).long() for x in (*encoder[:2], *decoder[:2])
  )
  with hf.torch.no_grad():
    out = theirs.eval()(
      input_ids=ids,
      attention_mask=mask,
      decoder_input_ids=decoder_ids,
      decoder_attention_mask=decoder_mask,
      use_cache=False,
    )
  real = np.asarray(decoder[1]) > 0
  for path in (pair, exported):
    logits = encdec_adapt.load(path).logits(
      decoder[0], encoder[0], encoder[1] > 0, decoder[1] > 0
    )
    np.testing.assert_allclose(
      np.asarray(logits)[real], out.logits.numpy()[real], atol=hf.tolerance
    )


def test_a_folder_of_transformers_comes_back_bit_for_bit(
  hugging_face, tmp_path
):
  hf = hugging_face
  # bfloat16 passes through a float32 checkpoint.
  shape = {**test_families.SHAPE, **GEMMA2}
  settings = hf.transformers.Gemma2Config(**shape)
  theirs = hf.redraw(hf.transformers.Gemma2ForCausalLM(settings))
  theirs.to(hf.torch.bfloat16).save_pretrained(tmp_path / 'model')
  run, output = tmp_path / 'run', tmp_path / 'out'
  convert_('import', f'--source={tmp_path}/model', f'--output={run}')
  flags = [f'--checkpoint={run}', f'--output={output}', '--dtype=bfloat16']
  convert_('export', *flags)
  again = load_theirs(hf, output)
  assert again.dtype == hf.torch.bfloat16
  for (name, one), (_, other) in zip(
    theirs.state_dict().items(), again.state_dict().items(), strict=True
  ):
    assert hf.torch.equal(one, other), name
