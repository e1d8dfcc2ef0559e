"""Crossings: tokens after which a loss curve reaches a given loss.

Curves come from runs with a learning rate independent of their length (the
schedules `SCHEDULES`), or from separate runs of each length: under a decay to
the last step, an intermediate loss says little about a run of that length. From
the package, this module imports only `base.errors` and `crossed_intervals`.
"""

from collections.abc import Sequence
import itertools

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import crossed_intervals

SCHEDULES = ('constant', 'rsqrt')


def check_schedule(arm: str, schedule: str) -> None:
  """Rejects a run with a schedule that depends on the training length.

  Args:
    arm: name of the arm.
    schedule: value of `config.optimizer.schedule`.

  Raises:
    UserError: names the accepted schedules.
  """
  if schedule not in SCHEDULES:
    raise errors.UserError(
      f'arm {arm} has config.optimizer.schedule={schedule!r}, and a claim of'
      f' tokens to a loss needs {" or ".join(SCHEDULES)}, or runs that end at'
      ' each length.'
    )


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


def log_ratio(
  tokens: Sequence[float | None],
  divisors: Sequence[float | None],
  level: float = 0.95,
) -> crossed_intervals.Interval | None:
  """Returns the logarithm of two arms' token ratio, over seeds.

  Args:
    tokens: crossing of every seed of an arm; None without one.
    divisors: crossings of the other arm, or other reference tokens; 1 for the
      tokens themselves.
    level: level of the interval.

  Returns:
    None if a seed did not cross.
  """
  if None in tokens or None in divisors:
    return None
  logs = np.log(tokens) - np.log(divisors)
  return crossed_intervals.interval(logs[:, None], np.ones(1), level)
