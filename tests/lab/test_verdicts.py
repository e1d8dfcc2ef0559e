"""Verdicts, and their planned power."""

import pytest
from scipy import stats

from encdec_adapt.lab import variances, verdicts


@pytest.mark.parametrize(
  'direction, low, high, want',
  [
    # With a smallest difference of 2.
    ('greater', 0.1, 2.0, 'reproduced'),
    ('greater', 0.1, 1.9, 'no difference'),
    ('greater', 0.0, 2.1, 'undecided'),
    ('greater', -2.0, -0.1, 'contradicted'),
    ('greater', -1.9, -0.1, 'no difference'),
    ('greater', -2.5, 0.1, 'undecided'),
    ('greater', -1.9, 1.9, 'no difference'),
    ('less', -2.0, -0.1, 'reproduced'),
    ('less', 0.1, 2.0, 'contradicted'),
    ('equal', -1.9, 1.9, 'reproduced'),
    ('equal', 0.1, 1.9, 'reproduced'),
    ('equal', 2.0, 3.0, 'contradicted'),
    ('equal', -3.0, -2.0, 'contradicted'),
    ('equal', -2.0, 1.0, 'undecided'),
    ('no better', -9.0, 1.9, 'reproduced'),
    ('no better', 0.1, 2.0, 'contradicted'),
    ('no better', -0.1, 2.0, 'undecided'),
    ('greater', float('nan'), float('nan'), 'undecided'),
  ],
)
def test_verdicts(direction, low, high, want):
  assert verdicts.verdict(direction, 2.0, low, high) == want


def test_less_of_a_loss_is_better():
  for bounds, want in (
    ((-1.9, 9.0), 'reproduced'),
    ((-3.0, -0.1), 'contradicted'),
  ):
    found = verdicts.verdict('no better', 2.0, *bounds, lower_is_better=True)
    assert found == want


def test_the_level_of_primary_claims():
  assert verdicts.level(1) == 0.95 and verdicts.level(5) == pytest.approx(0.99)


def _power(
  direction, smallest, seed=0.0, group=0.0, residual=1e-12, level=0.95
):
  components = variances.Components(seed, group, residual, (4, 39, 156), 5, 40)
  return verdicts.planned_power(direction, smallest, components, 5, 40, level)


def test_the_power_of_a_t_test():
  # Seeds alone: a t test of 5 of them, at an effect of 1.5 deviations.
  power = _power('greater', 1.5, seed=1.0)
  above = lambda effect: stats.nct.sf(stats.t.ppf(0.975, 4), 4, effect * 5**0.5)  # noqa: E731
  # That l > 0, less the 2.5 % in which u is below m.
  assert power.reproduced == pytest.approx(above(1.5) - 0.025, abs=0.02)
  assert above(power.effect) == pytest.approx(0.8, abs=0.03)


def test_power_grows_with_the_smallest_difference_and_falls_with_the_level():
  weak, strong = (_power('less', m, 0.5, 4.0, 2.0) for m in (0.5, 2.0))
  strict = _power('less', 0.5, 0.5, 4.0, 2.0, verdicts.level(5))
  assert weak.reproduced < strong.reproduced
  assert weak.no_difference < strong.no_difference
  assert strict.reproduced < weak.reproduced and strict.effect > weak.effect


def test_claims_of_equality_and_of_no_better():
  clear, hopeless = (_power('equal', m, seed=1.0) for m in (9.0, 0.1))
  assert clear.reproduced == 1 and clear.no_difference is None
  # The half width is 1.24 deviations on average.
  assert 6 < clear.effect < 8.5
  assert hopeless.reproduced < 0.05 and hopeless.effect is None
  # Where truth is 3 deviations worse, high is below 0.1.
  assert -3.5 < _power('no better', 0.1, seed=1.0).effect < -1
