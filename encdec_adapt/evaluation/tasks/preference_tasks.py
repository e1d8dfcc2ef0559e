"""Preferences and rewards: models' rankings of given answers.

A model prefers the answer with the higher score. The run's loss defines the
score (`training.losses`): the reward for a reward model, beta * (log pi - log
reference) for a policy with a reference. Models without preference training
score answers with the mean log-probability of their tokens. From `evaluation`,
this module imports `measures` and `results`.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.data.sources import preference_source
from encdec_adapt.evaluation.measures import perplexity, preference_scores
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.evaluation.tasks import prompted_task
from encdec_adapt.files import paths
from encdec_adapt.generation import answer_encoding, model_in_memory
from encdec_adapt.inference import lengths, rewards
from encdec_adapt.objectives import example_maker, framing, preferences
from encdec_adapt.stored import model_on_disk
from encdec_adapt.telemetry import progress
from encdec_adapt.training import setup
from encdec_adapt.training.jobs import job_models
from encdec_adapt.training.losses import preference, reward
from encdec_adapt.training.metrics import comparison_metrics

# For models without preference training: mean log-probabilities.
_PLAIN = preference.Simpo(beta=1.0, gamma=0.0)


@dataclasses.dataclass(frozen=True)
class PreferenceEvaluation:
  """Evaluates models on the preferences of a source.

  Attributes:
    source: the source.
    documents: id and content of each preference; see
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
      UserError: the model predicts no text and is not a reward model, has no
        vocabularies or too few positions, or a preference is invalid.
    """
    kind = stored.model.architecture
    if 'pair' not in kind.rows:
      raise errors.UserError(
        f'{stored.path} is a model of kind {kind.name} that predicts no'
        ' answers; leave it out, or leave out --preferences.'
      )
    examples, count = self._examples(stored)[1], len(self.documents)
    if distributed.is_lead() and len(examples) < count:
      print(
        f'note: {stored.path} compares {len(examples)} of {count} preferences;'
        ' the others are ties, have more tokens than it has positions, or a'
        ' token that spans prompt and answer.'
      )

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Compares the answers of each preference.

    Args:
      model: the model.
      rows: preferences at a time; divides over the model's devices.
      report: progress callback (preferences done, all preferences).

    Returns:
      The held-out metrics of the model's loss, with `accuracy` (ties count
      half) and `brier`; `preference_scores.scores`; and a prediction per
      preference: the model's preferred answer.
    """
    contents, examples = self._examples(model.stored)
    ids = model.stored.require_vocabularies().framing
    # Rows of any length have the same positions.
    row = framing.Lengths(1, 1, ids.encoder.frame_size)
    longest = map(max, zip(*(x.positions(row) for x in examples), strict=True))
    metrics, references = _open_metrics(model, framing.Lengths(*longest))
    axes = preferences.ROWS.axes
    models = {name: x.placement.model for name, x in references.items()}
    evaluator = perplexity.Evaluator(model.placement, metrics, axes, models)
    shapes = [model.config, *(x.config for x in models.values())]
    frozen, _ = job_models.read_frozen(references)

    def batches() -> Iterator[framing.Batch]:
      local = setup.local_rows(rows, model.placement)
      teacher = setup.reads_teacher_row(row, *shapes)
      for start in range(0, len(examples), rows):
        report(start, len(examples))
        chunk = examples[start : start + rows]
        sizes = zip(*(x.positions(row) for x in chunk), strict=True)
        size = framing.Lengths(*(lengths.bucket(max(n)) for n in sizes))
        frame = preferences.ROWS.frame
        parts = [chunk[i : i + 1] for i in local]  # Empty after the last batch.
        yield framing.stack_rows(
          [frame(x, size, ids, teacher=teacher) for x in parts]
        )

    result = evaluator(model.params, batches(), frozen)
    # Margins of different losses have different scales: only which answer is
    # preferred is compared between models.
    scores = [
      x if x.metric == metrics.selects else dataclasses.replace(x, scores=())
      for x in result.scores(self.name)
    ]
    scores += preference_scores.scores(self.name, result)
    values = dict(zip(result.metrics, result.ratios[:, 0], strict=True))
    for i, (chosen, rejected, prompt, _) in enumerate(contents):
      names = 'accuracy', 'margin'
      metrics = {name: float(values[name][i]) for name in names}
      answer = chosen if metrics['margin'] > 0 else rejected
      scores.append(_prediction(self.name, prompt, [chosen], answer, metrics))
    return scores

  def _examples(
    self, stored: model_on_disk.StoredModel
  ) -> tuple[list[list[Any]], list[preferences.Preference]]:
    prompts = [content[2] for _, content in self.documents if content]
    maker = answer_encoding.maker(stored, 'preferences', prompts)
    policy = example_maker.DocumentPolicy(self.source.locate)
    # Text of the documents, indexed by example id.
    texts = ((name, json.dumps(content)) for name, content in self.documents)
    examples = list(maker.examples(texts, None, policy))
    sizes = [x.positions(maker.lengths) for x in examples]
    kept = answer_encoding.fits(stored, sizes)
    examples = [x for x, fits in zip(examples, kept, strict=True) if fits]
    if not examples:
      raise errors.UserError(
        f'{stored.path} can compare no preference of {self.source.name}.'
      )
    contents = dict(self.documents)
    return [contents[x.documents[0]] for x in examples], examples


