"""config.json of every family, in both spellings, and back; refusals."""

import copy
import dataclasses

import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json, families, weights
from encdec_adapt.models import model_config

SIZES = dict(
  vocab_size=100,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=4,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  num_experts_per_tok=4,
  moe_intermediate_size=16,
  shared_expert_intermediate_size=16,
  hidden_size_per_layer_input=0,
)


def stack_of(model_type, **fields):
  if 'num_local_experts' not in fields:
    fields = {'num_experts': 60} | fields
  raw = {'model_type': model_type, **SIZES, **fields}
  return config_json.model_from_raw(raw)[0].decoder


def raw_of(name, **fields):
  """config.json of a tiny model of a family."""
  stack = 'gemma3_text' if name == 't5gemma2' else 'gemma2'
  stack = stack if name.startswith('t5gemma') else name
  stack = stack_of(stack, sliding_window=8, **fields)
  if name == 't5gemma':
    model = model_config.encoder_decoder(stack, stack)
  elif name == 't5gemma2':
    model = model_config.t5gemma2(stack, stack, eoi_token=7)
  else:
    model = model_config.DecoderOnlyConfig(stack)
  return config_json.raw_from_model(model)[0]


def test_linear_scaling_as_old_files_spell_it():
  """Parity tests compare every other field in both spellings."""
  old = {'rope_theta': 5e5, 'rope_scaling': {'type': 'linear', 'factor': 2.0}}
  new = {'rope_theta': 5e5, 'rope_type': 'linear', 'factor': 2.0}
  assert stack_of('llama', **old) == stack_of('llama', rope_parameters=new)


def test_a_window_of_null_is_none():
  assert stack_of('mistral', sliding_window=None).pattern == ('global',)


@pytest.mark.parametrize('model_type', families.FAMILIES)
def test_families_come_back(model_type):
  stack = stack_of(model_type, rope_theta=123.0)
  model = model_config.DecoderOnlyConfig(stack)
  raw, layout = config_json.raw_from_model(model)
  assert config_json.model_from_raw(raw) == (model, layout)


@pytest.mark.parametrize('model_type', ['mixtral', 'qwen3_moe'])
def test_both_names_of_the_number_of_experts(model_type):
  one = stack_of(model_type, num_experts=6)
  assert one.experts == 6 and one.dense_layers == 0
  assert one == stack_of(model_type, num_local_experts=6)


@pytest.mark.parametrize(
  'model_type, pattern, kind',
  [
    ('mistral', ('local',), 'mistral'),
    ('mistral', ('global',), 'llama'),
    ('mistral', ('local', 'global'), None),
    ('mixtral', ('local',), 'mixtral'),
    ('qwen3_moe', ('global', 'local'), None),
  ],
)
def test_a_window_is_exported_only_as_a_class_that_honours_it(
  model_type, pattern, kind
):
  """Llama's class would load such a file, and attend to every token."""
  stack = dataclasses.replace(stack_of(model_type), pattern=pattern, window=8)
  model = model_config.DecoderOnlyConfig(stack)
  if kind is None:
    with pytest.raises(
      errors.UserError, match='mistral has sliding_attention only'
    ):
      config_json.raw_from_model(model)
    return
  assert config_json.raw_from_model(model)[0]['model_type'] == kind


def test_sizes_have_no_defaults_but_gemmas():
  with pytest.raises(errors.UserError, match='here has no vocab_size'):
    config_json.model_from_raw({'model_type': 'llama'}, 'here')


def test_fields_of_a_pair():
  raw = raw_of('t5gemma')
  assert raw['decoder']['cross_attention_hidden_size'] == 32
  raw['decoder']['cross_attention_hidden_size'] = None
  raw['encoder_window'] = 'inclusive'
  model, _ = config_json.model_from_raw(raw)
  assert model.decoder.cross_width == 32
  assert model.encoder.window_rule == 'inclusive'
  assert config_json.raw_from_model(model)[0]['encoder_window'] == 'inclusive'


@pytest.mark.parametrize('role', ['prefix', 'bidirectional'])
def test_models_of_one_stack_that_are_not_causal_have_our_layout(role):
  model = model_config.DecoderOnlyConfig(model_config.StackConfig(role=role))
  with pytest.raises(errors.UserError, match=f'is causal, and not {role}'):
    config_json.raw_from_model(model)
  raw = config_json.native_from_model(model)
  assert config_json.model_from_raw(raw) == (model, weights.NATIVE)


