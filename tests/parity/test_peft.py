"""Adapters of PEFT: in and out with equal logits, and equal to the bit."""

import copy
import json

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.stored import model_on_disk
from tests import tiny
from tests.parity import tiny_models

peft = pytest.importorskip('peft')
safetensors = pytest.importorskip('safetensors.torch')
torch = tiny_models.torch
pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
PROJECTIONS = [
  *(f'{name}_proj' for name in 'qkvo'),
  *('gate_proj', 'up_proj', 'down_proj'),
]
RANKS = {'q_proj': 2, r'layers\.\d\.mlp\..*': 5}
CASES = {
  't5gemma': {'modules_to_save': ['pre_cross_attn_layernorm', 'cross_attn']},
  't5gemma cross': {'exclude_modules': '.*vision.*'},  # Has all attention.
  't5gemma2': {'lora_alpha': 5, 'use_rslora': True},
  'gemma2': {'target_modules': ['q_proj', 'v_proj']},
  'llama3': {'modules_to_save': ['lm_head']},
  'qwen2': {},
  'gemma2 part': {'rank_pattern': RANKS, 'alpha_pattern': {'v_proj': 2}},
  'llama3 part': {'rank_pattern': RANKS, 'use_rslora': True},
  't5': {
    'target_modules': ['q', 'v'],
    'modules_to_save': ['relative_attention_bias'],
  },
  't5_v1_1': {
    'target_modules': ['wi_0', 'wo'],
    'modules_to_save': ['lm_head', 'final_layer_norm'],
  },
  'mt5': {'target_modules': 'all-linear'},
  'umt5': {
    'target_modules': r'.*decoder.*EncDecAttention\.(q|k)',
    'modules_to_save': ['relative_attention_bias'],
  },
  't5 part': {
    'target_modules': ['q', 'wi'],
    'rank_pattern': {r'decoder\..*\.q': 2},
    'layers_to_transform': [0, 2],
  },
  'qwen2 part': {'alpha_pattern': RANKS, 'layers_to_transform': [0, 2]},
}


def _adapt(model, **options):
  """The model with random adapters of PEFT."""
  values = {'r': 3, 'lora_alpha': 7, 'target_modules': PROJECTIONS}
  values |= {'exclude_modules': r'.*vision.*|.*cross_attn.*'} | options
  adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**values))
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for weight in adapted.parameters():
      if weight.requires_grad:
        weight.normal_(0.0, 0.1, generator=generator)
  return adapted.eval()