def _open_metrics(
  model: model_in_memory.LoadedModel, longest: framing.Lengths
) -> tuple[comparison_metrics.Comparisons, dict[str, job_models.OpenedModel]]:
  """Returns the metrics of a model's run, and their frozen models."""
  stored = model.stored
  if stored.checkpoint:
    run = config_lib.load_run(str(stored.path))
    if isinstance(run.recipe.metrics, comparison_metrics.Comparisons):
      return run.recipe.metrics, job_models.open_frozen(
        run.recipe.frozen,
        run.teacher.dtype,
        model.placement,
        model.model.compute,
        stored.vocabularies,
        longest,
      )
  if not stored.model.decoder.head.predicts_tokens:
    return comparison_metrics.Comparisons(reward.Reward()), {}
  return comparison_metrics.Likelihoods(_PLAIN), {}


def _prediction(
  task: str, prompt: answer_encoding.Prompt, *fields: Any
) -> predictions.Prediction:
  if not isinstance(prompt, str):
    prompt = '\n\n'.join(f'{x["role"]}: {x["content"]}' for x in prompt)
  return predictions.Prediction(task, prompt, *fields)


def read_preferences(
  spec: str, limit: int | None = None
) -> PreferenceEvaluation:
  """Reads GLOB#FIELDS, like the source `preferences:`.

  Args:
    spec: files and fields, see `data.sources.preference_source`.
    limit: maximum number of preferences to read.

  Raises:
    UserError: a file is missing or a line is invalid; names it.
  """
  source = preference_source.PreferenceSource(f'preferences:{spec}')
  documents = [(x.id, json.loads(x.text)) for x in source.documents()]
  return PreferenceEvaluation(source, documents[:limit])


@dataclasses.dataclass(frozen=True)
class RewardEvaluation:
  """Scores the completions of a file with reward models.

  Attributes:
    name: name of the task.
    rows: prompt, completion, and whether the completion has an end token.
  """

  name: str
  rows: Sequence[tuple[answer_encoding.Prompt, str, bool]]

  def options(self) -> results_store.Options:
    """Returns the inputs of the scores."""
    return {'rewards': self.name, 'content': results_store.digest(self.rows)}

  def check(self, stored: model_on_disk.StoredModel) -> None:
    """Checks that a model is a reward model with vocabularies."""
    rewards.require_reward_model(stored.model, str(stored.path))
    stored.require_vocabularies()

  def scores(
    self, model: model_in_memory.LoadedModel, rows: int, report: progress.Report
  ) -> list[predictions.Result]:
    """Returns the mean `reward`, and the reward of each completion."""
    report(0, len(self.rows))
    values = answer_encoding.score_texts(
      model, *zip(*self.rows, strict=True), batch_size=rows
    ).tolist()
    return [results_store.mean_score(self.name, 'reward', values)] + [
      _prediction(self.name, prompt, [], completion, {'reward': value})
      for (prompt, completion, _), value in zip(self.rows, values, strict=True)
    ]


def read_completions(spec: str, limit: int | None = None) -> RewardEvaluation:
  """Reads FILE.jsonl[#PROMPT,COMPLETION], by default prompt and completion.

  Files written by `generate` have the fields prompt and continuation; a
  truncated completion (`ended` is 'length') is scored at its last token,
  without an end token.

  Raises:
    UserError: the file cannot be read, or a line lacks a field or has a
      completion without tokens; names the line.
  """
  form = 'prompt,completion'
  path, names = prompted_task.file_fields('--rewards', spec, form)
  rows = []
  for line, row in prompted_task.read_rows(path)[:limit]:
    prompt, completion = map(row.get, names)
    ended = row.get('ended') != 'length'
    # An empty completion is scored at its end token; truncated, it has none.
    is_scored = isinstance(completion, str) and (completion or ended)
    if not isinstance(prompt, str | list) or not is_scored:
      raise errors.UserError(
        f'{line}: {names[0]} must be a text or a list of messages, and'
        f' {names[1]} a text, empty only if it has ended; its fields are'
        f' {sorted(row)}.'
      )
    rows.append((prompt, completion, ended))
  return RewardEvaluation(paths.at(path).stem, rows)
