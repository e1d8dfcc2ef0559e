"""The results store: scores of all runs and steps in an append-only file.

`results.jsonl` has a line per (run, step, task, metric):

    {"run": "runs/adapted", "step": 140, "fingerprint": "5be0c1f0d1c7a0f2",
     "options": {"task": "boolq", "shots": 0}, "task": "boolq", "metric": "acc",
     "value": 0.62, "stderr": 0.02, "n": 500, "scores": [1, 0, ...]}

`fingerprint` identifies the model, `options` are all inputs of its scores;
`weights`, `groups` and `statistics` follow `scores` if the examples have them.
Non-finite
numbers are null. Later lines replace earlier lines. From the package, this
module imports only `files` and `base.errors`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import os
import statistics
from typing import Any

from jaxtyping import Float
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import append_log, disk

FILE = 'results.jsonl'

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Score:
  """A metric of a task.

  Attributes:
    task: name of the task.
    metric: name of the metric, such as 'acc', 'rouge1' or 'loss'.
    value: value over all examples; the mean of `scores` if the metric is a mean
      over examples.
    stderr: standard error of `value` over independent examples, None if
      unknown.
    n: number of examples.
    scores: per-example values, in the order of the examples, for paired tests;
      empty for metrics without per-example values; for a ratio of sums or a
      corpus score, its linearisation (`ratio_score`).
    weights: per-example denominators, such as target tokens; empty if the
      metric is a mean.
    groups: document group of every example (`document_source.group`), with
      dependent errors within a group; empty if each example is a group.
    statistics: per-example statistics, whose sums decide a corpus score
      (sacreBLEU's of BLEU and chrF); empty for other metrics.
  """

  task: str
  metric: str
  value: float
  stderr: float | None
  n: int
  scores: tuple[float, ...] = ()
  weights: tuple[float, ...] = ()
  groups: tuple[str, ...] = ()
  statistics: tuple[tuple[int, ...], ...] = ()


def mean_score(
  task: str,
  metric: str,
  scores: Iterable[float],
  groups: Sequence[str] = (),
) -> Score:
  """Returns the score of a metric that is a mean over examples.

  Args:
    task: name of the task.
    metric: name of the metric.
    scores: per-example values, at least one.
    groups: group of every example; empty if each is a group.
  """
  scores = tuple(map(float, scores))
  n = len(scores)
  # A single example has no variance estimate.
  stderr = statistics.stdev(scores) / n**0.5 if n > 1 else None
  value, groups = statistics.fmean(scores), tuple(groups)
  return Score(task, metric, value, stderr, n, scores, groups=groups)


def ratio_score(
  task: str,
  metric: str,
  numerators: Float[np.ndarray, ' n'],
  weights: Float[np.ndarray, ' n'],
  groups: Sequence[str] = (),
) -> Score:
  """Returns the score of a ratio of sums over examples, such as the loss.

  The standard error uses the delta method: per-example scores are the ratio's
  linearisation, with the ratio as their mean.

  Args:
    task: name of the task.
    metric: name of the metric.
    numerators: numerator of every example.
    weights: denominator of every example.
    groups: group of every example; empty if each is a group.
  """
  value, n = float(numerators.sum() / weights.sum()), len(numerators)
  # Linear in the examples: intervals and tests of means apply.
  scores = value + (numerators - value * weights) / weights.mean()
  stderr = float(scores.std(ddof=1)) / n**0.5 if n > 1 else None
  # Weights of 1 make a mean.
  denominators = () if (weights == 1).all() else tuple(weights.tolist())
  scores = tuple(scores.tolist())
  return Score(
    task, metric, value, stderr, n, scores, denominators, tuple(groups)
  )


# Scores of every model, by its short name.
Scores = Mapping[str, Sequence[Score]]


@dataclasses.dataclass(frozen=True)
class Model:
  """An evaluated model.

  Attributes:
    run: path of the run or Hugging Face folder, as given by the user.
    step: step of the checkpoint; None for a folder.
    fingerprint: digest of its configuration, and of its files if they exist.
  """

  run: str
  step: int | None
  fingerprint: str


class Store:
  """Results of a folder; only one process may write them."""

  def __init__(
    self, folder: str | os.PathLike[str], last_step: float = math.inf
  ):
    """Reads the results and drops half-written evaluations.

    Args:
      folder: folder of `results.jsonl`; created if missing.
      last_step: results of later steps are dropped, too.

    Raises:
      UserError: a line is not a result, or the folder cannot be written.
    """
    self._log = append_log.Log(disk.require_writable(folder) / FILE)
    entries = [(_parse(*line), line[0]) for line in self._log.lines]
    if self._log.torn:
      # Lines before the torn line may belong to the same evaluation, then
      # incomplete: `find` must not treat it as finished. If the torn line was
      # the first of its evaluation, the previous evaluation is repeated.
      last = entries[-1][0][:2] if entries else None
      while entries and entries[-1][0][:2] == last:
        entries.pop()
    self._scores: dict[tuple[Model, str], dict[tuple[str, str], Score]] = {}
    records = []
    for (model, options, score), record in entries:
      # A Hugging Face folder has no steps, so its results are never dropped.
      if (model.step or 0) <= last_step:
        records.append(record)
        self._put(model, options, score)
    self._log.keep(records)

  def __enter__(self) -> 'Store':
    return self

  def __exit__(self, *exception) -> None:
    self._log.close()

  def find(self, model: Model, options: Options) -> list[Score]:
    """Returns a model's scores with these options; empty if none."""
    return list(self._scores.get((model, _text(options)), {}).values())

  def entries(self) -> list[tuple[Options, Score]]:
    """Returns all scores with their options, newest last."""
    return [
      (json.loads(options), score)
      for (_, options), scores in self._scores.items()
      for score in scores.values()
    ]

  def add(
    self, model: Model, options: Options, scores: Iterable[Score]
  ) -> None:
    """Appends scores atomically: a restart finds all of them or none.

    Args:
      model: the model.
      options: all inputs of the scores, JSON serialisable.
      scores: all scores with these options.

    Raises:
      UserError: the disk is full or unavailable.
    """
    records = []
    for score in scores:
      fields = dataclasses.asdict(model) | {'options': options}
      fields |= dataclasses.asdict(score)
      for name in ('value', 'stderr'):
        fields[name] = _number(fields[name])
      fields['scores'] = [*map(_number, score.scores)]
      fields['weights'] = [*map(_number, score.weights)]
      for name in ('weights', 'groups', 'statistics'):
        if not fields[name]:
          del fields[name]
      records.append(fields)
      self._put(model, _text(options), score)
    self._log.write(*records)
    # Bucket writes are buffered: flush, to not risk hours of work.
    self._log.flush()

  def _put(self, model: Model, options: str, score: Score) -> None:
    key = model, options
    # Reinserted: readers of `entries` take the last entry, but a dict keeps the
    # position of the first insertion.
    self._scores[key] = scores = self._scores.pop(key, {})
    scores[score.task, score.metric] = score


def digest(value: Any) -> str:
  """Returns the fingerprint of a JSON value, such as a configuration."""
  return text_digest(_text(value))


def text_digest(text: str) -> str:
  """Returns the fingerprint of a text."""
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _text(value: Any) -> str:
  """Returns a JSON value as canonical text."""
  return json.dumps(value, sort_keys=True)


def _number(value: float | None) -> float | int | None:
  if value is None or not math.isfinite(value):
    return None
  # Models compute in at most float32, with seven digits.
  value = float(f'{value:.7g}')
  # '1' instead of '1.0': most scores of single examples are 0 or 1.
  return int(value) if value.is_integer() else value


def _parse(fields: Any, line: str) -> tuple[Model, str, Score]:
  """Parses a record; errors name `line`, its file and number."""
  # JSON has no NaN: `_number` writes null.
  number = lambda x: math.nan if x is None else float(x)  # noqa: E731
  try:
    step, stderr = fields['step'], fields['stderr']
    return (
      Model(fields['run'], step and int(step), fields['fingerprint']),
      _text(fields['options']),
      Score(
        fields['task'],
        fields['metric'],
        number(fields['value']),
        stderr and float(stderr),
        int(fields['n']),
        tuple(map(number, fields['scores'])),
        tuple(map(number, fields.get('weights', ()))),
        tuple(fields.get('groups', ())),
        tuple(map(tuple, fields.get('statistics', ()))),
      ),
    )
  except (ValueError, KeyError, TypeError) as error:
    raise errors.UserError(
      f'{line} is not a result ({type(error).__name__}: {error}); remove the'
      ' line, and its task is evaluated again.'
    ) from error
