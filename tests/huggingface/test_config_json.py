"""config.json of every family, in both spellings, and back."""

import dataclasses

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import config_json, families
from encdec_adapt.models import model_config

SIZES = dict(
  vocab_size=100,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=4,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
)


def stack_of(model_type, **fields):
  raw = {'model_type': model_type, **SIZES, **fields}
  return config_json.model_from_raw(raw)[0].decoder


LLAMA3 = dict(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)


@pytest.mark.parametrize(
  'model_type, old, new',
  [
    ('gemma2', {'rope_theta': 5e3}, {'rope_theta': 5e3}),
    (
      'llama',
      {'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', **LLAMA3}},
      {'rope_theta': 5e5, 'rope_type': 'llama3', **LLAMA3},
    ),
    (
      'llama',
      {'rope_theta': 5e5, 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      {'rope_theta': 5e5, 'rope_type': 'linear', 'factor': 2.0},
    ),
    (
      'gemma3_text',
      {
        'rope_theta': 1e6,
        'rope_local_base_freq': 2e4,
        'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
      },
      {
        'full_attention': {
          'rope_type': 'linear',
          'rope_theta': 1e6,
          'factor': 8.0,
        },
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 2e4},
      },
    ),
  ],
)
def test_both_spellings_of_rotary_fields(model_type, old, new):
  assert stack_of(model_type, **old) == stack_of(
    model_type, rope_parameters=new
  )


@pytest.mark.parametrize(
  'model_type, fields, pattern',
  [
    ('gemma2', {}, ('local', 'global')),
    ('gemma3_text', {'num_hidden_layers': 13}, ('local',) * 5 + ('global',)),
    ('gemma3_text', {'sliding_window_pattern': 2}, ('local', 'global')),
    ('llama', {}, ('global',)),
    ('mistral', {}, ('local',)),
    ('mistral', {'sliding_window': None}, ('global',)),
    ('mistral', {'sliding_window': 16}, ('local',)),
    ('qwen2', {'max_window_layers': 1}, ('global',)),
    (
      'qwen2',
      {'use_sliding_window': True, 'max_window_layers': 1},
      ('global', 'local', 'local', 'local'),
    ),
    (
      'qwen3',
      {
        'layer_types': ['full_attention', 'sliding_attention'] * 2,
        'sliding_window': 8,
      },
      ('global', 'local'),
    ),
  ],
)
def test_patterns(model_type, fields, pattern):
  assert stack_of(model_type, **fields).pattern == pattern


@pytest.mark.parametrize('model_type', families.FAMILIES)
def test_families_come_back(model_type):
  stack = stack_of(model_type, rope_theta=123.0)
  raw, layout = config_json.raw_from_model(
    model_config.DecoderOnlyConfig(stack)
  )
  back, same = config_json.model_from_raw(raw)
  assert back.decoder == stack
  assert same == layout


def test_number_of_experts_in_both_spellings():
  fields = dict(moe_intermediate_size=16, num_experts_per_tok=2)
  one = stack_of('qwen3_moe', num_experts=6, **fields)
  assert one.experts == 6
  assert one == stack_of('qwen3_moe', num_local_experts=6, **fields)
  assert stack_of('mixtral', num_experts=6) == stack_of(
    'mixtral', num_local_experts=6
  )


def test_dense_layers_come_first_or_not_at_all():
  fields = dict(num_experts=6, num_experts_per_tok=2)
  assert stack_of('qwen3_moe', **fields).dense_layers == 0
  led = stack_of('qwen3_moe', **fields, mlp_only_layers=[1, 0])
  assert led.dense_layers == 2
  for wrong in ({'mlp_only_layers': [1]}, {'decoder_sparse_step': 2}):
    with pytest.raises(errors.UserError, match='only before those with them'):
      stack_of('qwen3_moe', **fields, **wrong)


@pytest.mark.parametrize(
  'model_type, pattern, kind',
  [
    ('mistral', ('local',), 'mistral'),
    ('mistral', ('global',), 'llama'),
    ('mistral', ('local', 'global'), None),
    ('mixtral', ('local',), 'mixtral'),
    ('mixtral', ('local', 'global'), None),
    ('qwen3_moe', ('local',), 'qwen3_moe'),
    ('qwen3_moe', ('global', 'local'), None),
  ],
)
def test_windows_only_where_the_class_looks_at_them(model_type, pattern, kind):
  stack = dataclasses.replace(stack_of(model_type), pattern=pattern, window=8)
  model = model_config.DecoderOnlyConfig(stack)
  if kind is None:
    with pytest.raises(errors.UserError, match='local and global layers'):
      config_json.raw_from_model(model)
    return
  raw, _ = config_json.raw_from_model(model)
  assert raw['model_type'] == kind


