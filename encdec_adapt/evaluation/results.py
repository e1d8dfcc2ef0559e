"""Scores of evaluations, of all runs and steps in one append-only file.

This module imports nothing of the package but `files` and `cli`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Score:
  """One metric of one task.

  Attributes:
    task: name of the task.
    metric: name of the metric, such as 'acc', 'rouge1' or 'loss'.
    value: value over all examples; the mean of `scores` where the metric is
      a mean over examples.
    stderr: standard error of `value`, None where it is not known.
    n: number of examples.
    scores: value of every example, in the order of the examples, for paired
      tests; empty where the metric is not one of single examples.
  """

  task: str
  metric: str
  value: float
  stderr: float | None
  n: int
  scores: tuple[float, ...] = ()
