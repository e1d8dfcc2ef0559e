"""Tokens to a loss."""

import math

import pytest
from scipy import stats

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import crossings


def test_a_loss_is_interpolated_in_the_logarithm_of_the_tokens():
  tokens, losses = [0, 100, 400, 1600], [9.0, 4.0, 3.0, 2.5]
  assert crossings.crossing(tokens, losses, 3.5) == pytest.approx(200)
  assert crossings.crossing(tokens, losses, 2.5) == 1600
  assert crossings.crossing(tokens, losses, 5.0) == 100
  assert crossings.crossing(tokens, losses, 2.4) is None


def test_a_ratio_over_seeds():
  found = crossings.mean_ratio([200, 400, 800], [100, 100, 100], 0.9)
  assert found.value == pytest.approx(4)
  half = stats.t.ppf(0.95, 2) * math.log(2) / math.sqrt(3)
  want = 4 * math.exp(-half), 4 * math.exp(half)
  assert (found.low, found.high) == pytest.approx(want)
  assert crossings.mean_ratio([200, None], [100, 100]) is None
  single = crossings.mean_ratio([200], [100])
  assert (single.value, single.low) == (pytest.approx(2), None)


def test_schedules_that_decay_to_the_last_step_are_refused():
  crossings.check_schedule('pair', 'rsqrt')
  with pytest.raises(errors.UserError, match='pair .*cosine.* constant'):
    crossings.check_schedule('pair', 'cosine')
