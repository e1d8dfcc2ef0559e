"""Tokens to a loss."""

import math

import pytest
from scipy import stats

from encdec_adapt.base import errors
from encdec_adapt.lab import crossings


def test_a_loss_is_interpolated_in_the_logarithm_of_the_tokens():
  tokens, losses = [0, 100, 400, 1600], [9.0, 4.0, 3.0, 2.5]
  assert crossings.crossing(tokens, losses, 3.5) == pytest.approx(200)
  assert crossings.crossing(tokens, losses, 2.5) == 1600
  # Before the first evaluation after step 0, at an unknown number of tokens.
  assert crossings.crossing(tokens, losses, 5.0) is None
  assert crossings.upper_bound(tokens, losses, 5.0) == 100
  assert crossings.upper_bound(tokens, losses, 3.5) is None
  assert crossings.crossing(tokens, losses, 2.4) is None


def test_a_ratio_over_seeds():
  found = crossings.log_ratio([200, 400, 800], [100, 100, 100], 0.9)
  assert found.effect == pytest.approx(math.log(4)) and found.seeds == 3
  half = stats.t.ppf(0.95, 2) * math.log(2) / math.sqrt(3)
  want = math.log(4) - half, math.log(4) + half
  assert (found.low, found.high) == pytest.approx(want)
  assert crossings.log_ratio([200, None], [100, 100]) is None
  assert crossings.log_ratio([200], [100]).high == math.inf


def test_schedules_that_decay_to_the_last_step_are_refused():
  crossings.check_schedule('pair', 'rsqrt')
  with pytest.raises(errors.UserError, match='pair .*cosine.* constant'):
    crossings.check_schedule('pair', 'cosine')
