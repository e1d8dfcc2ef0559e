"""Scores of models on retrieval tasks, by generation and by likelihood.

`found` is the share of the codes that the greedy answer contains, `rouge1` the
share of their words (ROUGE-1 recall; a code has three), and `choice` whether
the right answer is likelier than three others.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import re
import statistics

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.conversion import (
  model_in_memory,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.evaluation.measures import log_likelihoods
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import retrieval_tasks
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.telemetry import progress

NAME = 'retrieval'
METRICS = ('found', 'rouge1', 'choice')
_ANSWER_TOKENS = 48  # Most tokens of an answer.

# Scores of every model, by its short name.
Scores = Mapping[str, Sequence[results_store.Score]]


@dataclasses.dataclass(frozen=True)
class RetrievalEvaluation:
  """Evaluates models on retrieval tasks.

  Attributes:
    retrieval: what the tasks are made from.
  """

  retrieval: retrieval_tasks.Retrieval
  name = NAME

  def options(self) -> results_store.Options:
    """Returns what decides the scores of a model."""
    return self.retrieval.options()

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks lengths against the needles and what a model reads.

    Raises:
      UserError: the model has no vocabularies, a haystack is shorter than its
        needles, or a prompt longer than the positions that config.json states.
    """
    examples, prompts = self._prompts(stored)
    longest, task = max(
      (len(prompt), example.task)
      for example, prompt in zip(examples, prompts, strict=True)
    )
    limit = pretrained_files.prompt_room(stored, _ANSWER_TOKENS)
    if limit and longest > limit:
      raise errors.UserError(
        f'{task} needs {longest} tokens, with its question, and {stored.path}'
        f' has room for {limit} (max_position_embeddings of its config.json, in'
        ' a decoder-only model without the answer); give smaller'
        ' --retrieval_lengths.'
      )

  def scores(
    self,
    loaded: model_in_memory.LoadedModel,
    rows: int,
    report: progress.Report,
  ) -> list[results_store.Score]:
    """Measures a model.

    Args:
      loaded: the model.
      rows: prompts at a time; divides over the model's devices.
      report: called with the number of answers and choices done, and of all.

    Returns:
      `METRICS` of every kind of task over all its cells (`needle`), then of
      every cell (`needle/512/0.5`).
    """
    examples, prompts = self._prompts(loaded.stored)
    writer = loaded.stored.require_vocabularies().decoder
    pairs = [
      log_likelihoods.Pair(prompt, writer.encode(choice))
      for example, prompt in zip(examples, prompts, strict=True)
      for choice in example.choices
    ]
    total = len(prompts) + len(pairs)
    answers = [''] * len(prompts)
    requests = [
      engine_lib.Request(np.array(prompt, np.int32), _ANSWER_TOKENS)
      for prompt in prompts
    ]
    completions = loaded.engine(rows=rows).run(requests)
    for done, (i, completion) in enumerate(completions, 1):
      answers[i] = completion.text
      report(done, total)
    log_probs = [0.0] * len(pairs)
    scored = log_likelihoods.score(
      loaded, pairs, batch_size=rows, bos=writer.bos
    )
    for done, (i, one) in enumerate(scored, len(prompts) + 1):
      log_probs[i] = one.log_prob
      report(done, total)
    return _scores(examples, answers, log_probs)

  def _prompts(
    self, stored: model_on_disk.StoredModel
  ) -> tuple[list[retrieval_tasks.Example], list[list[int]]]:
    """Returns the examples, and what a model reads of each: BOS first."""
    reader = stored.require_vocabularies().sides[stored.prompt_side]
    examples = list(self.retrieval.examples(reader))
    return examples, [
      [reader.bos, *example.context, *reader.encode(example.question)]
      for example in examples
    ]


def _scores(
  examples: Sequence[retrieval_tasks.Example],
  answers: Sequence[str],
  log_probs: Iterable[float],
) -> list[results_store.Score]:
  """Compares answers with the codes, and likelihoods of the choices."""
  own: dict[str, list[tuple[float, ...]]] = {
    kind: [] for kind in retrieval_tasks.FACTS
  }
  left = iter(log_probs)
  for example, answer in zip(examples, answers, strict=True):
    right, *others = (next(left) for _ in example.choices)
    values = (
      statistics.fmean(code in answer for code in example.codes),
      rouge1_recall(answer, ' '.join(example.codes)),
      float(right > max(others)),
    )
    own[example.task.partition('/')[0]].append(values)
    own.setdefault(example.task, []).append(values)
  return [
    results_store.mean_score(task, metric, column)
    for task, values in own.items()
    for metric, column in zip(METRICS, zip(*values, strict=True), strict=True)
  ]


def rouge1_recall(text: str, reference: str) -> float:
  """Returns the share of a reference's words that a text has.

  As rouge-score's `rouge1` recall without stemming.
  """
  count = lambda x: collections.Counter(re.findall('[a-z0-9]+', x.lower()))  # noqa: E731
  wanted = count(reference)
  return (count(text) & wanted).total() / wanted.total()


def without_cells(scores: Scores) -> dict[str, list[results_store.Score]]:
  """Leaves out the scores of single lengths, depths and positions."""
  return {
    name: [score for score in own if not _is_cell(score)]
    for name, own in scores.items()
  }


def rows(scores: Scores) -> list[dict[str, str]]:
  """Returns a table with a row per cell: `METRICS` of each model."""
  cells: dict[str, dict[str, list[str]]] = {}
  for name, own in scores.items():
    for score in filter(_is_cell, own):
      shown = cells.setdefault(score.task, {model: [] for model in scores})
      shown[name].append(f'{score.value:.2f}')
  titles = {name: f'{name}: {", ".join(METRICS)}' for name in scores}
  return [
    {
      'task': task,
      **{titles[name]: ', '.join(x) or '-' for name, x in shown.items()},
    }
    for task, shown in cells.items()
  ]


def grids(scores: Scores) -> dict[str, dict[str, dict[str, float]]]:
  """Returns values of needles: model -> metric -> 'LENGTH/DEPTH' -> value."""
  found: dict[str, dict[str, dict[str, float]]] = {}
  for name, own in scores.items():
    for score in filter(_is_cell, own):
      kind, _, place = score.task.partition('/')
      if kind == 'needle':
        grid = found.setdefault(name, {}).setdefault(score.metric, {})
        grid[place] = score.value
  return found


def _is_cell(score: results_store.Score) -> bool:
  """Returns whether a score is of one length, depth or position."""
  kind, _, place = score.task.partition('/')
  return bool(place) and kind in retrieval_tasks.FACTS
