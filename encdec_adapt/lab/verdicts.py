"""Verdicts on the claims of a study, and the effect that it can show.

With m the smallest relevant difference, x the effect in the claimed direction
and [l, u] its interval:

| claim        | reproduced        | contradicted      | no difference    |
|--------------|-------------------|-------------------|------------------|
| a difference | l > 0 and x >= m  | u < 0, x <= -m    | -m < l and u < m |
| equality     | -m < l and u < m  | l >= m or u <= -m |                  |
| "no better"  | u < m             | l > 0 and x >= m  |                  |

Any other difference with l > 0 is "positive, size open", with u < 0 "negative,
size open". All else is undecided. Where the true effect is m, at most half of
the studies reproduce a difference.

From the package, this module imports only `crossed_intervals` and `variances`.
"""

import numpy as np

from encdec_adapt.evaluation.results import crossed_intervals
from encdec_adapt.lab import variances

REPRODUCED, CONTRADICTED = 'reproduced', 'contradicted'
NO_DIFFERENCE, UNDECIDED = 'no difference', 'undecided'
POSITIVE, NEGATIVE = 'positive, size open', 'negative, size open'
# No arm of the claim is ahead of its floor by m (`pages.Evaluation.floors`).
NOT_LEARNED = 'not learned'
_POWER = 0.8
_DRAWS = 2000  # Standard error of a power of 0.8: 0.009.


def level(primary: int) -> float:
  """Returns the level of the intervals of a study's primary claims.

  Args:
    primary: number of primary claims, at least 1 (Bonferroni).
  """
  return 1 - 0.05 / primary


def verdict(
  direction: str,
  smallest: float,
  effect: float,
  low: float,
  high: float,
  *,
  lower_is_better: bool = False,
) -> str:
  """Returns the verdict on a claim.

  Args:
    direction: the effect is 'greater' or 'less' than 0, 'equal' to it, or 'no
      better' than it.
    smallest: smallest relevant difference, above 0.
    effect: the effect.
    low: lower bound of its interval.
    high: upper bound of the interval.
    lower_is_better: whether lower values are better, for 'no better'.
  """
  if direction == 'less' or (direction == 'no better' and lower_is_better):
    effect, low, high = -effect, -high, -low
  is_small = -smallest < low and high < smallest
  if direction == 'equal':
    is_reproduced = is_small
    is_contradicted = low >= smallest or high <= -smallest
  elif direction == 'no better':
    is_reproduced = high < smallest
    is_contradicted = low > 0 and effect >= smallest
  else:
    if is_small:
      return NO_DIFFERENCE
    is_reproduced = low > 0 and effect >= smallest
    is_contradicted = high < 0 and effect <= -smallest
    if low > 0 and not is_reproduced:
      return POSITIVE
    if high < 0 and not is_contradicted:
      return NEGATIVE
  if is_reproduced:
    return REPRODUCED
  return CONTRADICTED if is_contradicted else UNDECIDED


def is_low(direction: str, smallest: float, effect: float | None) -> bool:
  """Returns whether a claim has low power.

  Args:
    direction: direction of the claim; see `verdict`.
    smallest: smallest relevant difference.
    effect: result of `detectable`.
  """
  if effect is None:
    return True
  if direction in ('greater', 'less'):
    return effect > 2 * smallest
  return effect < 0


def detectable(
  direction: str,
  smallest: float,
  components: variances.Components,
  seeds: int,
  groups: int,
  level: float,
) -> float | None:
  """Returns the effect at which a claim is reproduced with 80 % power.

  Args:
    direction: direction of the claim; see `verdict`.
    smallest: smallest relevant difference.
    components: variances of paired differences, from `variances.planned`.
    seeds: number of seeds, at least 2.
    groups: number of groups of examples, at least 2.
    level: level of the interval.

  Returns:
    The effect in the claimed direction: the smallest for a difference, the
    largest for 'equal' and 'no better' (better is positive); None if there is
    none.
  """
  # Losses are negated with their direction.
  direction = 'greater' if direction == 'less' else direction
  seed, group, residual = components.seed, components.group, components.residual
  rng = np.random.default_rng(0)  # The same draws for every effect.
  squares = crossed_intervals.MeanSquares(seeds, groups, 0.0, 0.0, 0.0)
  draws = [
    expected * rng.chisquare(freedom, _DRAWS) / freedom
    for expected, freedom in zip(
      (groups * seed + residual, seeds * group + residual, residual),
      squares.freedoms,
      strict=True,
    )
  ]
  squares = crossed_intervals.MeanSquares(seeds, groups, *draws)
  variance, freedom = squares.variance_of_mean()
  half = crossed_intervals.quantile(freedom, level) * np.sqrt(variance)
  true_variance = seed / seeds + group / groups + residual / (seeds * groups)
  errors = rng.normal(0, np.sqrt(true_variance), _DRAWS)
  results = np.stack([errors, errors - half, errors + half], axis=1)

  def has_power(effect: float) -> bool:
    found = [verdict(direction, smallest, *x) for x in results + effect]
    return found.count(REPRODUCED) >= _POWER * _DRAWS

  is_difference = direction == 'greater'
  # Twelve times the spread exceeds every interval drawn above.
  limit = smallest + 12 * (float(np.sqrt(true_variance)) + float(half.max()))
  # The power rises with the effect for a difference and falls otherwise.
  lower, upper = (0.0, limit) if direction != 'no better' else (-limit, limit)
  if not has_power(upper if is_difference else lower):
    return None
  for _ in range(20):
    middle = (lower + upper) / 2
    if has_power(middle) == is_difference:
      upper = middle
    else:
      lower = middle
  return upper if is_difference else lower
