"""Fields left out of config.json get the defaults of transformers' class."""

import dataclasses

import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import (
  bart_json,
  class_defaults,
  config_json,
  families,
  layer_norm_json,
  t5_json,
)
from tests.parity import tiny_models

pytestmark = pytest.mark.parity

transformers = tiny_models.transformers
CLASSES = transformers.CONFIG_MAPPING  # By model type.
# The classes' defaults have parts that our models have not.
FIELDS = {
  'gemma4_text': {
    'hidden_size_per_layer_input': 0,
    'attention_k_eq_v': True,
    'num_global_key_value_heads': 2,
  }
}


def read(raw):
  """Returns the stacks of a config.json, without windows that no layer uses."""
  model, _ = config_json.model_from_raw(raw)
  return {
    name: stack
    if 'local' in stack.pattern
    else dataclasses.replace(stack, window=1)
    for name, stack in model.stacks.items()
  }


def without(raw, path):
  """Returns the object without the field at a path."""
  name, *rest = path
  if rest:
    return {**raw, name: without(raw[name], rest)}
  return {key: value for key, value in raw.items() if key != name}


def paths_of(raw, defaults):
  """Yields the path of every field that a family has a default for."""
  known = {'rope_parameters', 'rope_scaling', 'layer_types', *defaults}
  for name, value in raw.items():
    if name in ('encoder', 'decoder', 'text_config'):
      yield from ((name, *rest) for rest in paths_of(value, defaults))
    elif name in known:
      yield (name,)


@pytest.mark.parametrize(
  'model_type',
  [
    *(*families.FAMILIES, *config_json.PAIRS),
    *(*t5_json.TYPES, *layer_norm_json.TYPES, *bart_json.TYPES),
  ],
)
def test_each_field_left_out(model_type):
  whole = CLASSES[model_type](**FIELDS.get(model_type, {})).to_dict()
  pair = config_json.PAIRS.get(model_type)
  family = pair.family.model_type if pair else model_type
  if model_type in layer_norm_json.TYPES:
    defaults = layer_norm_json.TYPES[model_type].defaults
  elif model_type in bart_json.TYPES:
    defaults = bart_json.DEFAULTS
  else:
    defaults = class_defaults.DEFAULTS[family]
  # A field that the class lacks would be written, and then dropped by it.
  old = 'rope_', 'global_', 'local_rope', 'position_embedding'
  names = {name for name in defaults if not name.startswith(old)}
  assert names <= CLASSES[family]().to_dict().keys()
  paths = list(paths_of(whole, defaults))
  assert len(paths) > 3
  for path in paths:
    reduced = without(whole, path)
    expected = CLASSES[model_type](**reduced).to_dict()
    assert read(reduced) == read(expected), path


@pytest.mark.parametrize('model_type', ['gemma2', 'gemma3_text'])
def test_all_fields_left_out(model_type):
  expected = CLASSES[model_type]().to_dict()
  assert read({'model_type': model_type}) == read(expected)


@pytest.mark.parametrize(
  'fields',
  [
    {'global_head_dim': 256},  # Written as an empty per_layer_config.
    {'num_hidden_layers': 8},
    {'attention_k_eq_v': False},
  ],
)
def test_heads_of_gemma_4_by_layer_or_left_out(fields):
  fields = FIELDS['gemma4_text'] | fields
  written = transformers.Gemma4TextConfig(**fields).to_dict()
  assert 'global_head_dim' not in written
  stated = {'model_type': 'gemma4_text', **fields, 'rope_parameters': None}
  assert read(stated) == read(written)


@pytest.mark.parametrize(
  'by_layer',
  [{'5': {'head_dim': 32, 'sliding_window': 7}}, {'5': 3}, {'4': {}}],
)
def test_other_fields_of_gemma_4_by_layer_are_refused(by_layer):
  raw = transformers.Gemma4TextConfig(
    num_hidden_layers=6, **FIELDS['gemma4_text']
  ).to_dict()
  with pytest.raises(errors.UserError, match='per_layer_config .* supported'):
    read({**raw, 'per_layer_config': by_layer})


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'enable_moe_block': True}, 'has no num_experts'),
    ({'use_bidirectional_attention': 'all'}, 'use_bidirectional_attention'),
    ({'num_kv_shared_layers': 6}, 'each kind of layer needs one with keys'),
    (
      {'hidden_size_per_layer_input': 8, 'vocab_size_per_layer_input': 9},
      'vocab_size_per_layer_input = 9',
    ),
  ],
)
def test_parts_of_gemma_4_are_refused_by_name(fields, words):
  raw = {'model_type': 'gemma4_text', 'num_hidden_layers': 8}
  with pytest.raises(errors.UserError, match=words):
    read({**raw, **FIELDS['gemma4_text'], **fields})


@pytest.mark.parametrize('hidden_activation', [None, 'gelu_pytorch_tanh'])
def test_gelu_of_gemma_is_approximated_by_tanh(hidden_activation):
  raw = {**transformers.GemmaConfig().to_dict(), 'hidden_act': 'gelu'}
  expected = transformers.GemmaConfig(**raw).to_dict()
  assert expected['hidden_act'] == 'gelu_pytorch_tanh'
  assert read({**raw, 'hidden_activation': hidden_activation}) == read(expected)


@pytest.mark.parametrize(
  'rope',
  [
    {'full_attention': {'rope_type': 'linear', 'factor': 2.0}},
    {
      'full_attention': {'rope_type': 'default', 'rope_theta': 5e5},
      'sliding_attention': {'rope_type': 'default'},
    },
    {},
  ],
)
def test_rotary_fields_left_out(rope):
  raw = {'model_type': 'gemma3_text', 'rope_parameters': rope}
  expected = transformers.Gemma3TextConfig(rope_parameters=dict(rope)).to_dict()
  assert read(raw) == read(expected)
