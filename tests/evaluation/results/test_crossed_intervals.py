"""Intervals over seeds and groups: by hand, and their coverage."""

import numpy as np
import pytest
from scipy import stats

from encdec_adapt.evaluation.results import (
  contrasts,
  crossed_intervals,
  results_store,
)

# Groups as unequal as those of Python's text: 40 with the weight of 20.
SIZES = np.exp(np.random.default_rng(7).normal(0, 0.85, 40)).round(2) * 100


def test_a_layout_by_hand():
  # Cells 1 -1 0; 4 0 2: mean 1, of the seeds 0 and 2, of the groups 2.5, -0.5
  # and 1. Squares: of the seeds 3 (1 + 1) / 1 = 6, of the groups 2 (2.25 + 2.25
  # + 0) / 2 = 4.5, of the rest (.25 + .25 + 0) 2 / 2 = 0.5.
  sums = np.array([[1.0, -1.0, 0.0], [4.0, 0.0, 2.0]])
  squares = crossed_intervals.mean_squares(sums, np.ones(3))
  got = squares.of_seeds, squares.of_groups, squares.residual
  assert got == pytest.approx((6, 4.5, 0.5))
  x = crossed_intervals.interval(sums, np.ones(3))
  # (6 + 4.5 - 0.5) / 6, and 10^2 / (36 / 1 + 20.25 / 2 + 0.25 / 2).
  assert x.error**2 == pytest.approx(10 / 6)
  assert x.freedom == pytest.approx(100 / 46.25)
  half = stats.t.ppf(0.975, 100 / 46.25) * (10 / 6) ** 0.5
  assert (x.effect, x.low, x.high) == pytest.approx((1, 1 - half, 1 + half))
  assert (x.seeds, x.groups, x.effective_groups) == (2, 3, 3)


def test_a_single_term_where_it_is_larger():
  # Seeds and groups cancel: means of 0, and all of it is residual.
  sums = np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.3]])
  squares = crossed_intervals.mean_squares(sums, np.ones(3))
  assert squares.residual > max(squares.of_seeds, squares.of_groups)
  x = crossed_intervals.interval(sums, np.ones(3))
  larger = max((squares.of_seeds, 1), (squares.of_groups, 2))
  assert (x.error**2 * 6, x.freedom) == pytest.approx(larger)


def test_weights_are_those_of_a_ratio():
  sums, weights = np.array([[2.0, 9.0]]), np.array([1.0, 3.0])
  x = crossed_intervals.interval(sums, weights)
  assert x.effect == 11 / 4 and x.effective_groups == 16 / 10
  # Cells (2 - 11 / 4) / 2 and (9 - 33 / 4) / 2 of a single seed.
  assert x.error == pytest.approx(0.375) and x.freedom == 1


def test_layouts_of_a_single_seed_or_group():
  over_groups = crossed_intervals.interval(
    np.array([[1.0, 2.0, 6.0]]), np.ones(3), 0.9
  )
  want = stats.ttest_1samp([1, 2, 6], 0)
  bounds = want.confidence_interval(0.9)
  assert (over_groups.low, over_groups.high) == pytest.approx(bounds)
  assert over_groups.p == pytest.approx(want.pvalue)
  over_seeds = crossed_intervals.interval(
    np.array([[1.0], [2.0], [6.0]]), np.ones(1), 0.9
  )
  assert (over_seeds.low, over_seeds.high) == pytest.approx(bounds)
  neither = crossed_intervals.interval(np.ones((1, 1)), np.ones(1))
  assert (neither.low, neither.high) == (-np.inf, np.inf)
  equal = crossed_intervals.interval(np.zeros((3, 4)), np.ones(4))
  assert (equal.low, equal.high, equal.p) == (0, 0, 1)


# Deviations per token over seeds, groups and the rest.
DEVIATIONS = [(0.003, 0.02, 0.01), (0.02, 0.02, 0.01), (0.003, 0.003, 0.03)]


@pytest.mark.parametrize('seeds', [3, 5])
@pytest.mark.parametrize('deviations', DEVIATIONS)
def test_coverage(seeds, deviations):
  rng, covered, effect = np.random.default_rng(seeds), 0, 0.01
  groups = tuple(f'module_{i}' for i in range(len(SIZES)))
  shapes = (seeds, 1), (1, len(SIZES)), (seeds, len(SIZES))
  for _ in range(1000):
    noise = [
      rng.normal(0, deviation, shape)
      for deviation, shape in zip(deviations, shapes, strict=True)
    ]
    losses = rng.normal(3, 0.5, len(SIZES)) * SIZES
    first, second = (
      [
        results_store.ratio_score('held_out', 'loss', row, SIZES, groups)
        for row in losses + difference * SIZES
      ]
      for difference in (np.zeros((seeds, 1)), effect + sum(noise))
    )
    x = contrasts.interval([first, second])
    covered += x.low <= effect <= x.high
  assert 900 <= covered <= 990
