"""Scores of models on retrieval tasks, by generation and by likelihood.

`found` is the share of the codes contained in the greedy answer, `rouge1` the
share of their words (ROUGE-1 recall; a code has three), and `choice` whether
the right answer is likelier than three others. From `evaluation`, this module
imports `measures` and `results`.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import re
import statistics

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import retrieval_tasks
from encdec_adapt.generation import model_in_memory, prompt_encoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.inference import log_likelihoods, row_batches
from encdec_adapt.stored import model_on_disk, pretrained_files
from encdec_adapt.telemetry import progress

NAME = 'retrieval'
METRICS = ('found', 'rouge1', 'choice')
# Maximum tokens of an answer: the longest, three codes, has 33 characters, each
# a token in a byte vocabulary.
ANSWER_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class RetrievalEvaluation:
  """Evaluates models on retrieval tasks.

  Attributes:
    retrieval: source of the tasks.
    prefix: text before every context; None for the run's task prefix.
  """

  retrieval: retrieval_tasks.Retrieval
  prefix: str | None = ''
  name = NAME

  def options(self) -> results_store.Options:
    """Returns all inputs of the scores."""
    prefix = {} if self.prefix == '' else {'prefix': self.prefix}
    return {**self.retrieval.options(), **prefix}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks lengths against the needles and a model's positions.

    Raises:
      UserError: the model has no vocabularies, a haystack is shorter than its
        needles, or a prompt longer than the positions in config.json.
    """
    # Builds all examples: the length of a prompt depends on the model's
    # vocabulary, and documents may be longer than the flag's value.
    examples, prompts = self._prompts(stored)
    longest, task = max(
      (len(prompt), example.task)
      for example, prompt in zip(examples, prompts, strict=True)
    )
    limit = pretrained_files.prompt_room(stored, ANSWER_TOKENS)
    if limit and longest > limit:
      key = pretrained_files.positions_key(stored, stored.prompt_side)
      raise errors.UserError(
        f'{task} needs {longest} tokens, with its question, and {stored.path}'
        f' has room for {limit} ({key}, in a decoder-only model without the'
        ' answer); give smaller --retrieval_lengths.'
      )

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Measures a model.

    Args:
      model: the model.
      rows: prompts at a time; divides over the model's devices.
      report: progress callback (answers and choices done, total).

    Returns:
      `METRICS` of every kind of task over all its cells (`needle`), then of
      every cell (`needle/512/0.5`); and the answers.
    """
    examples, prompts = self._prompts(model.stored)
    writer = model.stored.require_vocabularies().decoder
    pairs = [
      log_likelihoods.Pair(prompt, writer.encode(choice))
      for example, prompt in zip(examples, prompts, strict=True)
      for choice in example.choices
    ]
    count, total = len(prompts), len(prompts) + len(pairs)
    requests = [
      engine_lib.Request(np.array(prompt, np.int32), ANSWER_TOKENS)
      for prompt in prompts
    ]
    completions = model.engine(rows=rows).run(requests)
    answers = row_batches.in_order(completions, lambda n: report(n, total))
    scored = model.score_tokens(pairs, rows, lambda n: report(count + n, total))
    reader = model.stored.require_vocabularies().sides[model.stored.prompt_side]
    texts = [reader.decode(example.context) for example in examples]
    return _scores(
      examples, texts, [x.text for x in answers], [x.log_prob for x in scored]
    )

  def _prompts(
    self, stored: model_on_disk.StoredModel
  ) -> tuple[list[retrieval_tasks.Example], list[list[int]]]:
    reader = stored.require_vocabularies().sides[stored.prompt_side]
    prefix = prompt_encoding.task_prefix(stored, self.prefix)
    head = reader.encode(prefix)
    examples = list(self.retrieval.examples(reader))
    return examples, [
      reader.ids.frame(
        [*head, *example.context, *reader.encode(example.question)],
        stored.prompt_side,
      )
      for example in examples
    ]


def _scores(
  examples: Sequence[retrieval_tasks.Example],
  contexts: Sequence[str],
  answers: Sequence[str],
  log_probs: Iterable[float],
) -> list[predictions.Result]:
  by_task: dict[str, list[tuple[float, ...]]] = {
    kind: [] for kind in retrieval_tasks.FACTS
  }
  remaining, results = iter(log_probs), []
  for example, context, answer in zip(examples, contexts, answers, strict=True):
    right, *wrong = (next(remaining) for _ in example.choices)
    values = (
      statistics.fmean(code in answer for code in example.codes),
      rouge1_recall(answer, ' '.join(example.codes)),
      # Not normalised by length: all choices have as many characters.
      float(right > max(wrong)),
    )
    text = context + example.question
    scores = dict(zip(METRICS, values, strict=True))
    results.append(
      predictions.Prediction(example.task, text, example.codes, answer, scores)
    )
    by_task[example.task.partition('/')[0]].append(values)
    by_task.setdefault(example.task, []).append(values)
  return [
    results_store.mean_score(task, metric, column)
    for task, values in by_task.items()
    if values
    for metric, column in zip(METRICS, zip(*values, strict=True), strict=True)
  ] + results


def rouge1_recall(text: str, reference: str) -> float:
  """Returns the share of a reference's words present in a text.

  Equals rouge-score's `rouge1` recall without stemming.
  """
  # rouge-score is in the extra `eval`, not needed by these tasks.
  words, expected = (
    collections.Counter(re.findall('[a-z0-9]+', x.lower()))
    for x in (text, reference)
  )
  return (words & expected).total() / expected.total()


def without_cells(scores: results_store.Scores) -> results_store.Scores:
  """Drops the scores of single lengths, depths and positions."""
  # Comparisons of some 20 examples each would bury the overall scores.
  return {
    name: [score for score in model_scores if not _cell(score)]
    for name, model_scores in scores.items()
  }


def rows(scores: results_store.Scores) -> list[dict[str, str]]:
  """Returns a row per cell: `METRICS` of each model."""
  cells: dict[str, dict[str, list[str]]] = {}
  for name, model_scores in scores.items():
    for score in filter(_cell, model_scores):
      texts = cells.setdefault(score.task, {model: [] for model in scores})
      texts[name].append(f'{score.value:.2f}')
  titles = {name: f'{name}: {", ".join(METRICS)}' for name in scores}
  return [
    {
      'task': task,
      **{titles[name]: ', '.join(x) or '-' for name, x in texts.items()},
    }
    for task, texts in cells.items()
  ]


def grids(
  scores: results_store.Scores,
) -> dict[str, dict[str, dict[str, float]]]:
  """Returns needle scores: model -> metric -> 'LENGTH/DEPTH' -> value."""
  models: dict[str, dict[str, dict[str, float]]] = {}
  for name, model_scores in scores.items():
    for score in model_scores:
      if score.task.startswith('needle/'):
        grid = models.setdefault(name, {}).setdefault(score.metric, {})
        grid[_cell(score)] = score.value
  return models


def _cell(score: results_store.Score) -> str:
  kind, _, cell = score.task.partition('/')
  # Tasks with templates have names with a slash, too.
  return cell if kind in retrieval_tasks.FACTS else ''
