"""Whatever a config.json says, it is read or refused by name."""

import copy

import pytest

from encdec_adapt.interop import model_configs
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import presets
from encdec_adapt.runtime import errors
from tests.interop import test_model_configs

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
_FAMILIES = ['gemma2', 'gemma3_text', 'llama', 'mistral', 'qwen2', 'qwen3']


def config_json(name):
  if name == 't5gemma':
    stack = presets.stack('toy_small', window=8)
    model = config_lib.encoder_decoder(stack, stack)
  else:
    stack = test_model_configs.stack_of(name, sliding_window=8)
    model = config_lib.DecoderOnlyConfig(stack)
  return model_configs.raw_from_model(model)[0]


def paths(raw, above=()):
  """Every field, those of objects inside too."""
  for key, value in raw.items():
    yield (*above, key)
    if isinstance(value, dict):
      yield from paths(value, (*above, key))


@pytest.mark.parametrize('name', [*_FAMILIES, 't5gemma'])
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
        model_configs.model_from_raw(changed, 'here')
      except errors.UserError as error:
        refused += 1
        assert 'here' in str(error) or 'must be' in str(error)
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
  raw = {'model_type': 'gemma2', **test_model_configs.SIZES, **fields}
  with pytest.raises(errors.UserError, match=words):
    model_configs.model_from_raw(raw, 'here')
