"""Sections of keys within sections."""

import dataclasses

import pytest

from encdec_adapt.base import errors, keys


@dataclasses.dataclass(frozen=True)
class Adapters:
  rank: int = keys.key(0, 'Rank; 0: off.', at_least=0)
  targets: tuple[str, ...] = keys.key((), 'Layers.', names=True)

  def __post_init__(self):
    keys.check(self, 'config.train.lora.')


@dataclasses.dataclass(frozen=True)
class Train:
  steps: int = keys.key(1, 'Steps.')
  lora: Adapters = keys.section(Adapters, switch='rank')

  def __post_init__(self):
    keys.check(self, 'config.train.')


def test_a_section_within_a_section():
  defaults = {'steps': 1, 'lora': {'rank': 0, 'targets': ()}}
  assert keys.defaults(Train) == defaults == keys.values_of(Train())
  values = {'steps': 2, 'lora': {'rank': 4, 'targets': ['mlp']}}
  train = keys.make(Train, values)
  assert train == Train(2, Adapters(4, ('mlp',)))
  assert keys.page(Train, keys.values_of(train), '') == [
    '# Steps.',
    'steps = 2',
    '# Rank; 0: off.',
    'lora.rank = 4',
    '# Layers.',
    "lora.targets = ('mlp',)",
  ]
  assert len(keys.page(Train, defaults, '')) == 6
  assert len(keys.page(Train, defaults, '', full=False)) == 4


@pytest.mark.parametrize(
  ('lora', 'words'),
  [
    ({'rank': -1, 'targets': ()}, r'config\.train\.lora\.rank is -1'),
    (
      {'rank': 0, 'targets': ['mlp']},
      r"config\.train\.lora\.targets is \('mlp',\), .*lora\.rank is 0",
    ),
  ],
)
def test_options_out_of_bounds_or_of_a_section_that_is_off(lora, words):
  with pytest.raises(errors.UserError, match=words):
    keys.make(Train, {'steps': 1, 'lora': lora})
