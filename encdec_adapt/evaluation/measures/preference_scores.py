"""Calibration and accuracy by length of preference models.

Both follow from the held-out metrics of a comparison
(`training.losses.comparison`). As in the Bradley-Terry model, the confidence is
the probability sigmoid(|margin|) of the preferred answer; the calibration curve
is the accuracy by confidence. From `evaluation`, this module imports only
`results`.
"""

import dataclasses

import numpy as np

from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.evaluation.results import results_store

Curve = list[tuple[float, float, float]]

_BINS = (0.5, 0.6, 0.7, 0.8, 0.9)  # Lower ends of the bins of confidence.
# Sign of the chosen minus the rejected answer's length -> metric.
_LENGTHS = {-1: 'shorter', 0: 'equal', 1: 'longer'}


def scores(task: str, result: perplexity.Result) -> list[results_store.Score]:
  """Returns scores derived from held-out metrics; none for other losses.

  Args:
    task: name of the task.
    result: held-out metrics.

  Returns:
    `accuracy_chosen_shorter`, `.._equal` and `.._longer`, by the tokens of the
    chosen answer, and for bins of confidence from 0.5, `accuracy_at_0.5` and
    the mean `confidence_at_0.5`. Groups without examples have no score.
  """
  if 'margin' not in result.metrics:
    return []
  rows = dict(zip(result.metrics, result.ratios[:, 0], strict=True))
  right = rows['accuracy']
  confidence = 1 / (1 + np.exp(-np.abs(rows['margin'])))
  bins = np.searchsorted(_BINS, confidence, side='right') - 1
  sign = np.sign(rows['length_difference'])
  groups = [
    (f'accuracy_chosen_{name}', right[sign == value])
    for value, name in _LENGTHS.items()
  ]
  for i, low in enumerate(_BINS):
    groups.append((f'accuracy_at_{low}', right[bins == i]))
    groups.append((f'confidence_at_{low}', confidence[bins == i]))
  # No per-example scores: groups of two models have different examples, not
  # suitable for paired tests.
  return [
    dataclasses.replace(results_store.mean_score(task, name, values), scores=())
    for name, values in groups
    if len(values)
  ]


def curves(scores: results_store.Scores) -> dict[str, dict[str, Curve]]:
  """Returns the calibration curves of the bins in `scores`.

  Args:
    scores: scores by model.

  Returns:
    By task and model, for each bin: mean confidence, accuracy, and standard
    error of the accuracy.
  """
  by_task: dict[str, dict[str, Curve]] = {}
  for model, model_scores in scores.items():
    by_name = {(score.task, score.metric): score for score in model_scores}
    for (task, metric), score in by_name.items():
      if metric.startswith('confidence_at_'):
        right = by_name[task, metric.replace('confidence', 'accuracy')]
        point = score.value, right.value, right.stderr or 0.0
        by_task.setdefault(task, {}).setdefault(model, []).append(point)
  return by_task
