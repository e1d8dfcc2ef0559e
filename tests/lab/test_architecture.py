"""The page `architecture`: what its arms have in common, and what they cost."""

import pytest

from encdec_adapt import study
from encdec_adapt.lab import stages
from encdec_adapt.models import parameters

PAGE = 'configs/studies/architecture.py'


@pytest.fixture(scope='module')
def trained():
  """Training stages at cpu by arm and seed, and choices of rates."""
  resolved = stages.resolve(study.load(f'{PAGE}:size=cpu'))
  return {n: x for n, x in resolved.items() if x.module == 'train'}


def test_arms_are_equal_in_what_their_names_say(trained):
  counts = {
    name: parameters.count(stage.settings.model)
    for name, stage in trained.items()
  }
  assert counts['causal'] == counts['all'] == counts['prefix'] == 1247360
  assert counts['half'] == counts['half_flops'] == 1248000
  assert counts['whole'] == 2110720
  flops = {name: stage.flops for name, stage in trained.items()}
  for arm in ('half_flops', 'whole'):
    assert flops[arm] == pytest.approx(flops['causal'], rel=0.01)
  tokens = {
    name: stage.settings.train.steps * stage.settings.train.batch_size * 128
    for name, stage in trained.items()
  }
  for arm in ('causal', 'prefix', 'all', 'half', 'whole'):
    assert tokens[arm] == pytest.approx(4e5, rel=0.01)


def test_little_more_than_an_hour_on_two_cores(trained):
  single = [x.flops for x in trained.values() if not x.rate]
  assert max(single) <= 6.5e12
  # With two more runs at an edge of every choice of rates.
  chosen = sum(x.flops * 5 / 3 for x in trained.values() if x.rate)
  assert sum(single) + chosen <= 3.4e14
