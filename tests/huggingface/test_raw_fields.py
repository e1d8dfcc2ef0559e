"""Whatever a config.json says, it is read or refused by name."""

import copy

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import config_json as config_json_lib
from encdec_adapt.models import model_config, presets
from tests.huggingface import test_config_json

_NONSENSE = [
  None,
  -1,
  0,
  'x',
  [],
  {},
  1.5,
  True,
  float('inf'),
  [1],
  {'a': 1},
  10**30,
]
_FAMILIES = [
  'gemma2',
  'gemma3_text',
  'llama',
  'mistral',
  'qwen2',
  'qwen3',
  'qwen2_moe',
  'qwen3_moe',
]


def config_json(name):
  if name == 't5gemma':
    stack = presets.stack('toy_small', window=8)
    model = model_config.encoder_decoder(stack, stack)
  elif name == 't5gemma2':
    stack = test_config_json.stack_of('gemma3_text', sliding_window=8)
    model = model_config.t5gemma2(stack, stack, eoi_token=7)
  else:
    stack = test_config_json.stack_of(name, sliding_window=8)
    model = model_config.DecoderOnlyConfig(stack)
  return config_json_lib.raw_from_model(model)[0]


def paths(raw, above=()):
  """Every field, those of objects inside too."""
  for key, value in raw.items():
    yield (*above, key)
    if isinstance(value, dict):
      yield from paths(value, (*above, key))


@pytest.mark.parametrize('name', [*_FAMILIES, 't5gemma', 't5gemma2'])
def test_nonsense_in_any_field_is_read_or_refused(name):
  raw = config_json(name)
  refused = 0
  for path in paths(raw):
    for value in _NONSENSE:
      changed = copy.deepcopy(raw)
      place = changed
      for key in path[:-1]:
        place = place[key]
      place[path[-1]] = value
      try:
        config_json_lib.model_from_raw(changed, 'here')
      except errors.UserError as error:
        refused += 1
        assert 'here' in str(error)
  assert refused > 100


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'hidden_size': '32'}, "hidden_size = '32'; it must be an integer from 1"),
    ({'num_hidden_layers': 10**6}, 'from 1 to 10000'),
    ({'rms_norm_eps': 0.0}, 'rms_norm_eps = 0.0; it must be a number above 0'),
    ({'layer_types': 'full'}, "layer_types = 'full'; it must be a list"),
    ({'tie_word_embeddings': 1}, 'tie_word_embeddings = 1; it must be true or'),
    ({'rope_scaling': 'linear'}, "rope_scaling = 'linear'; it must be an obj"),
    (
      {'rope_parameters': {'sliding_attention': {}, 'full_attention': 2}},
      'full_attention = 2; it must be an object',
    ),
    (
      {'rope_parameters': {'rope_theta': '1e4'}},
      "rope_parameters of here has rope_theta = '1e4'",
    ),
  ],
)
def test_the_field_and_the_remedy_are_named(fields, words):
  raw = {'model_type': 'gemma2', **test_config_json.SIZES, **fields}
  with pytest.raises(errors.UserError, match=words):
    config_json_lib.model_from_raw(raw, 'here')


_LOW_ABOVE_HIGH = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 4.0,
  'high_freq_factor': 1.0,
  'original_max_position_embeddings': 64,
}


@pytest.mark.parametrize(
  'name, path, value, words',
  [
    (
      'gemma2',
      ('num_attention_heads',),
      3,
      r'^here: .*\(3\) is not a multiple .* heads is num_attention_heads,'
      ' kv_heads is num_key_value_heads.$',
    ),
    ('llama', ('head_dim',), 7, '^here: head_dim is 7; .* an even one.$'),
    (
      'llama',
      ('rope_parameters',),
      {'rope_theta': 1e4, **_LOW_ABOVE_HIGH},
      '^here: .* rope_high_factor is high_freq_factor',
    ),
    (
      'qwen2_moe',
      ('num_experts_per_tok',),
      61,
      '^here: .* experts_per_token is num_experts_per_tok.$',
    ),
    (
      't5gemma',
      ('encoder', 'head_dim'),
      7,
      '^encoder of here: head_dim is 7',
    ),
    (
      't5gemma2',
      ('eoi_token_index',),
      9999,
      '^here: eoi_token_index is 9999 .* below vocab_size, 100',
    ),
    (
      't5gemma2',
      ('decoder', 'hidden_size'),
      64,
      '^here has hidden_size = 32 for its encoder and 64 for its decoder',
    ),
    (
      't5gemma2',
      ('decoder', 'vocab_size'),
      50,
      '^here has vocab_size = 100 for its encoder and 50 for its decoder',
    ),
  ],
)
def test_a_contradiction_names_the_file_and_its_fields(
  name, path, value, words
):
  raw = config_json(name)
  *above, last = path
  place = raw
  for key in above:
    place = place[key]
  place[last] = value
  with pytest.raises(errors.UserError, match=words):
    config_json_lib.model_from_raw(raw, 'here')