def test_models_without_a_class_are_refused_with_a_reason():
  stack = dataclasses.replace(stack_of('llama'), final_softcap=3.0)
  with pytest.raises(errors.UserError, match='llama: final_softcap is 3.0'):
    config_json.raw_from_model(model_config.DecoderOnlyConfig(stack))
  for name, options in (('llama', {}), ('gemma3_text', {'cross_merged': True})):
    stack = stack_of(name)
    model = model_config.encoder_decoder(stack, stack, **options)
    with pytest.raises(errors.UserError, match='t5gemma: .* t5gemma2: '):
      config_json.raw_from_model(model)


# -- Refusals ----------------------------------------------------------------

_TWO = ['sliding_attention', 'full_attention'] * 2
# Family, path of a field, its value, and the error.
REFUSALS = [
  (
    'llama',
    'model_type',
    'gptj',
    "model_type 'gptj'; supported are gemma, gemma2",
  ),
  ('llama', 'hidden_act', 'relu', "hidden_act = 'relu'"),
  ('gemma', 'hidden_activation', 'gelu', "and hidden_activation = 'gelu'"),
  ('gemma2', 'hidden_activation', None, 'hidden_activation = None'),
  ('llama', 'rope_parameters', {'rope_type': 'yarn'}, "embedding by 'yarn'"),
  (
    'llama',
    'rope_parameters',
    {'rope_type': 'llama3', 'factor': 8.0},
    "without 'low_freq_factor'",
  ),
  ('gemma2', 'layer_types', ['full_attention'], '1 layer_types for 4 layers'),
  ('llama', 'layer_types', ['sliding_attention'] * 4, 'full_attention only'),
  ('mistral', 'layer_types', _TWO, 'mistral has sliding_attention only'),
  ('gemma3_text', 'use_bidirectional_attention', True, 'only causal decoders'),
  (
    'gemma3_text',
    'rope_parameters',
    {'rope_theta': 5e5},
    'give them as full_attention and sliding_attention',
  ),
  ('llama', 'quantization_config', {'bits': 4}, 'has a quantization_config'),
  ('qwen3_moe', 'mlp_only_layers', [1], 'must come before those with them'),
  ('gemma2', 'num_hidden_layers', 10**6, 'an integer from 1 to 10000'),
  ('gemma2', 'num_attention_heads', 3, '^here: .* not a multiple of kv_heads'),
  ('t5gemma', 'encoder.head_dim', 7, '^encoder of here: head_dim is 7'),
  ('t5gemma', 'encoder_window', 'centered', "encoder_window = 'centered'"),
  ('t5gemma', 'decoder.cross_attention_hidden_size', 48, '= 48; they must be'),
  ('t5gemma2', 'decoder.vocab_size', 50, '^here: .* vocab_size'),
]


def changed(raw, path, value):
  raw = place = copy.deepcopy(raw)
  *above, last = path
  for key in above:
    place = place[key]
  place[last] = value
  return raw


@pytest.mark.parametrize('name, path, value, message', REFUSALS)
def test_a_config_that_is_refused(name, path, value, message):
  raw = changed(raw_of(name), path.split('.'), value)
  with pytest.raises(errors.UserError, match=message):
    config_json.model_from_raw(raw, 'here')


NONSENSE = [None, -1, 0, 'x', [], {}, 1.5, True, float('inf'), [1], {'a': 1}]
NONSENSE.append(10**30)


def paths(raw, above=()):
  """Every field, those of inner objects too."""
  for key, value in raw.items():
    yield (*above, key)
    if isinstance(value, dict):
      yield from paths(value, (*above, key))


@pytest.mark.parametrize(
  'name',
  'gemma gemma3_text llama qwen2 qwen3_moe t5gemma t5gemma2'.split(),
)
def test_nonsense_in_any_field_is_read_or_refused(name):
  raw = raw_of(name)
  refused = 0
  for path in paths(raw):
    for value in NONSENSE:
      try:
        config_json.model_from_raw(changed(raw, path, value), 'here')
      except errors.UserError as error:
        refused += 1
        assert 'here' in str(error)
  assert refused > 100