# T5's classes name modules alike.
@pytest.mark.long
@pytest.mark.parametrize(
  'name', tiny.slow_except(CASES.keys() - {'t5_v1_1', 'mt5'}, CASES)
)
def test_adapters_come_in_and_go_out(saved, tmp_path, name):
  model, folder, _ = saved(name.split()[0])
  case = tiny_models.CASES[name.split()[0]]
  rows = tiny_models.batch(case)
  theirs = _adapt(model, **CASES[name])
  theirs.save_pretrained(tmp_path / 'theirs')
  flags = [f'--source={tmp_path}/theirs', f'--base={folder}']
  flags += [f'--output={tmp_path}/run', '--vocab_multiple=8']
  assert tiny.convert('import', *flags) == 0
  ours = encdec_adapt.load(tmp_path / 'run', encoder_window=case.encoder_window)
  expected = tiny_models.their_logits(theirs, rows)
  np.testing.assert_allclose(
    tiny_models.our_logits(ours, rows), expected, rtol=0, atol=TOLERANCE
  )
  plain = tiny_models.their_logits(model, rows)
  assert np.abs(plain - expected).max() > 100 * TOLERANCE

  flags = [f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/ours']
  assert tiny.convert('export', *flags, '--layout=peft') == 0
  first, second = (
    safetensors.load_file(tmp_path / x / 'adapter_model.safetensors')
    for x in ('theirs', 'ours')
  )
  atol = TOLERANCE
  if 'part' not in name:  # Ours have a single rank, in every layer.
    assert first.keys() == second.keys()
    for key, value in first.items():
      assert torch.equal(value, second[key]), key
    atol = 1e-6
  again = peft.PeftModel.from_pretrained(
    copy.deepcopy(model), tmp_path / 'ours'
  )
  np.testing.assert_allclose(
    tiny_models.their_logits(again.eval(), rows), expected, rtol=0, atol=atol
  )


def test_float16_is_merged_in_float32(saved, tmp_path):
  model, folder, _ = saved('qwen2')
  theirs = _adapt(model).to(torch.float16)
  theirs.save_pretrained(tmp_path / 'theirs')
  flags = [f'--source={tmp_path}/theirs', f'--base={folder}']
  assert tiny.convert('import', *flags, f'--output={tmp_path}/run') == 0
  name = 'base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight'
  stored = safetensors.load_file(
    tmp_path / 'theirs' / 'adapter_model.safetensors'
  )
  a, b = (stored[name.format(x)].double().numpy() for x in 'AB')
  whole = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
  arrays = model_on_disk.open_model(tmp_path / 'run').arrays()
  np.testing.assert_allclose(
    np.asarray(arrays['decoder/blocks/layer_0/mlp/down'])[1],
    (whole + 7 / 3 * b @ a).T,
    atol=1e-6,
  )
  export = [f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/ours']
  with pytest.raises(errors.UserError, match='dtype=float16 is for whole'):
    tiny.convert('export', *export, '--layout=peft', '--dtype=float16')


def test_bfloat16_stays_and_damage_is_named(saved, tmp_path):
  model, folder, _ = saved('gemma2')
  theirs, file = tmp_path / 'theirs', 'adapter_model.safetensors'
  _adapt(model).to(torch.bfloat16).save_pretrained(theirs)
  flags = [f'--source={theirs}', f'--base={folder}']
  assert tiny.convert('import', *flags, f'--output={tmp_path}/run') == 0
  export = [f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/ours']
  assert tiny.convert('export', *export, '--layout=peft') == 0
  first, second = (
    safetensors.load_file(tmp_path / x / file) for x in ('theirs', 'ours')
  )
  assert first.keys() == second.keys()
  for key, value in first.items():
    assert value.dtype == torch.bfloat16
    assert torch.equal(value, second[key].to(torch.bfloat16)), key
  flags.append(f'--output={tmp_path}/refused')
  content = (theirs / file).read_bytes()
  (theirs / file).write_bytes(content[:-9])
  with pytest.raises(errors.UserError, match='no complete safetensors file'):
    tiny.convert('import', *flags)
  (theirs / file).unlink()
  with pytest.raises(errors.UserError, match=f'has no {file}'):
    tiny.convert('import', *flags)


@pytest.mark.parametrize(
  'name, options, words',
  [
    ('gemma2', {'use_dora': True}, 'use_dora'),
    ('gemma2', {'lora_alpha': 0}, 'lora_alpha is 0'),
    (
      'gemma2',
      {'target_modules': ['q_proj', 'embed_tokens']},
      'embed_tokens.* tied to',
    ),
    ('gemma2', {'modules_to_save': ['embed_tokens']}, 'embed_tokens.* tied to'),
    ('gemma2', {'modules_to_save': ['lm_head']}, 'lm_head.* tied to'),
    ('t5', {'target_modules': ['q', 'shared']}, 'shared.* tied to'),
  ],
)
def test_what_has_no_counterpart_is_refused(
  saved, tmp_path, name, options, words
):
  model, folder, _ = saved(name)
  _adapt(model, **options).save_pretrained(tmp_path / 'theirs')
  flags = [f'--source={tmp_path}/theirs', f'--output={tmp_path}/run']
  with pytest.raises(errors.UserError, match=words):
    tiny.convert('import', *flags, f'--base={folder}')


def test_adapters_of_another_model_are_refused(saved, tmp_path):
  model, _, _ = saved('gemma2')
  _, other, _ = saved('qwen2')
  _adapt(model).save_pretrained(tmp_path / 'theirs')
  config = tmp_path / 'theirs' / 'adapter_config.json'
  values = json.loads(config.read_text())
  values['base_model_name_or_path'] = str(other)
  config.write_text(json.dumps(values | {'r': 4}))
  flags = [f'--source={tmp_path}/theirs', f'--output={tmp_path}/run']
  with pytest.raises(errors.UserError, match='of another model'):
    tiny.convert('import', *flags)
  assert not (tmp_path / 'run').exists()
  assert model_on_disk.open_model(other).adapters is None


def test_adapters_of_a_t5_encoder(tmp_path):
  settings = tiny_models.transformers.T5Config(**tiny_models.T5)
  case = tiny_models.Case('T5EncoderModel', lambda: settings, '')
  model, folder = tiny_models.make(case), tmp_path / 'model'
  model.save_pretrained(folder)
  theirs = _adapt(model, target_modules='all-linear')
  theirs.save_pretrained(tmp_path / 'theirs')
  flags = [f'--source={tmp_path}/theirs', f'--base={folder}']
  assert tiny.convert('import', *flags, f'--output={tmp_path}/run') == 0
  flags = [f'--checkpoint={tmp_path}/run', f'--output={tmp_path}/ours']
  assert tiny.convert('export', *flags, '--layout=peft') == 0
  again = peft.PeftModel.from_pretrained(model, tmp_path / 'ours').eval()
  rows = tiny_models.batch(tiny_models.CASES['t5'])
  tokens = torch.tensor(rows.encoder).long()
  mask = torch.tensor(rows.encoder_mask)
  with torch.no_grad():
    expected = theirs(tokens, mask.long()).last_hidden_state
    exported = again(tokens, mask.long()).last_hidden_state
  assert torch.equal(expected[mask], exported[mask])
  ours = encdec_adapt.load(tmp_path / 'run')
  got = np.asarray(ours.encode(rows.encoder, rows.encoder_mask))
  np.testing.assert_allclose(
    got[rows.encoder_mask], expected[mask].numpy(), rtol=0, atol=TOLERANCE
  )
