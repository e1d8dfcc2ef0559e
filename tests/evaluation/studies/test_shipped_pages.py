"""The pages in configs/studies: they load, and cost what they may."""

import pytest

from encdec_adapt import configs, study
from encdec_adapt.configs.studies import all as all_pages
from encdec_adapt.configs.studies import shared
from encdec_adapt.evaluation.studies import pages
from tests import tiny

SIZES = 'smoke', 'cpu', 'gpu', 'pod'
FOLDER = configs.FOLDER / 'studies'
NAMES = [name for name in all_pages.PAGES if (FOLDER / f'{name}.py').exists()]
# Held-out rows of an evaluation at most, read twice: with the prefixes of
# others, too.
ROWS = 1000
# FLOPs of a page, and of one of its runs.
MOST, MOST_RUN = 3.0e14, 6.5e12
MORE = {'adaptation': (9.0e14, 4.0e13)}
# Scratch at equal total FLOPs has the cost of its source, too.
MOST_RUNS = {'adaptation': {'scratch_total': 9.0e13}}


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def _page(name, size='cpu'):
  return study.load(f'configs/studies/{name}.py:size={size}')


def _key(page, arm):
  """Returns what identifies a run of an arm, whatever its names are."""
  items = {x.name: x for x in (*page.arms, *page.commands)}
  starts = []
  for key, text in arm.starts.items():
    reads = [items[x] for x in pages.placeholders(text) or [text]]
    starts.append(
      (
        key,
        *(
          _key(page, x) if isinstance(x, pages.Arm) else x.module + x.name
          for x in reads
        ),
      )
    )
  changes = tuple(sorted(map(str, arm.changes.items())))
  return arm.config, changes, tuple(starts), str(arm.budget)


def _costs(page):
  """Returns FLOPs of runs by what identifies them: arms, rates, evaluation."""
  size, costs = shared.Size(page.size), {}
  for arm in page.arms:
    step, steps = shared.spent(size, arm)
    for seed in page.seeds_of(arm.name):
      costs[_key(page, arm), seed] = step * steps
    for rate in page.rates:
      if rate.arm == arm.name:
        count = len(rate.values) * step * rate.steps
        costs[_key(page, arm), rate.values] = count
    # A bound: the step of a pair has its teacher's forward pass, too.
    forward = step / shared.settings(arm).train.batch_size / 3
    for evaluation in page.evaluations:
      models = evaluation.models or [x.name for x in page.arms]
      if arm.name in models and evaluation.records:
        for seed in page.seeds_of(arm.name):
          key = _key(page, arm), seed, evaluation.records
          costs[key] = 2 * ROWS * forward
  return costs


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('name', NAMES)
def test_pages_load_and_their_configurations_are_valid(name, size):
  page = _page(name, size)
  assert page.size == size
  for arm in page.arms:
    shared.settings(arm)


def test_costs_at_cpu():
  total = {}
  for name in NAMES:
    page = _page(name)
    if page.claims or page.arms:
      costs = _costs(page)
      new = {key: x for key, x in costs.items() if key not in total}
      most, most_run = MORE.get(name, (MOST, MOST_RUN))
      assert sum(new.values()) <= most, name
      for arm in page.arms:
        flops = shared.flops(shared.Size('cpu'), arm)
        limit = MOST_RUNS.get(name, {}).get(arm.name, most_run)
        assert flops <= limit, (name, arm.name)
      total |= costs
  assert sum(total.values()) <= 3.6e15
