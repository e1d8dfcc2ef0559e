"""Crossings: tokens after which a loss curve reaches a given loss.

Curves are of runs whose learning rate does not depend on their length (the
schedules `SCHEDULES`), or are made of runs that end at each length: under a
decay to the last step, a loss halfway is no result of training that long. The
module imports `base.errors` alone of the package.
"""

from collections.abc import Sequence
import dataclasses
import math
import statistics

from encdec_adapt.base import errors

SCHEDULES = ('constant', 'rsqrt')


@dataclasses.dataclass(frozen=True)
class Crossing:
  """Tokens to a loss, or a ratio of them, over seeds.

  Attributes:
    value: geometric mean over the seeds.
    low: lower bound of its interval; None with a single seed.
    high: upper bound.
    seeds: number of seeds.
  """

  value: float
  low: float | None
  high: float | None
  seeds: int


def check_schedule(arm: str, schedule: str) -> None:
  """Refuses a run whose curve does not show shorter runs.

  Args:
    arm: name of the arm.
    schedule: value of `config.optimizer.schedule`.

  Raises:
    UserError: names the schedules that do.
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
    None if the curve stays above; the tokens of the first evaluation after
    step 0 if it is below there, which then are an upper bound.
  """
  # The evaluation before the first step has no logarithm.
  points = [x for x in zip(tokens, losses, strict=True) if x[0] > 0]
  for i, (end, loss) in enumerate(points):
    if loss > target:
      continue
    if not i:
      return end
    start, before = points[i - 1]
    share = (before - target) / (before - loss)
    return start * (end / start) ** share
  return None


def mean_ratio(
  tokens: Sequence[float | None],
  divisors: Sequence[float | None],
  level: float = 0.95,
) -> Crossing | None:
  """Returns the ratio of the tokens of two arms over their seeds.

  The interval is Student's over the logarithms of the seeds' ratios.

  Args:
    tokens: crossing of every seed of an arm.
    divisors: those of the other arm, or tokens that they are compared with; 1
      for the tokens themselves.
    level: level of the interval.

  Returns:
    None if a seed did not cross.
  """
  from scipy import special

  if None in tokens or None in divisors:
    return None
  logs = [math.log(x / y) for x, y in zip(tokens, divisors, strict=True)]
  mean, seeds = statistics.fmean(logs), len(logs)
  if seeds == 1:
    return Crossing(math.exp(mean), None, None, seeds)
  error = statistics.stdev(logs) / math.sqrt(seeds)
  half = float(special.stdtrit(seeds - 1, (1 + level) / 2)) * error
  bounds = (math.exp(mean + sign * half) for sign in (-1, 1))
  return Crossing(math.exp(mean), *bounds, seeds)
