"""Crossings: tokens after which a loss curve reaches a given loss.

Curves come from runs with a learning rate independent of their length, or from
separate runs of each length: under a decay to the last step, an intermediate
loss says little about a run of that length. This module imports nothing from
the package.
"""

from collections.abc import Sequence
import itertools


def crossing(
  tokens: Sequence[float], losses: Sequence[float], target: float
) -> float | None:
  """Returns the tokens at which a curve first reaches a loss.

  The loss is interpolated linearly in the logarithm of the tokens.

  Args:
    tokens: tokens read at each evaluation, ascending.
    losses: loss at each evaluation, in nats.
    target: loss to reach.

  Returns:
    None if the curve stays above, or only has an `upper_bound`.
  """
  points = _after_start(tokens, losses)
  if upper_bound(tokens, losses, target) is not None:
    return None
  for (start, previous), (end, loss) in itertools.pairwise(points):
    if loss <= target:
      share = (previous - target) / (previous - loss)
      return start * (end / start) ** share
  return None


def upper_bound(
  tokens: Sequence[float], losses: Sequence[float], target: float
) -> float | None:
  """Returns the tokens of the first evaluation, if it reaches the loss.

  Args:
    tokens: tokens read at each evaluation, ascending.
    losses: loss at each evaluation, in nats.
    target: loss to reach.

  Returns:
    None if the curve starts above the loss.
  """
  points = _after_start(tokens, losses)
  return points[0][0] if points and points[0][1] <= target else None


def _after_start(
  tokens: Sequence[float], losses: Sequence[float]
) -> list[tuple[float, float]]:
  return [x for x in zip(tokens, losses, strict=True) if x[0] > 0]
