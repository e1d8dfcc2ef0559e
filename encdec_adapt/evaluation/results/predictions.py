"""Predictions: a model's generated answers in an evaluation.

`predictions/NAME-DIGEST.jsonl` beside the results has a line per example:
`run`, `step` and `fingerprint` of the model, `task`, `input`, `references`,
`answer`, `scores` by metric, and `cut`. The digest covers the model and the
options of its answers. From the package, this module imports only `files`,
`base.errors` and `results_store`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import json
import os
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, paths

FOLDER = 'predictions'
_SHOWN = 20  # Maximum predictions per evaluation in a report.
_LONGEST = 300  # Maximum characters of a text in a report.


@dataclasses.dataclass(frozen=True)
class Prediction:
  """An example with a generated answer.

  Attributes:
    task: name of the task.
    input: input text of the model, without the task prefix.
    references: right answers.
    answer: generated text.
    scores: score of the answer by metric.
    cut: whether the answer ends at the maximum number of tokens; None if
      unknown.
  """

  task: str
  input: str
  references: Sequence[str]
  answer: str
  scores: dict[str, float]
  cut: bool | None = None


# An evaluation returns scores, and the scored answers.
Result = results_store.Score | Prediction


def write(
  folder: str | os.PathLike[str],
  model: results_store.Model,
  options: results_store.Options,
  results: Iterable[Result],
) -> None:
  """Writes the predictions among the results of an evaluation, if any.

  Args:
    folder: folder of the results.
    model: the model.
    options: all inputs of the results.
    results: results of the evaluation.
  """
  fields = dataclasses.asdict(model)
  lines = (
    json.dumps(fields | dataclasses.asdict(x)) + '\n'
    for x in results
    if isinstance(x, Prediction)
  )
  if text := ''.join(lines):
    paths.write(_path(folder, model, options), text.encode())


def read(
  folder: str | os.PathLike[str],
  model: results_store.Model,
  options: results_store.Options,
) -> list[dict[str, Any]]:
  """Returns the lines written by `write`; empty without a file.

  Raises:
    UserError: a line belongs to another run; names both.
  """
  lines = []
  for line, origin in append_log.Log(_path(folder, model, options)).lines:
    line = line if isinstance(line, dict) else {}
    if any(line.get(k) != x for k, x in dataclasses.asdict(model).items()):
      raise errors.UserError(
        f'{origin} is of {line.get("run", "no run")}, not of the step'
        f' {model.step} of {model.run} that is evaluated; remove the file, or'
        ' give another --output.'
      )
    lines.append(line)
  return lines


def table(
  models: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> list[dict[str, str]]:
  """Returns rows with the models' answers, grouped by example.

  Args:
    models: lines of every evaluation, by model name.
  """
  rows = []
  for evaluation in zip(*models.values(), strict=True):
    shown = (lines[:: max(1, len(lines) // _SHOWN)] for lines in evaluation)
    for answers in itertools.islice(itertools.zip_longest(*shown), _SHOWN):
      rows += map(_row, models, answers)
  return list(filter(None, rows))


def _row(name: str, line: Mapping[str, Any] | None) -> dict[str, str] | None:
  if not line:
    return None
  mark = ' [cut]' if line.get('cut') else ''
  return {
    'task': line['task'],
    # Show the end: it is next to the answer.
    'input': line['input'][-_LONGEST:],
    'references': ' | '.join(line['references'])[:_LONGEST],
    'model': name,
    'answer': line['answer'][:_LONGEST] + mark,
    'scores': ', '.join(f'{k} {x:.3g}' for k, x in line['scores'].items()),
  }


def _path(
  folder: str | os.PathLike[str],
  model: results_store.Model,
  options: results_store.Options,
) -> paths.Path:
  digest = results_store.digest([dataclasses.asdict(model), options])
  name = os.path.basename(os.path.normpath(model.run))
  return paths.at(folder) / FOLDER / f'{name}-{digest}.jsonl'
