"""Predictions: the answers that a model generated in an evaluation.

`predictions/NAME-DIGEST.jsonl` beside the results has a line per example of an
evaluation of a model: `run`, `step` and `fingerprint` of the model, `task`,
`input`, `references`, `answer`, and `scores` by metric. The digest is that of
the model and of the options that decide the answers. This module imports
nothing of the package but `files`, `base.errors` and `results_store`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, paths

FOLDER = 'predictions'
_SHOWN = 20  # Predictions of an evaluation in a report.
_LONGEST = 300  # Characters of a text in a report.


@dataclasses.dataclass(frozen=True)
class Prediction:
  """An example with a generated answer.

  Attributes:
    task: name of the task.
    input: text that the model read, without the task prefix.
    references: right answers.
    answer: generated text.
    scores: score of the answer by metric.
  """

  task: str
  input: str
  references: Sequence[str]
  answer: str
  scores: Mapping[str, float]


# What an evaluation calls for every prediction.
Keep = Callable[[Prediction], None]


def discard(prediction: Prediction) -> None:
  """A `Keep` for callers that want the scores alone."""


class PredictionFile:
  """The predictions of a model in an evaluation."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    model: results_store.Model,
    options: results_store.Options,
  ):
    """Names the file and reads it if it exists.

    Raises:
      UserError: a line is of another run; names both.
    """
    self._fields = dataclasses.asdict(model)
    digest = results_store.digest([self._fields, options])
    name = os.path.basename(os.path.normpath(model.run))
    self._path = paths.at(folder) / FOLDER / f'{name}-{digest}.jsonl'
    self._lines = []
    for line, origin in append_log.Log(self._path).lines:
      line = line if isinstance(line, dict) else {}
      if any(line.get(key) != x for key, x in self._fields.items()):
        raise errors.UserError(
          f'{origin} is of {line.get("run", "no run")}, not of the step'
          f' {model.step} of {model.run} that is evaluated; remove the file, or'
          ' give another --output.'
        )
      self._lines.append(line)

  def write(self, predictions: Sequence[Prediction]) -> None:
    """Writes the file atomically; none without predictions."""
    entries = map(dataclasses.asdict, predictions)
    self._lines = [{**self._fields, **entry} for entry in entries]
    if self._lines:
      text = ''.join(json.dumps(line) + '\n' for line in self._lines)
      paths.write(self._path, text.encode())

  def row(self, i: int, name: str) -> dict[str, str] | None:
    """Returns a table row, the i-th of those evenly spaced; None beyond them.

    Args:
      i: index of the row.
      name: name of the model in the table.
    """
    i *= max(1, len(self._lines) // _SHOWN)
    if i >= len(self._lines):
      return None
    line = self._lines[i]
    return {
      'task': line['task'],
      # The end of an input is next to its answer.
      'input': line['input'][-_LONGEST:],
      'references': ' | '.join(line['references'])[:_LONGEST],
      'model': name,
      'answer': line['answer'][:_LONGEST],
      'scores': ', '.join(f'{k} {x:.3g}' for k, x in line['scores'].items()),
    }


def table(
  files: Mapping[str, Sequence[PredictionFile]],
) -> list[dict[str, str]]:
  """Returns rows with the models' answers to an example below each other.

  Args:
    files: a file per evaluation, by name of the model.
  """
  rows = (
    file.row(i, name)
    for evaluation in zip(*files.values(), strict=True)
    for i in range(_SHOWN)
    for name, file in zip(files, evaluation, strict=True)
  )
  return list(filter(None, rows))
