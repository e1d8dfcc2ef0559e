"""Evaluators during training, by name and interval (`config.train.evaluators`).

`loss` runs whenever another one does, and its record is written last: what was
evaluated at a step is complete if and only if the metrics have its loss, and a
restart drops the rest.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.evaluation.measures import (
  held_out,
  perplexity,
  samples,
)
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.evaluation.tasks import task_groups
from encdec_adapt.files import paths
from encdec_adapt.models import base_model
from encdec_adapt.training import (
  job_telemetry,
  setup,
  train_section,
)
from encdec_adapt.training import state as state_lib


def read_tasks(settings: config_lib.Settings) -> dict[str, task_groups.Plan]:
  """Reads the tasks among the evaluators, by name, before any work.

  Args:
    settings: the validated configuration.

  Raises:
    UserError: there is no such task, or a file of it is wrong.
  """
  found = {}
  for name in settings.train.intervals:
    if name in (train_section.LOSS, train_section.SAMPLES):
      continue
    if not settings.model.architecture.generates:
      raise errors.UserError(
        f'config.train.evaluators has {name}, and the model is encoder-only,'
        ' which tasks do not suit; leave it out.'
      )
    is_folder = paths.at(name).is_dir()
    found[name] = task_groups.plan(
      [] if is_folder else [name], name if is_folder else None
    )
  return found


class Evaluators:
  """The evaluators of a job; every process calls them together."""

  def __init__(
    self,
    workdir: str,
    config: Mapping[str, Any],
    settings: config_lib.Settings,
    tasks: Mapping[str, task_groups.Plan],
    where: state_lib.Placement,
    references: Mapping[str, base_model.Params],
    data: setup.Data,
    telemetry: job_telemetry.JobTelemetry,
  ):
    """Opens the results, without those beyond the last evaluation.

    Args:
      workdir: work directory of the job; gets `results_store.jsonl`.
      config: the configuration, whose digest the results have.
      settings: the validated configuration; the loss has its models.
      tasks: result of `read_tasks`.
      where: the model and the placement of its parameters.
      references: parameters of the reference models.
      data: vocabularies and held-out rows.
      telemetry: gets the scores.
    """
    self._intervals = settings.train.intervals
    self._batch_size = settings.train.eval_batch_size
    self._where, self._data, self._telemetry = where, data, telemetry
    loss, names = settings.loss, settings.loss.held_out_references
    self._references = {name: references[name] for name in names}
    axes = settings.data.objectives[0].maker.axes
    self._evaluator = perplexity.Evaluator(where, loss, axes)
    models = [settings.model, *(loss.models[name].config for name in names)]
    self._teacher = setup.reads_teacher_row(data.train.spec.lengths, *models)
    evaluated = telemetry.evaluated
    self._sampler = None
    if train_section.SAMPLES in self._intervals:
      self._sampler = samples.Sampler(workdir, data, evaluated)
    self._store = None
    if distributed.is_lead():
      beyond = -1 if evaluated is None else evaluated
      self._store = results_store.Store(workdir, beyond)
    self._model = results_store.Model(
      workdir, None, results_store.digest(config)
    )
    self._tasks = tasks
    # Kernels are not for the prompts of a few rows.
    compute = dataclasses.replace(settings.compute, attention='chunked')
    self._load = functools.partial(
      model_in_memory.LoadedModel,
      model=dataclasses.replace(where.model, compute=compute),
      stored=model_on_disk.StoredModel(
        paths.at(workdir),
        settings.model,
        settings.data.vocabularies,
        dict,
        separator=model_on_disk.separator_of(settings),
      ),
      rules=where.rules,
    )

  def is_due(self, step: int) -> bool:
    """Returns whether any evaluator runs at a step."""
    return step % self._intervals[train_section.LOSS] == 0

  def __call__(
    self,
    step: int,
    params: base_model.Params,
    *,
    beat: Callable[[], None],
    last: bool = False,
  ) -> dict[str, float]:
    """Runs the evaluators that are due, and `loss`.

    Args:
      step: the step that the parameters are of.
      params: parameters of the model.
      beat: called before each evaluator, for the watchdog.
      last: runs all of them.

    Returns:
      The held-out metrics of the loss.
    """
    beat()
    held_out_rows = setup.evaluation_batches(
      self._data.evaluation,
      self._batch_size,
      self._where,
      teacher=self._teacher,
    )
    found = self._evaluator(params, held_out_rows, self._references)
    scores = {train_section.LOSS: found.scores(held_out.TASK)}
    for name, every in self._intervals.items():
      if name == train_section.LOSS or not (last or step % every == 0):
        continue
      beat()
      if name == train_section.SAMPLES:
        self._sampler(step, self._load(params=params))
        continue
      loaded, planned = self._load(params=params), self._tasks[name]
      own = [
        score
        for task in planned.tasks
        for score in task.scores(loaded, self._batch_size, lambda *_: beat())
      ]
      scores[name] = [*own, *planned.group_scores(own)]
    if self._store:
      model = dataclasses.replace(self._model, step=step)
      for name, own in scores.items():
        # Scores of single examples are for comparisons of trained models.
        own = [dataclasses.replace(score, scores=()) for score in own]
        self._store.add(model, {'evaluator': name}, own)
    of_tasks = {
      f'{score.task}/{score.metric}': score.value
      for name, own in scores.items()
      if name != train_section.LOSS
      for score in own
    }
    if of_tasks:
      self._telemetry.record_scores(step, of_tasks)
    self._telemetry.record_evaluation(step, found.values)
    return found.values
