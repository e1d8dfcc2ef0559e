"""Rank classification with prompt templates, as T0 was evaluated.

A task is a YAML file:

    task: cb
    data: val.jsonl                       # beside this file
    templates: super_glue__cb.yaml        # as promptsource writes them
    row:                                  # optional: fields that templates use
      label: "{{ ['entailment', 'contradiction', 'neutral'].index(label) }}"
    separator: " "                        # optional: between context and choice

Every row is rendered by every template with answer choices that asks what the
data set asks (`original_task`); the answer is the choice with the largest
log-likelihood (Sanh et al. 2022, section 4; Wang et al. 2022, section 3.3). A
template gives an accuracy; their median and mean are the scores of the task.

A decoder-only model reads the context, the separator and the choice, of which
the choice alone is scored. A run that was tuned with a separator has that one
unless the task states its own. Without any, context and choice are encoded
together, as lm-eval does.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import statistics
from typing import Any

import jinja2
from jinja2 import nativetypes
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.sources import prompt_source
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
    answer: index of the right one.
  """

  context: str
  choices: Sequence[str]
  answer: int


@dataclasses.dataclass(frozen=True)
class PromptedTask:
  """A task of this kind whose rows and templates were read.

  Attributes:
    name: name of the task.
    questions: questions of every template by its name.
    separator: text between context and choice where one model reads both; None
      for that of the run.
  """

  name: str
  questions: Mapping[str, Sequence[Question]]
  separator: str | None = None

  def score(self, log_probs: Sequence[float]) -> Iterator[results_store.Score]:
    """Returns the scores of the task.

    Args:
      log_probs: log-likelihood of every choice, in the order of `pairs`.
    """
    left, found = iter(log_probs), {}
    for template, questions in self.questions.items():
      right = []
      for question in questions:
        scores = [next(left) for _ in question.choices]
        right.append(float(int(np.argmax(scores)) == question.answer))
      found[template] = right
      yield results_store.mean_score(f'{self.name}/{template}', 'acc', right)
    means = [statistics.fmean(right) for right in found.values()]
    n = max(map(len, found.values()))
    median = statistics.median(means)
    yield results_store.Score(self.name, 'median', median, None, n)
    yield results_store.Score(
      self.name, 'mean', statistics.fmean(means), None, n
    )

  def pairs(self) -> Iterator[tuple[str, str]]:
    """Returns the context and each choice of every question."""
    for questions in self.questions.values():
      for question in questions:
        for choice in question.choices:
          yield question.context, choice


def read(
  place: str, config: Mapping[str, Any], limit: int | None = None
) -> PromptedTask:
  """Reads the rows and templates of a task.

  Args:
    place: path of the task's file, which its paths are relative to.
    config: its content.
    limit: most rows to read.

  Raises:
    UserError: a field is unknown or missing, or a row cannot be rendered;
      names the file and the line.
  """
  unknown, missing = set(config) - _FIELDS, _FIELDS - _OPTIONAL - set(config)
  if unknown or missing:
    raise errors.UserError(
      f'{place}: fields {sorted(unknown | missing)} are unknown or missing; a'
      f' task with templates has {sorted(_FIELDS)}.'
    )
  folder = paths.at(place).parent
  templates = [
    template
    for template in prompt_source.read_templates(
      str(folder / config['templates'])
    )
    if template.choices and template.original
  ]
  rows = read_rows(str(folder / config['data']))[:limit]
  rendered = config['row'] if 'row' in config else {}
  environment = nativetypes.NativeEnvironment(undefined=jinja2.StrictUndefined)
  questions: dict[str, list[Question]] = {}
  for template in templates:
    for where, row in rows:
      try:
        made = {
          name: environment.from_string(text).render(row)
          for name, text in rendered.items()
        }
        question = _render(template, {**row, **made}, where)
      except Exception as error:  # Templates are a user's code.
        raise errors.UserError(
          f'{where}: the template {template.name!r} of {place} cannot be'
          f' rendered ({error}); its fields are {sorted(row)}.'
        ) from error
      if question is not None:
        questions.setdefault(template.name, []).append(question)
  if not questions:
    raise errors.UserError(
      f'{place}: no template gives a question with choices.'
    )
  return PromptedTask(config['task'], questions, config.get('separator'))


def _render(
  template: prompt_source.Template, row: dict[str, Any], where: str
) -> Question | None:
  """Renders a row; None where the template gives no question."""
  pair = template.render(row, where)
  choices = template.render_choices(row)
  if not pair or pair[1] not in choices or len(choices) < 2:
    return None
  return Question(pair[0], choices, choices.index(pair[1]))


def read_rows(path: str) -> list[tuple[str, dict[str, Any]]]:
  """Reads a file of JSON lines.

  Returns:
    Where each row stands, for messages, and its fields.

  Raises:
    UserError: the file cannot be read or is empty, or a line is no object.
  """
  rows = list(text_lines.read_json(path).items())
  for place, row in rows:
    if not isinstance(row, dict):
      raise errors.UserError(f'{place} must be a JSON object: {row!r:.60}')
  return rows
