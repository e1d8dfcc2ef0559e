"""Preferences and rewards: how models rank answers that others have written.

A model prefers the answer of the higher score: that of its run's loss
(`training.losses`), which for a reward model is the reward, and for a policy
with a reference beta * (log pi - log reference); a model that learnt no
preferences scores by the mean log-probability of an answer's tokens. Of the
other rooms of `evaluation`, `measures` and `results` are imported.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
from typing import Any

import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors, option_strings
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import (
  answer_encoding,
  initial_state,
  model_in_memory,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.data.sources import preference_source
from encdec_adapt.evaluation.measures import perplexity, preference_scores
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.inference import lengths as lengths_lib
from encdec_adapt.inference import rewards
from encdec_adapt.objectives import framing, preferences
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.telemetry import progress
from encdec_adapt.training import setup
from encdec_adapt.training.losses import (
  comparison,
  preference,
  reward,
)
from encdec_adapt.training.losses import loss as loss_lib

# Of a model that learnt no preferences: mean log-probabilities.
_PLAIN = 'simpo:beta=1,gamma=0'


@dataclasses.dataclass(frozen=True)
class PreferenceEvaluation:
  """Evaluates models on the preferences of a source.

  Attributes:
    source: the source.
    documents: id and content of each preference, ties left out; see
      `data.sources.preference_source`.
  """

  source: preference_source.PreferenceSource
  documents: Sequence[tuple[str, list[Any]]]
  name = 'preferences'

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    content = results_store.digest([content for _, content in self.documents])
    return {'preferences': self.source.name, 'content': content}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model can read the preferences.

    Raises:
      UserError: it predicts no text and is no reward model, has no
        vocabularies, or a preference has an empty answer or two equal ones.
    """
    model = stored.model
    if model.decoder.classes != 1 and not model.architecture.generates:
      raise errors.UserError(
        f'{stored.path} is a model of kind {model.architecture.name} that'
        ' predicts no answers; leave it out, or leave out --preferences.'
      )
    self._examples(stored)

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Compares the answers of each preference.

    Args:
      model: the model.
      rows: preferences at a time; divides over the model's devices.
      report: progress callback (preferences done, all preferences).

    Returns:
      `accuracy` (a tie of the scores counts half), `brier`, `loss` (of the
      model's loss), mean `margin` and `length_difference`, those of
      `preference_scores.scores`, and a prediction of each preference: the
      answer that the model prefers.
    """
    examples = self._examples(model.stored)
    # Rows of a batch are padded to the longest; the longest batch comes first.
    order = sorted(
      range(len(examples)),
      key=lambda i: [-n for n in examples[i][1].positions(_ANY)],
    )
    loss, references = _open_loss(model, [x for _, x in examples])
    evaluator = perplexity.Evaluator(
      model.where, loss, preferences.Preferences.axes
    )
    batches = self._batches(model, [examples[i][1] for i in order], rows, loss)
    counted = (
      (report(i * rows, len(examples)), batch)[1]
      for i, batch in enumerate(batches)
    )
    result = evaluator(model.params, counted, references)
    ratios = np.empty_like(result.ratios)
    ratios[..., order] = result.ratios
    result = dataclasses.replace(result, ratios=ratios)
    scores = result.scores(self.name)
    scores += preference_scores.scores(self.name, result)
    by_metric = dict(zip(result.metrics, ratios[:, 0], strict=True))
    return scores + [
      _prediction(
        self.name,
        content,
        {name: float(by_metric[name][i]) for name in ('accuracy', 'margin')},
      )
      for i, (content, _) in enumerate(examples)
    ]

  def _examples(
    self, stored: model_on_disk.StoredModel
  ) -> list[tuple[list[Any], preferences.Preference]]:
    """Returns the preferences that a model has room for, and their tokens."""
    chat = any(isinstance(content[2], list) for _, content in self.documents)
    make = answer_encoding.maker(stored, 'preferences', chat=chat)
    make.locate = self.source.locate
    limits = pretrained_files.stack_positions(stored)
    examples = []
    for name, content in self.documents:
      made = [*make.examples([(name, json.dumps(content))], None)]
      if made and answer_encoding.fits(stored, limits, made[0].pairs):
        examples.append((content, made[0]))
    if not examples:
      raise errors.UserError(
        f'{self.source.name} has no preference that {stored.path} has room for'
        ' (max_position_embeddings of its config.json).'
      )
    if len(examples) < len(self.documents) and distributed.is_lead():
      print(
        f'note: {stored.path} reads {len(examples)} of {len(self.documents)}'
        ' preferences: the others are longer than its positions, or have a'
        ' token that spans prompt and answer.'
      )
    return examples

  def _batches(
    self,
    model: model_in_memory.LoadedModel,
    examples: Sequence[preferences.Preference],
    rows: int,
    loss: loss_lib.Loss,
  ) -> Iterator[framing.Batch]:
    """Yields this process's rows of batches, padded to a few lengths."""
    where, opened = model.where, model.stored.require_vocabularies()
    local = placement_lib.row_shards(where.mesh, where.rules).rows(rows)
    shapes = [model.config, *(x.config for x in loss.models.values())]
    for start in range(0, len(examples), rows):
      chunk = examples[start : start + rows]
      sizes = zip(*(x.positions(_ANY) for x in chunk), strict=True)
      size = framing.Lengths(*(lengths_lib.bucket(max(n)) for n in sizes))
      teacher = setup.reads_teacher_row(size, *shapes)
      yield framing.stack_rows(
        [
          preferences.Preferences.frame(
            chunk[i : i + 1], size, opened.framing, teacher=teacher
          )
          for i in local
        ]
      )


# Positions do not depend on the lengths of rows that have both sides.
_ANY = framing.Lengths(1, 1)


def _open_loss(
  model: model_in_memory.LoadedModel,
  examples: Sequence[preferences.Preference],
) -> tuple[loss_lib.Loss, dict[str, Any]]:
  """Returns the loss that scores answers, and parameters of its references."""
  stored, compute = model.stored, model.model.compute
  if stored.checkpoint:
    run = config_lib.load_run(str(stored.path))
    if isinstance(run.loss, comparison.Comparison):
      sizes = zip(*(x.positions(_ANY) for x in examples), strict=True)
      opened = initial_state.open_references(
        run.loss,
        run.teacher,
        model.where,
        compute,
        stored.vocabularies,
        framing.Lengths(*map(max, sizes)),
      )
      models = {name: x.placement.model for name, x in opened.items()}
      params = {name: x.read() for name, x in opened.items()}
      return dataclasses.replace(run.loss, models=models), params
  if stored.model.decoder.classes:
    return reward.Reward(kind='reward'), {}
  return preference.Preference(kind=_PLAIN), {}


def _prediction(
  task: str, content: Sequence[Any], scores: dict[str, float]
) -> predictions.Prediction:
  """Returns a preference with the answer that a model prefers."""
  chosen, rejected, prompt, _ = content
  answer = chosen if scores['margin'] > 0 else rejected
  return predictions.Prediction(task, _text(prompt), [chosen], answer, scores)


def _text(prompt: answer_encoding.Prompt) -> str:
  """Returns a prompt as a text."""
  if isinstance(prompt, str):
    return prompt
  return '\n\n'.join(f'{x["role"]}: {x["content"]}' for x in prompt)


def read_preferences(
  spec: str, limit: int | None = None
) -> PreferenceEvaluation:
  """Reads GLOB#FIELDS, as the source `preferences:` does.

  Args:
    spec: files and fields, see `data.sources.preference_source`.
    limit: most preferences to read.

  Raises:
    UserError: a file is missing or a line is wrong; names it.
  """
  source = preference_source.PreferenceSource(f'preferences:{spec}')
  documents = [(x.id, json.loads(x.text)) for x in source.documents()]
  whole = [(name, content) for name, content in documents if content]
  if ties := len(documents) - len(whole):
    if distributed.is_lead():
      print(f'note: {source.name} has {ties} ties, which are left out.')
  if not whole:
    raise errors.UserError(f'{source.name} has ties only; nothing is compared.')
  return PreferenceEvaluation(source, whole[:limit])


@dataclasses.dataclass(frozen=True)
class RewardEvaluation:
  """Scores the completions of a file with reward models.

  Attributes:
    name: name of the task.
    prompts: texts, or conversations.
    completions: a text for each prompt.
    ended: whether each completion has an end.
  """

  name: str
  prompts: Sequence[answer_encoding.Prompt]
  completions: Sequence[str]
  ended: Sequence[bool]

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    content = [self.prompts, self.completions, self.ended]
    return {'rewards': self.name, 'content': results_store.digest(content)}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model is a reward model with vocabularies."""
    rewards.require_reward_model(stored.model, str(stored.path))
    stored.require_vocabularies()

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Returns the mean `reward`, and that of each completion."""
    values = answer_encoding.score_texts(
      model,
      self.prompts,
      [[text] for text in self.completions],
      [[ended] for ended in self.ended],
      batch_size=rows,
    )[:, 0]
    report(len(values), len(values))
    examples = zip(self.prompts, self.completions, values, strict=True)
    return [results_store.mean_score(self.name, 'reward', values)] + [
      predictions.Prediction(
        self.name, _text(prompt), [], completion, {'reward': float(value)}
      )
      for prompt, completion, value in examples
    ]


def read_completions(spec: str, limit: int | None = None) -> RewardEvaluation:
  """Reads FILE.jsonl[#PROMPT,COMPLETION], by default prompt and completion.

  Files that `generate` wrote have the fields prompt and continuation; one that
  `ended` by its length is scored at its last token, without an end.

  Raises:
    UserError: the file cannot be read, or a line lacks a field or has an empty
      completion; names the line.
  """
  file, fields = option_strings.Part('--rewards', spec).partition('#')
  names = ['prompt', 'completion']
  if fields:
    names = [field.text for field in fields.divide(',')]
  if len(names) != 2:
    raise fields.error(
      'must be two fields, as in FILE.jsonl#PROMPT,COMPLETION.'
    )
  columns = [], [], []
  for line, row in prompted_task.read_rows(file.text)[:limit]:
    prompt, completion = (row.get(name) for name in names)
    if (
      not isinstance(prompt, (str, list))
      or not isinstance(completion, str)
      or not completion.strip()
    ):
      raise errors.UserError(
        f'{line}: {names[0]} must be a text or a list of messages, and'
        f' {names[1]} a text that is not empty; its fields are {sorted(row)}.'
      )
    values = prompt, completion, row.get('ended') != 'length'
    for column, value in zip(columns, values, strict=True):
      column.append(value)
  return RewardEvaluation(paths.at(file.text).stem, *columns)
