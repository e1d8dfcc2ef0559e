"""Contrasts of arms: differences of scores by seed and group of examples.

An arm is a list of scores of its runs, one per seed, on one metric. A contrast
is over two arms, second - first, or four, (second - first) - (fourth - third).
Runs are differenced by seed: this lowers the variance of arms with equal rows
under equal seeds. Models are compared on rows of lengths that they have
seen (`check_length`).

From the package, this module imports only `base.errors`,
`data.sources.document_source`, `crossed_intervals` and `results_store`.
"""

from collections.abc import Sequence

from jaxtyping import Float
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import crossed_intervals, results_store

MOST_ROWS = 32  # Maximum rows per group in the report of a study.
# Signs of a contrast's arms.
SIGNS = {1: (1,), 2: (-1, 1), 4: (-1, 1, 1, -1)}

Arm = Sequence[results_store.Score]


def interval(
  arms: Sequence[Arm], level: float = 0.95
) -> crossed_intervals.Interval:
  """Returns the effect of `sums` with its interval over seeds and groups."""
  return crossed_intervals.interval(*sums(arms), level)


def sums(
  arms: Sequence[Arm],
) -> tuple[Float[np.ndarray, 'seeds groups'], Float[np.ndarray, ' groups']]:
  """Returns the sums of an arm, or of a contrast of arms, by seed and group.

  Args:
    arms: one, two or four arms.

  Returns:
    The numerators of the metric, or their differences, and its denominators,
    summed over the examples of each group, in the order of group names. Without
    groups, each example is a separate group.

  Raises:
    UserError: the metric has no per-example values, or the arms have different
      examples or numbers of seeds.
  """
  first, seeds = arms[0][0], len(arms[0])
  label = f'{first.task}/{first.metric}'
  for score in (x for arm in arms for x in arm):
    if not score.scores:
      raise errors.UserError(
        f'{label} is not a metric of single examples and has no interval; name'
        ' another metric.'
      )
    if not same_examples(first, score):
      raise errors.UserError(
        f'the models were measured on other examples of {label} ({first.n} and'
        f' {score.n}: other records, or text of another version of Python);'
        ' evaluate all of them on the same records.'
      )
  if any(len(arm) != seeds for arm in arms):
    raise errors.UserError(
      f'the arms have {", ".join(str(len(arm)) for arm in arms)} runs with'
      f' {label}, and only equal numbers of seeds are compared; evaluate as'
      ' many of each.'
    )
  numerators = sum(
    sign * np.array([_numerators(score) for score in arm])
    for sign, arm in zip(SIGNS[len(arms)], arms, strict=True)
  )
  weights = _weights(first)
  if not first.groups:
    return numerators, weights
  names, index = np.unique(first.groups, return_inverse=True)
  is_of_group = (index[:, None] == np.arange(len(names))).astype(np.float64)
  return numerators @ is_of_group, weights @ is_of_group


def check_length(title: str, length: int, limit: int) -> None:
  """Rejects rows with a stack input longer than in training (0: unknown)."""
  if 0 < limit < length:
    raise errors.UserError(
      f'{title} has rows with a stack input of {length} tokens, and its model'
      f' was trained on at most {limit}; shorten the rows (config.data.*_length'
      ' or --retrieval_lengths), or train the model on rows as long.'
    )


def same_examples(
  first: results_store.Score, second: results_store.Score
) -> bool:
  """Returns whether two scores of a metric have the same examples."""
  return (
    len(first.scores) == len(second.scores)
    and first.groups == second.groups
    and first.weights == second.weights
  )


def reported(score: results_store.Score) -> results_store.Score:
  """Returns a score on the examples of a study's report, by group.

  The report excludes groups in the development part, and takes at most
  `MOST_ROWS` examples per group, evenly spaced. Their sums are an example of
  the result. A score without groups is returned unchanged.

  Args:
    score: score on all held-out examples.

  Raises:
    UserError: all groups are in the development part.
  """
  if not score.groups:
    return score
  by_group: dict[str, list[int]] = {}
  for i, name in enumerate(score.groups):
    by_group.setdefault(name, []).append(i)
  rows = []
  for name, members in by_group.items():
    if not document_source.is_development(name):
      count = min(len(members), MOST_ROWS)
      rows += [members[i * len(members) // count] for i in range(count)]
  if not rows:
    raise errors.UserError(
      f'{score.task}/{score.metric} is of {len(by_group)} groups of documents,'
      ' all in the development part, so that none is left for a report; raise'
      ' config.data.eval_fraction.'
    )
  (numerators,), weights = sums([[_subset(score, sorted(rows))]])
  names = tuple(sorted({score.groups[i] for i in rows}))
  return results_store.ratio_score(
    score.task, score.metric, numerators, weights, names
  )


def development(score: results_store.Score, rows: int) -> results_store.Score:
  """Returns a score on the rows evaluated during training.

  Args:
    score: score on all held-out examples, with groups.
    rows: `config.data.development_rows`; see `RecordSet.development`.
  """
  part = [
    i for i, x in enumerate(score.groups) if document_source.is_development(x)
  ]
  count = min(rows, len(part))
  return _subset(score, [part[i * len(part) // count] for i in range(count)])


def _subset(
  score: results_store.Score, rows: Sequence[int]
) -> results_store.Score:
  return results_store.ratio_score(
    score.task,
    score.metric,
    _numerators(score)[rows],
    _weights(score)[rows],
    tuple(score.groups[i] for i in rows),
  )


def _weights(score: results_store.Score) -> Float[np.ndarray, ' n']:
  return np.array(score.weights or [1.0] * len(score.scores))


def _numerators(score: results_store.Score) -> Float[np.ndarray, ' n']:
  """Recovers the numerators from a ratio's linearised scores."""
  weights = _weights(score)
  residuals = np.subtract(score.scores, score.value) * weights.mean()
  return residuals + score.value * weights
