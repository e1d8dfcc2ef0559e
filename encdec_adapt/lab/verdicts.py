"""Verdicts on the claims of a study, and their planned power.

With m the smallest relevant difference and [l, u] the interval of the effect in
the claimed direction:

| claim        | reproduced        | contradicted       | no difference     |
|--------------|-------------------|--------------------|-------------------|
| a difference | l > 0 and u >= m  | u < 0 and l <= -m  | -m < l and u < m  |
| equality     | -m < l and u < m  | l >= m or u <= -m  |                   |
| "no better"  | u < m             | l > 0 and u >= m   |                   |

All else is undecided. Power is for planning, and overrules no interval.

From the package, this module imports only `crossed_intervals` and `variances`.
"""

import dataclasses

import numpy as np

from encdec_adapt.evaluation.results import crossed_intervals
from encdec_adapt.lab import variances

REPRODUCED, CONTRADICTED = 'reproduced', 'contradicted'
NO_DIFFERENCE, UNDECIDED = 'no difference', 'undecided'
ENOUGH = 0.8  # Planned power below this is low.
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
    low: lower bound of the interval of the effect.
    high: upper bound of the interval.
    lower_is_better: whether lower values are better, for 'no better'.

  Returns:
    `REPRODUCED`, `CONTRADICTED`, `NO_DIFFERENCE` or `UNDECIDED`.
  """
  if direction == 'less' or (direction == 'no better' and lower_is_better):
    low, high = -high, -low
  is_small = -smallest < low and high < smallest
  if direction == 'equal':
    is_reproduced = is_small
    is_contradicted = low >= smallest or high <= -smallest
  elif direction == 'no better':
    is_reproduced = high < smallest
    is_contradicted = low > 0 and high >= smallest
  else:
    is_reproduced = low > 0 and high >= smallest
    is_contradicted = high < 0 and low <= -smallest
    if is_small:
      return NO_DIFFERENCE
  if is_reproduced:
    return REPRODUCED
  return CONTRADICTED if is_contradicted else UNDECIDED


@dataclasses.dataclass(frozen=True)
class Power:
  """Planned power of a claim.

  Attributes:
    reproduced: probability of `REPRODUCED` at an effect of the smallest
      difference in the claimed direction; at 0 for 'equal' and 'no better'.
    no_difference: probability of `NO_DIFFERENCE` at an effect of 0; None for
      claims without this verdict.
    effect: effect in the claimed direction at which `REPRODUCED` has
      probability `ENOUGH`: the smallest for a difference, the largest for
      'equal' and 'no better'; None without such an effect.
  """

  reproduced: float
  no_difference: float | None
  effect: float | None


def planned_power(
  direction: str,
  smallest: float,
  components: variances.Components,
  seeds: int,
  groups: int,
  level: float,
) -> Power:
  """Computes the power of a claim from variances of earlier runs.

  Args:
    direction: direction of the claim; see `verdict`.
    smallest: smallest relevant difference.
    components: variances of paired differences, from `variances.planned`.
    seeds: number of seeds, at least 2.
    groups: number of groups of examples, at least 2.
    level: level of the interval.
  """
  # Effects in the claimed direction; losses are negated with their direction.
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
  bounds = np.stack([errors - half, errors + half], axis=1)

  def share(name: str, effect: float) -> float:
    verdicts = [verdict(direction, smallest, *x) for x in bounds + effect]
    return verdicts.count(name) / _DRAWS

  is_difference = direction == 'greater'
  # Twelve times the spread exceeds every interval drawn above.
  limit = smallest + 12 * (float(np.sqrt(true_variance)) + float(half.max()))
  # The probability rises with the effect for a difference and falls otherwise.
  lower, upper = (0.0, limit) if direction != 'no better' else (-limit, limit)
  effect = None
  if share(REPRODUCED, upper if is_difference else lower) >= ENOUGH:
    for _ in range(20):
      middle = (lower + upper) / 2
      if (share(REPRODUCED, middle) >= ENOUGH) == is_difference:
        upper = middle
      else:
        lower = middle
    effect = upper if is_difference else lower
  return Power(
    share(REPRODUCED, smallest if is_difference else 0.0),
    share(NO_DIFFERENCE, 0.0) if is_difference else None,
    effect,
  )
