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
