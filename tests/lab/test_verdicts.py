"""Verdicts, and their planned power."""

import pytest
from scipy import stats

from encdec_adapt.lab import variances, verdicts


@pytest.mark.parametrize(
  'direction, effect, low, high, want',
  [
    # With a smallest difference of 2.
    ('greater', 2.0, 0.1, 3.9, 'reproduced'),
    ('greater', 1.9, 0.1, 3.7, 'positive, size open'),
    ('greater', 1.0, 0.1, 1.9, 'no difference'),
    ('greater', 2.0, 0.0, 4.0, 'undecided'),
    ('greater', -2.0, -3.9, -0.1, 'contradicted'),
    ('greater', -1.9, -3.7, -0.1, 'negative, size open'),
    ('greater', -1.0, -1.9, -0.1, 'no difference'),
    ('greater', -1.2, -2.5, 0.1, 'undecided'),
    ('greater', 0.0, -1.9, 1.9, 'no difference'),
    ('less', -2.0, -3.9, -0.1, 'reproduced'),
    ('less', -1.9, -3.7, -0.1, 'positive, size open'),
    ('less', 2.0, 0.1, 3.9, 'contradicted'),
    ('equal', 0.0, -1.9, 1.9, 'reproduced'),
    ('equal', 1.0, 0.1, 1.9, 'reproduced'),
    ('equal', 2.5, 2.0, 3.0, 'contradicted'),
    ('equal', -2.5, -3.0, -2.0, 'contradicted'),
    ('equal', -0.5, -2.0, 1.0, 'undecided'),
    ('no better', -3.5, -9.0, 1.9, 'reproduced'),
    ('no better', 2.0, 0.1, 3.9, 'contradicted'),
    ('no better', 1.9, 0.1, 3.7, 'undecided'),
    ('greater', *[float('nan')] * 3, 'undecided'),
  ],
)
def test_verdicts(direction, effect, low, high, want):
  assert verdicts.verdict(direction, 2.0, effect, low, high) == want


def test_less_of_a_loss_is_better():
  for values, want in (
    ((3.5, -1.9, 9.0), 'reproduced'),
    ((-2.5, -4.9, -0.1), 'contradicted'),
  ):
    found = verdicts.verdict('no better', 2.0, *values, lower_is_better=True)
    assert found == want


def test_the_level_of_primary_claims():
  assert verdicts.level(1) == 0.95 and verdicts.level(5) == pytest.approx(0.99)


def _detectable(
  direction, smallest, seed=0.0, group=0.0, residual=1e-12, level=0.95
):
  components = variances.Components(seed, group, residual, (4, 39, 156), 5, 40)
  return verdicts.detectable(direction, smallest, components, 5, 40, level)


def test_the_power_of_a_t_test():
  # Seeds alone: a t test of 5 of them. With a tiny smallest difference, an
  # estimate above it is all but implied by the interval.
  effect = _detectable('greater', 1e-3, seed=1.0)
  above = stats.nct.sf(stats.t.ppf(0.975, 4), 4, effect * 5**0.5)
  assert above == pytest.approx(0.8, abs=0.03)


def test_at_the_smallest_difference_at_most_half_is_reproduced():
  # Without noise to speak of, the estimate is above m at any effect above m.
  assert _detectable('greater', 2.0) == pytest.approx(2.0, abs=1e-4)
  # The estimate has a deviation of .45: .84 of it above m has 80 %.
  effect = _detectable('greater', 5.0, seed=1.0)
  assert effect == pytest.approx(5.0 + 0.84 / 5**0.5, abs=0.05)


def test_a_stricter_level_detects_less():
  strict = verdicts.level(5)
  assert _detectable('less', 0.5, 0.5, 4.0, 2.0) < _detectable(
    'less', 0.5, 0.5, 4.0, 2.0, strict
  )


def test_claims_of_equality_and_of_no_better():
  # The half width is 1.24 deviations on average.
  assert 6 < _detectable('equal', 9.0, seed=1.0) < 8.5
  assert _detectable('equal', 0.1, seed=1.0) is None
  # Where truth is 3 deviations worse, high is below 0.1.
  assert -3.5 < _detectable('no better', 0.1, seed=1.0) < -1


@pytest.mark.parametrize(
  'direction, effect, is_low',
  [
    ('greater', 4.0, False),
    ('less', 4.1, True),
    ('equal', None, True),
    ('equal', 0.5, False),
    ('no better', -0.5, True),
    ('no better', 0.5, False),
  ],
)
def test_low_power(direction, effect, is_low):
  assert verdicts.is_low(direction, 2.0, effect) == is_low
