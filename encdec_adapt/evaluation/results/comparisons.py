"""Statistics of scores: intervals, paired tests, rank correlation.

Binary scores use Wilson's interval (1927) and the exact form of McNemar's test
(1947), with the interval of Agresti and Min (Statistics in Medicine 24, 2005)
for a difference of paired proportions. BLEU and chrF use the paired bootstrap
(Koehn 2004) over sums of their statistics, with sacreBLEU's seed and p-value.
Other scores use Student's t intervals and the paired t test. If examples have
groups, or an arm has several runs, intervals are over groups and runs
(`crossed_intervals`). No correction for multiple comparisons. From the package,
this module imports only other modules of this folder.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
import statistics
from typing import Any

import numpy as np

from encdec_adapt.base import packages
from encdec_adapt.evaluation.results import (
  contrasts,
  crossed_intervals,
  results_store,
)

CONFIDENCE = 0.95
# As in `sacrebleu.significance.PairedTest`.
_RESAMPLES = 1000
_SEED = 12345
# Minimum sizes, and arms, for a more than descriptive rank correlation.
_SIZES = 4
_ARMS = 6

# scipy, a dependency of jax, is imported when a statistic is computed: the
# import takes up to a second, too slow for commands without statistics.


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A paired comparison of two models, or arms, on the same examples.

  Attributes:
    difference: mean of the second's scores minus the first's.
    low: lower bound of its 95 % interval.
    high: upper bound of the interval.
    p: two-sided p-value of no difference.
    units: sampling units of the interval, such as '3 runs and 42 groups'.
    test: name of the test.
  """

  difference: float
  low: float
  high: float
  p: float
  units: str
  test: str


def interval(score: results_store.Score) -> tuple[float, float] | None:
  """Returns the 95 % interval of a score; None if its error is unknown."""
  if _is_grouped(score):
    x = contrasts.interval([[score]], CONFIDENCE)
    bounds = (x.low, x.high) if x.groups > 1 else None
    if bounds and score.scores and _is_binary(score):
      bounds = max(x.low, 0.0), min(x.high, 1.0)
    return bounds
  if score.scores and _is_binary(score):
    # Student's interval has zero width if all answers are right, and may exceed
    # [0, 1]; Wilson's does neither.
    z, n = _z(), score.n
    middle = (score.value + z * z / (2 * n)) / (1 + z * z / n)
    spread = score.value * (1 - score.value) / n + z * z / (4 * n * n)
    half = z * math.sqrt(spread) / (1 + z * z / n)
    return middle - half, middle + half
  if score.stderr is None or score.n < 2:
    return None
  half = crossed_intervals.quantile(score.n - 1, CONFIDENCE) * score.stderr
  return score.value - half, score.value + half


def compare(
  first: Sequence[results_store.Score], second: Sequence[results_store.Score]
) -> Comparison | None:
  """Compares two arms on one metric.

  Args:
    first: scores of an arm's runs, often a single run.
    second: scores of as many runs of another arm.

  Returns:
    None without paired scores: a single example of a single run, different
    examples, or a metric without per-example values.
  """
  scores = [*first, *second]
  if not all(
    x.scores and contrasts.same_examples(scores[0], x) for x in scores
  ):
    return None
  n, runs = len(scores[0].scores), len(first)
  x = contrasts.interval([first, second], CONFIDENCE)
  if x.seeds * x.groups == 1:
    return None
  units = f'{x.groups} groups' if _is_grouped(scores[0]) else f'{n} examples'
  if runs > 1:
    units, test = f'{runs} runs and {units}', 'crossed t'
  elif all(score.statistics for score in scores):
    return _bootstrap(*scores)
  elif x.groups == n and all(map(_is_binary, scores)):
    differences = np.subtract(second[0].scores, first[0].scores)
    better, worse = (int(x.sum()) for x in (differences > 0, differences < 0))
    return _mcnemar(better, worse, n)
  else:
    test = 'paired t'
  return Comparison(x.effect, x.low, x.high, x.p, units, test)


