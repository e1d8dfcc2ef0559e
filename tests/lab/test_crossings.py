"""Tokens to a loss."""

import pytest

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
