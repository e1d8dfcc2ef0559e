"""Statistics of scores: intervals, paired tests, rank correlation.

Scores of 0 and 1 have Wilson's interval (1927) and are compared by the exact
form of McNemar's test (1947), with the interval of Agresti and Min (Statistics
in Medicine 24, 2005) for a difference of paired proportions. Other scores have
Student's t intervals and the paired t test. Nothing is corrected for the number
of comparisons. The module imports `results_store` alone of the package.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math

import numpy as np

from encdec_adapt.evaluation.results import results_store

CONFIDENCE = 0.95

# scipy, a dependency of jax, is imported when a statistic is computed: the
# import takes up to a second, which commands that print none should not pay.


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A paired comparison of two models on the same examples.

  Attributes:
    difference: mean of the second model's scores minus the first's.
    low: lower bound of its 95 % interval.
    high: upper bound of the interval.
    p: two-sided p-value of no difference.
    n: number of examples.
    test: name of the test.
  """

  difference: float
  low: float
  high: float
  p: float
  n: int
  test: str


def interval(score: results_store.Score) -> tuple[float, float] | None:
  """Returns the 95 % interval of a score; None if its error is unknown."""
  if score.scores and _is_binary(score):
    # Student's interval has no width where all answers are right, and leaves
    # [0, 1]; Wilson's does neither.
    z, n = _z(), score.n
    middle = (score.value + z * z / (2 * n)) / (1 + z * z / n)
    spread = score.value * (1 - score.value) / n + z * z / (4 * n * n)
    half = z * math.sqrt(spread) / (1 + z * z / n)
    return middle - half, middle + half
  if score.stderr is None or score.n < 2:
    return None
  half = _t(score.n - 1) * score.stderr
  return score.value - half, score.value + half


def compare(
  first: results_store.Score, second: results_store.Score
) -> Comparison | None:
  """Compares two models on one metric.

  Args:
    first: score of a model.
    second: score of another model on the same examples.

  Returns:
    None without paired scores: fewer than two examples, another number of
    them, or a metric that single examples do not have.
  """
  n = len(first.scores)
  if n < 2 or n != len(second.scores):
    return None
  differences = np.subtract(second.scores, first.scores)
  if _is_binary(first) and _is_binary(second):
    better, worse = (int(x.sum()) for x in (differences > 0, differences < 0))
    return _mcnemar(better, worse, n)
  return paired_t(differences)


def paired_t(differences: Sequence[float]) -> Comparison:
  """Compares the mean of paired differences with 0 by Student's t test.

  Args:
    differences: second score minus first score of at least two examples.
  """
  from scipy import stats

  differences, n = np.asarray(differences), len(differences)
  mean = float(differences.mean())
  error = float(differences.std(ddof=1)) / math.sqrt(n)
  half = _t(n - 1) * error
  if error:
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
  else:  # Constant differences have no t statistic.
    p = 0.0 if mean else 1.0
  return Comparison(mean, mean - half, mean + half, p, n, 'paired t')


def _mcnemar(better: int, worse: int, n: int) -> Comparison:
  """Compares 0/1 scores.

  Args:
    better: number of examples on which only the second model has 1.
    worse: number of examples on which only the first model has 1.
    n: number of examples.
  """
  from scipy import stats

  # Examples that both models answer alike carry no evidence.
  changed = better + worse
  p = float(stats.binomtest(better, changed).pvalue) if changed else 1.0
  # Agresti and Min: half an example more in each cell of the 2 x 2 table, so
  # that equal answers have an interval of some width, too.
  middle = (better - worse) / (n + 2)
  variance = (changed + 1 - (better - worse) ** 2 / (n + 2)) / (n + 2) ** 2
  half = _z() * math.sqrt(variance)
  low, high = max(middle - half, -1.0), min(middle + half, 1.0)
  return Comparison((better - worse) / n, low, high, p, n, 'McNemar, exact')


def correlations(
  points: Iterable[tuple[str, float, float]],
) -> tuple[float, float | None]:
  """Computes Spearman's rank correlation, pooled and within size.

  The T5Gemma paper (2504.06225) correlates pretraining and instruction tuning
  in this way.

  Args:
    points: size, and two scores, of every model.

  Returns:
    The correlation over all points, and the mean of the correlations within
    each size that has at least three points; None if no size has three.
  """
  from scipy import stats

  points = list(points)
  sizes: dict[str, list[tuple[float, float]]] = {}
  for size, *scores in points:
    sizes.setdefault(size, []).append(tuple(scores))
  correlate = lambda pairs: float(stats.spearmanr(pairs).statistic)  # noqa: E731
  # Two points always have a correlation of 1 or -1.
  within = [correlate(pairs) for pairs in sizes.values() if len(pairs) > 2]
  pooled = correlate([scores for _, *scores in points])
  return pooled, sum(within) / len(within) if within else None


def _is_binary(score: results_store.Score) -> bool:
  """Returns whether a score is a share of examples."""
  # BLEU is not a mean over examples, and may be 0 in all of them.
  is_share = score.stderr is not None or score.n == 1
  return is_share and set(score.scores) <= {0.0, 1.0}


def _z() -> float:
  from scipy import special

  return float(special.ndtri((1 + CONFIDENCE) / 2))


def _t(freedom: int) -> float:
  """Returns the two-sided quantile of Student's t distribution."""
  from scipy import special

  return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
