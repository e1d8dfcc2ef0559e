"""Rank classification with prompt templates, as in T0's evaluation.

A task is a YAML file:

    task: cb
    data: val.jsonl                       # beside this file
    templates: super_glue__cb.yaml        # in promptsource's format
    row:                                  # optional: fields for the templates
      label: "{{ ['entailment', 'contradiction', 'neutral'].index(label) }}"
    separator: " "                        # optional: between context and choice

Every row is rendered with all templates of the data set's original task
(`original_task`) with answer choices; the answer is the choice with the largest
log-likelihood (Sanh et al. 2022, section 4; Wang et al. 2022, section 3.3).
Each template yields an accuracy; the task's scores are their median and mean.

A decoder-only model reads the context, the separator and the choice; only the
choice is scored. The separator is the task's, or else the separator of the
run's fine-tuning. Without either, context and choice are encoded together, as
in lm-eval. From `evaluation`, this module imports only `results`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import pathlib
import statistics
from typing import Any

import jinja2
from jinja2 import nativetypes
import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import parquet_files, prompt_source
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import paths, text_lines

_OPTIONAL = frozenset({'row', 'separator'})
_FIELDS = frozenset({'task', 'data', 'templates'}) | _OPTIONAL


@dataclasses.dataclass(frozen=True)
class Question:
  """A rendered row.

  Attributes:
    context: text before the answer.
    choices: answers to choose from, at least two.
    answer: index of the right choice.
  """

  context: str
  choices: Sequence[str]
  answer: int


@dataclasses.dataclass(frozen=True)
class PromptedTask:
  """A task with prompt templates.

  Attributes:
    name: name of the task.
    questions: questions by template name.
    separator: text between context and choice for decoder-only models; None
      for the separator of the run.
  """

  name: str
  questions: Mapping[str, Sequence[Question]]
  separator: str | None = None

  def score(self, log_probs: Sequence[float]) -> Iterator[results_store.Score]:
    """Returns the scores of the task.

    Args:
      log_probs: log-likelihood of every choice, in the order of `pairs`.
    """
    remaining, accuracies = iter(log_probs), []
    for template, questions in self.questions.items():
      is_right = [
        np.argmax([next(remaining) for _ in question.choices])
        == question.answer
        for question in questions
      ]
      name = f'{self.name}/{template}'
      accuracies.append(results_store.mean_score(name, 'acc', is_right))
    yield from accuracies
    means = [score.value for score in accuracies]
    # Templates may skip rows; `n` is that of the template with the most.
    n = max(score.n for score in accuracies)
    # No standard error: all templates render the same rows.
    for metric, mean in (
      ('median', statistics.median),
      ('mean', statistics.fmean),
    ):
      yield results_store.Score(self.name, metric, mean(means), None, n)

  def pairs(self) -> Iterator[tuple[str, str]]:
    """Returns the context and each choice of every question."""
    for questions in self.questions.values():
      for question in questions:
        for choice in question.choices:
          yield question.context, choice


def read(
  file: str, config: Mapping[str, Any], limit: int | None = None
) -> PromptedTask:
  """Reads the rows and templates of a task.

  Args:
    file: path of the task's file; paths in it are relative to its folder.
    config: its content.
    limit: maximum number of rows to read.

  Raises:
    UserError: a field is unknown or missing, or a row cannot be rendered;
      names the file and the line.
  """
  unknown, missing = set(config) - _FIELDS, _FIELDS - _OPTIONAL - set(config)
  if unknown or missing:
    raise errors.UserError(
      f'{file}: fields {sorted(unknown | missing)} are unknown or missing; a'
      f' task with templates has {sorted(_FIELDS)}.'
    )
  folder = paths.at(file).parent
  templates = prompt_source.read_templates(str(folder / config['templates']))
  # As published: skip prompts of other tasks, such as inverted prompts, and
  # prompts without choices to rank.
  templates = [x for x in templates if x.choices and x.original]
  rows = read_rows(str(folder / config['data']))[:limit]
  # Native, since a template may index with a rendered field: label is 1, not
  # '1'. Strict, since a misspelt field would render as an empty string.
  environment = nativetypes.NativeEnvironment(undefined=jinja2.StrictUndefined)
  questions: dict[str, list[Question]] = {}
  for template in templates:
    for line, row in rows:
      try:
        fields = {
          name: environment.from_string(text).render(row)
          for name, text in config.get('row', {}).items()
        }
        question = _render(template, {**row, **fields}, line)
      except Exception as error:  # Templates are user code.
        raise errors.UserError(
          f'{line}: the template {template.name!r} of {file} cannot be'
          f' rendered ({error}); its fields are {sorted(row)}.'
        ) from error
      if question is not None:
        questions.setdefault(template.name, []).append(question)
  if not questions:
    raise errors.UserError(
      f'{file}: no template gives a question with choices.'
    )
  return PromptedTask(config['task'], questions, config.get('separator'))


def _render(
  template: prompt_source.Template, row: dict[str, Any], line: str
) -> Question | None:
  pair = template.render(row, line)
  choices = template.render_choices(row)
  if not pair or pair[1] not in choices or len(choices) < 2:
    return None
  return Question(pair[0], choices, choices.index(pair[1]))


def file_fields(
  flag: str, spec: str, default: str, further: str = ''
) -> tuple[str, list[str]]:
  """Parses FILE[#FIELD,FIELD[,FURTHER]].

  Args:
    flag: the flag, for messages.
    spec: value of the flag.
    default: the fields without #.
    further: name of an optional third field; '' for none.

  Raises:
    UserError: there are not as many fields.
  """
  file, fields = option_strings.Part(flag, spec).partition('#')
  parts = fields.divide(',') if fields else []
  names = [part.text for part in parts] or default.split(',')
  if not 2 <= len(names) <= 2 + bool(further):
    form = f'FILE#{default.upper()}' + (further and f'[,{further.upper()}]')
    raise fields.error(f'must be fields as in {form}.')
  return file.text, names


def read_rows(path: str) -> list[tuple[str, dict[str, Any]]]:
  """Reads a file of JSON lines, or by its name a table or a JSON array.

  Args:
    path: path of the file: *.parquet, *.tsv (the first line has the names of
      the fields; without quotes), *.json (an array of objects) or JSON lines;
      text may be compressed.

  Returns:
    File and line of each row, for messages, and its fields.

  Raises:
    UserError: the file cannot be read or is empty, or a line is not an object.
  """
  kind = pathlib.PurePath(path.removesuffix('.gz').removesuffix('.zst')).suffix
  if kind == '.parquet':
    values = parquet_files.rows(path, 0, paths.size(paths.at(path)), None)
    rows = [(f'{path}, row {i}', row) for i, _, row in values]
  elif kind == '.tsv':
    rows = _read_tsv(path)
  else:
    rows = list(text_lines.read_json(path, array=kind == '.json').items())
  if not rows:
    raise errors.UserError(f'{path} is empty; it needs at least one row.')
  for line, row in rows:
    if not isinstance(row, dict):
      raise errors.UserError(f'{line} must be a JSON object: {row!r:.60}')
  return rows


def _read_tsv(path: str) -> list[tuple[str, dict[str, str]]]:
  (_, header), *lines = text_lines.read(path).items()
  names, rows = header.split('\t'), []
  for label, line in lines:
    values = line.split('\t')
    if len(values) != len(names):
      raise errors.UserError(
        f'{label} has {len(values)} fields, but the first line {len(names)}:'
        f' {", ".join(names)}; separate them with tabs.'
      )
    rows.append((label, dict(zip(names, values, strict=True))))
  return rows
