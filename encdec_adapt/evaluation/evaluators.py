"""Evaluators during training, by name and interval (`config.evaluation`).

`loss` runs with every other evaluator, and its record is written last: the
evaluation of a step is complete if and only if the metrics contain its loss,
and a restart drops the results of later steps.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.evaluation.measures import (
  held_out,
  perplexity,
  preference_scores,
  samples,
)
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import task_groups
from encdec_adapt.files import paths
from encdec_adapt.generation import model_in_memory
from encdec_adapt.models import base_model
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.stored import model_on_disk
from encdec_adapt.training import job_telemetry, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.jobs import record_batches
from encdec_adapt.training.jobs import trained as trained_lib
from encdec_adapt.training.metrics import held_out_metrics
from encdec_adapt.training.sections import evaluation_section


def read_tasks(settings: config_lib.Settings) -> dict[str, task_groups.Plan]:
  """Reads the tasks among the evaluators, by name, before any work.

  Args:
    settings: the validated configuration.

  Raises:
    UserError: a task does not exist, or its files are invalid.
  """
  plans = {}
  for name in settings.evaluation.tasks:
    settings.model.architecture.require_generation(
      f'config.evaluation.tasks has {name}, and the model',
      'set tasks to () and tasks_every to 0',
    )
    # A plan per name: scores are shown under this name.
    is_folder = paths.at(name).is_dir()
    plans[name] = task_groups.plan(*([], name) if is_folder else ([name],))
  return plans


class Evaluators:
  """The evaluators of a job; every process calls them together."""

  def __init__(
    self,
    job: job_lib.Job,
    config: Mapping[str, Any],
    tasks: Mapping[str, task_groups.Plan],
    trained: trained_lib.Trained,
    telemetry: job_telemetry.JobTelemetry,
    watch: watchdog.Watchdog,
    batches: record_batches.RecordBatches,
  ):
    """Opens the results and drops any after the last evaluation.

    Args:
      job: the job; its work directory gets `results.jsonl`.
      config: the configuration; its digest is the fingerprint in the results.
      tasks: result of `read_tasks`.
      trained: the model in training, with the frozen models.
      telemetry: logs the scores.
      watch: watchdog of the job.
      batches: continues the held-out prompts of a policy.
    """
    settings, data, workdir = job.settings, job.data, job.workdir
    self._trained, self._watch, self._batches = trained, watch, batches
    self._intervals = job.resolved.evaluate_every
    self._batch_size = settings.train.eval_batch_size
    self._telemetry, placement = telemetry, trained.phases.placement
    metrics = self._metrics = settings.recipe.metrics
    self._evaluator = self._compiled(
      metrics, settings.data.objectives[0].rows.axes
    )
    # Compiles once for each of the metrics.
    self._evaluator_of = functools.cache(
      functools.partial(self._compiled, axes=settings.recipe.rows.axes)
    )
    read = [trained.phases.models[name] for name in metrics.references]
    shapes = [settings.model, *(model.config for model in read)]
    self._held_out = functools.partial(
      setup.evaluation_batches,
      data.evaluation,
      self._batch_size,
      placement,
      teacher=setup.reads_teacher_row(data.train.spec.lengths, *shapes),
    )
    # Later results and samples come from an interrupted evaluation, or from
    # steps repeated after an earlier checkpoint.
    evaluated = telemetry.evaluated
    self._sampler = None
    if evaluation_section.SAMPLES in self._intervals:
      self._sampler = samples.Sampler(workdir, data, evaluated)
    self._store = None
    if distributed.is_lead():
      last_step = -1 if evaluated is None else evaluated
      self._store = results_store.Store(workdir, last_step)
    fingerprint = results_store.digest(config)
    self._model = results_store.Model(workdir, None, fingerprint)
    self._tasks = tasks
    # Kernels do not pay off for a few prompt rows, and `evaluate` also uses
    # 'chunked' for the saved model.
    compute = dataclasses.replace(job.resolved.compute, attention='chunked')
    self._load = functools.partial(
      model_in_memory.LoadedModel,
      model=dataclasses.replace(placement.model, compute=compute),
      stored=model_on_disk.StoredModel(
        paths.at(workdir),
        settings.model,
        settings.data.vocabularies,
        dict,
        objectives=settings.data.objectives,
      ),
      rules=placement.rules,
    )

  def _compiled(
    self,
    metrics: held_out_metrics.HeldOut,
    axes: placement_lib.BatchAxes,
  ) -> Callable[..., perplexity.Result]:
    """Returns the evaluator of metrics, given the frozen models they read."""
    trained, names = self._trained, metrics.references
    models = {name: trained.phases.models[name] for name in names}
    return functools.partial(
      perplexity.Evaluator(trained.phases.placement, metrics, axes, models),
      references={name: trained.frozen[name] for name in names},
    )

  def is_due(self, step: int) -> bool:
    """Returns whether any evaluator runs at a step."""
    return any(step % every == 0 for every in self._intervals.values())

  def run(
    self, step: int, state: state_lib.TrainState, last: bool = False
  ) -> float | None:
    """Runs the due evaluators, and `loss`.

    Args:
      step: step of the state.
      state: state of the job.
      last: whether to run all of them.

    Returns:
      Rank of the selection metric, lower is better; None if nothing is
      evaluated.
    """
    if not self._intervals:
      return None
    with self._telemetry.spent('evaluate'):
      values = self._run(step, self._trained.params(state), last)
    return held_out_metrics.rank(self._metrics, values[self._metrics.selects])

  def _run(
    self, step: int, params: base_model.Params, last: bool
  ) -> dict[str, float]:
    # Each evaluator may exceed the watchdog's timeout for a step.
    beat = functools.partial(self._watch.beat, step, 'evaluate')
    beat()
    result = self._evaluator(params, self._held_out())
    task, values = held_out.TASK, result.values
    losses = result.scores(task) + preference_scores.scores(task, result)
    by_prompt, measured = self._batches.evaluate(step, params, beat)
    rewards = [results_store.mean_score(task, *x) for x in by_prompt.items()]
    for metrics, rows in measured.items():
      rewards += self._evaluator_of(metrics)(params, rows).scores(task)
    values |= {score.metric: score.value for score in rewards}
    losses += rewards
    scores = {evaluation_section.LOSS: losses}
    for name, every in self._intervals.items():
      if name == evaluation_section.LOSS or not (last or step % every == 0):
        continue
      beat()
      loaded = self._load(params=params)
      if name == evaluation_section.SAMPLES:
        self._telemetry.show(name, step, self._sampler(step, loaded))
        continue
      task_scores = [
        score
        for task in self._tasks[name].tasks
        for score in task.scores(loaded, self._batch_size, lambda *_: beat())
        if isinstance(score, results_store.Score)  # No answers.
      ]
      group_scores = self._tasks[name].group_scores(task_scores)
      scores[name] = [*task_scores, *group_scores]
    if self._store:
      model = dataclasses.replace(self._model, step=step)
      for name, results in scores.items():
        # Per-example scores are for comparisons of trained models; at every
        # step, they would bloat the file.
        means = [
          dataclasses.replace(score, scores=(), weights=()) for score in results
        ]
        self._store.add(model, {'evaluator': name}, means)
    # The loss comes last: its record marks the evaluation as complete.
    del scores[evaluation_section.LOSS]
    named = {
      f'{score.task}/{score.metric}': score.value
      for results in scores.values()
      for score in results
    }
    if named:
      self._telemetry.record_scores(step, named)
    columns = 'task', 'metric', 'value', 'stderr', 'n'
    results = itertools.chain(*scores.values())
    rows = [{name: getattr(x, name) for name in columns} for x in results]
    self._telemetry.show('scores', step, rows)
    self._telemetry.record_evaluation(step, values)
    return values