def _bootstrap(
  first: results_store.Score, second: results_store.Score
) -> Comparison:
  """Compares corpus scores on resamples of the examples."""
  packages.require('comparing BLEU or chrF', 'eval', 'sacrebleu')
  import sacrebleu

  kinds = {'bleu': sacrebleu.BLEU, 'chrf': sacrebleu.CHRF}
  metric = kinds[first.metric.partition('/')[0]]()

  def difference(*sums: Any) -> float:
    old, new = (metric._compute_score_from_stats(x).score for x in sums)
    return new - old

  # sacreBLEU sums in float32.
  both = [np.array(x.statistics, np.float32) for x in (first, second)]
  draw, n = np.random.default_rng(_SEED).choice, first.n
  rows = (draw(n, size=n) for _ in range(_RESAMPLES))
  samples = np.array([difference(*(x[i].sum(0) for x in both)) for i in rows])
  effect = second.value - first.value
  sizes = np.abs(samples)
  count = int(np.sum(sizes - sizes.mean() > abs(effect)))
  tail = (1 - CONFIDENCE) / 2
  low, high = np.quantile(samples, (tail, 1 - tail)).tolist()
  # sacreBLEU's p of equal answers is the smallest.
  p = (count + 1) / (_RESAMPLES + 1) if sizes.any() else 1.0
  test = f'bootstrap, {_RESAMPLES:,} resamples'
  return Comparison(effect, low, high, p, f'{n} examples', test)


def _mcnemar(better: int, worse: int, n: int) -> Comparison:
  """Compares 0/1 scores.

  Args:
    better: number of examples on which only the second model has 1.
    worse: number of examples on which only the first model has 1.
    n: number of examples.
  """
  from scipy import stats

  # Examples with equal answers carry no evidence.
  changed = better + worse
  p = float(stats.binomtest(better, changed).pvalue) if changed else 1.0
  # Agresti and Min: half an example more in each cell of the 2 x 2 table, so
  # equal answers also have an interval of nonzero width.
  middle = (better - worse) / (n + 2)
  variance = (changed + 1 - (better - worse) ** 2 / (n + 2)) / (n + 2) ** 2
  half = _z() * math.sqrt(variance)
  low, high = max(middle - half, -1.0), min(middle + half, 1.0)
  return Comparison(
    (better - worse) / n, low, high, p, f'{n} examples', 'McNemar, exact'
  )


@dataclasses.dataclass(frozen=True)
class Correlation:
  """A rank correlation over arms.

  Attributes:
    value: the correlation, or the mean of several.
    arms: number of arms.
    is_descriptive: whether the arms are too few for a verdict.
  """

  value: float
  arms: int
  is_descriptive: bool


def correlations(
  points: Iterable[tuple[str, str, float, float]],
) -> tuple[Correlation, Correlation | None]:
  """Computes Spearman's rank correlation, pooled and within size.

  The T5Gemma paper (2504.06225) correlates pretraining and instruction tuning
  in this way. Size is a confounder: a pooled correlation needs arms of 4 sizes,
  a correlation within a size 6 arms, to be more than descriptive.

  Args:
    points: size, arm, and two scores, of every run. Runs of an arm are
      averaged: arms are the units.

  Returns:
    The correlation over all arms, and the mean of the correlations within sizes
    with at least 6 arms, or else at least 3; None without such sizes.
  """
  from scipy import stats

  runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
  for size, arm, *scores in points:
    runs.setdefault((size, arm), []).append(tuple(scores))
  sizes: dict[str, list[list[float]]] = {}
  for (size, _), values in runs.items():
    mean = [statistics.fmean(column) for column in zip(*values, strict=True)]
    sizes.setdefault(size, []).append(mean)
  correlate = lambda pairs: float(stats.spearmanr(pairs).statistic)  # noqa: E731
  pooled = correlate([pair for pairs in sizes.values() for pair in pairs])
  pooled = Correlation(pooled, len(runs), len(sizes) < _SIZES)
  # Two points always have a correlation of 1 or -1.
  for least in (_ARMS, 3):
    if within := [x for x in sizes.values() if len(x) >= least]:
      mean = statistics.fmean(map(correlate, within))
      count = sum(map(len, within))
      return pooled, Correlation(mean, count, least < _ARMS)
  return pooled, None


def _is_grouped(score: results_store.Score) -> bool:
  return len(set(score.groups)) < len(score.groups)


def _is_binary(score: results_store.Score) -> bool:
  # BLEU is not a mean over examples, and may be 0 for all of them.
  is_share = score.stderr is not None or score.n == 1
  return is_share and set(score.scores) <= {0.0, 1.0}


def _z() -> float:
  from scipy import special

  return float(special.ndtri((1 + CONFIDENCE) / 2))