def test_gemma3_with_images_is_read_for_its_text():
  text = {**SIZES, 'model_type': 'gemma3_text'}
  raw = {'model_type': 'gemma3', 'text_config': text, 'vision_config': {}}
  assert config_json.model_from_raw(raw)[0].decoder == stack_of('gemma3_text')


@pytest.mark.parametrize(
  'raw, message',
  [
    ({'model_type': 'gpt2'}, "model_type 'gpt2'; supported are gemma2"),
    ({'model_type': 'llama', 'hidden_act': 'relu'}, "hidden_act = 'relu'"),
    (
      {'model_type': 'llama', 'rope_scaling': {'rope_type': 'yarn'}},
      "rotary embedding by 'yarn'",
    ),
    (
      {
        'model_type': 'llama',
        'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0},
      },
      "without 'low_freq_factor'",
    ),
    (
      {'model_type': 'gemma2', 'layer_types': ['full_attention']},
      'lists 1 layer_types for 4 layers',
    ),
    (
      {'model_type': 'llama', 'layer_types': ['sliding_attention'] * 4},
      'llama has full_attention only',
    ),
    (
      {
        'model_type': 'mistral',
        'sliding_window': 8,
        'layer_types': ['sliding_attention', 'full_attention'] * 2,
      },
      'mistral has sliding_attention only',
    ),
    (
      {'model_type': 'gemma3_text', 'use_bidirectional_attention': True},
      'only causal decoders',
    ),
    (
      {'model_type': 'gemma3_text', 'rope_parameters': {'rope_theta': 5e5}},
      'give them as full_attention and as sliding_attention',
    ),
    (
      {'model_type': 'llama', 'quantization_config': {'bits': 4}},
      'has a quantization_config',
    ),
  ],
)
def test_configs_that_we_have_no_model_for(raw, message):
  with pytest.raises(errors.UserError, match=message):
    config_json.model_from_raw({**SIZES, **raw})


def pair_raw(**decoder):
  """A T5Gemma's config.json."""
  stack = model_config.encoder_decoder(stack_of('gemma2'), stack_of('gemma2'))
  raw, _ = config_json.raw_from_model(stack)
  raw['decoder'] |= decoder
  return raw


def test_a_pair_needs_both_parts():
  raw = pair_raw()
  del raw['encoder']
  with pytest.raises(errors.UserError, match="needs an object 'encoder'"):
    config_json.model_from_raw(raw)


def test_cross_attention_has_the_width_of_the_encoder():
  assert pair_raw()['decoder']['cross_attention_hidden_size'] == 32
  raw = pair_raw(cross_attention_hidden_size=48)
  with pytest.raises(errors.UserError, match='= 48; the hidden_size .* is 32'):
    config_json.model_from_raw(raw)
  raw = pair_raw(cross_attention_hidden_size=None)
  assert config_json.model_from_raw(raw)[0].decoder.cross_width == 32


def test_the_window_of_an_encoder_is_a_field_of_ours():
  raw = {**pair_raw(), 'encoder_window': 'inclusive'}
  model, _ = config_json.model_from_raw(raw)
  assert model.encoder.window_rule == 'inclusive'
  again, _ = config_json.raw_from_model(model)
  assert again['encoder_window'] == 'inclusive'
  raw['encoder_window'] = 'centered'
  with pytest.raises(errors.UserError, match="encoder_window = 'centered'; it"):
    config_json.model_from_raw(raw)


def test_a_window_is_exported_only_as_a_class_that_has_it():
  """Llama's class would load such a file, and read every token."""
  stack = stack_of('mistral', sliding_window=8)
  raw, _ = config_json.raw_from_model(model_config.DecoderOnlyConfig(stack))
  assert raw['architectures'] == ['MistralForCausalLM']
  mixed = dataclasses.replace(stack, pattern=('local', 'global'))
  with pytest.raises(errors.UserError, match='mistral: '):
    config_json.raw_from_model(model_config.DecoderOnlyConfig(mixed))


def test_models_without_a_class_say_why():
  stack = dataclasses.replace(stack_of('llama'), final_softcap=3.0)
  with pytest.raises(errors.UserError, match='llama: final_softcap is 3.0'):
    config_json.raw_from_model(model_config.DecoderOnlyConfig(stack))
  llama = stack_of('llama')
  with pytest.raises(errors.UserError, match='t5gemma: '):
    config_json.raw_from_model(model_config.encoder_decoder(llama, llama))


def test_a_pair_of_another_kind_says_what_it_has():
  stack = stack_of('gemma3_text')
  model = model_config.encoder_decoder(stack, stack, cross_merged=True)
  words = (
    't5gemma: its models have two tables and separate cross-attention; this'
    ' one has two tables and merged attention'
  )
  with pytest.raises(errors.UserError, match=words):
    config_json.raw_from_model(model)
