"""Training batches of a job.

`RecordBatches` reads them from the records. Subclasses replace targets with
sampled completions (`on_policy`), or add rewards (`policy_batches`).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.data.records import record_sets, row_order
from encdec_adapt.models import base_model
from encdec_adapt.objectives import framing
from encdec_adapt.training import job_telemetry, rollouts, setup
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.metrics import held_out_metrics

# Held-out metrics -> this process's rows, framed as training rows.
Measured = Mapping[held_out_metrics.HeldOut, Sequence[framing.Batch]]


class RecordBatches:
  """Batches of the records, framed by the recipe."""

  def __init__(self, job: job_lib.Job, telemetry: job_telemetry.JobTelemetry):
    """Prepares the batches.

    Args:
      job: the job.
      telemetry: telemetry of the job.
    """
    self._recipe, self._data, self._loader = job.recipe, job.data, job.loader
    self._telemetry, self._shown = telemetry, False

  def next(
    self, step: int, params: Callable[[], base_model.Params]
  ) -> tuple[framing.Batch, np.ndarray, dict[str, float]]:
    """Returns the batch of a step; all processes call it together.

    Args:
      step: step of the parameters, from 0.
      params: returns the parameters of the model, to sample from.

    Returns:
      This process's rows of the batch, their record rows, and metrics of the
      sampled completions.
    """
    del step, params
    rows = self._read()
    numbers = rows.pop('row')
    ids = self._data.vocabularies.decoder.ids
    return self._recipe.rows.transform(rows, ids), numbers, {}

  def evaluate(
    self, step: int, params: base_model.Params, beat: Callable[[], None]
  ) -> tuple[dict[str, list[float]], Measured]:
    """Returns scores of completions of held-out prompts, and what to measure.

    Args:
      step: step of the parameters.
      params: parameters of the model.
      beat: called before each batch of prompts, for the watchdog.
    """
    del step, params, beat
    return {}, {}

  def _read(self) -> framing.Batch:
    with self._telemetry.spent('data'):
      rows = next(self._loader)
    if not self._shown:
      self._data.train.check_framing(rows, self._data.vocabularies.decoder)
      objective = self._data.train.spec.objectives[0]
      labels = objective.options.get('labels', ())
      distributed.log(
        setup.describe_batch(rows, self._data.vocabularies, labels)
      )
      self._shown = True
    return rows


class SampledBatches(RecordBatches):
  """Base class of batches with sampled completions."""

  def __init__(
    self,
    job: job_lib.Job,
    telemetry: job_telemetry.JobTelemetry,
    watch: watchdog.Watchdog,
  ):
    """Prepares the sampler.

    Args:
      job: the job.
      telemetry: telemetry of the job.
      watch: watchdog of the job.
    """
    super().__init__(job, telemetry)
    self._watch, self._teacher = watch, job.reads_teacher_row
    self._batch_size = job.settings.train.batch_size
    self._local = setup.local_rows(self._batch_size, job.placement)
    self._sampler = rollouts.Sampler(
      job.placement,
      self._data.train,
      self._data.vocabularies.decoder,
      self._recipe.sampling,
      job.settings.seed,
    )

  def _read_numbers(self) -> tuple[np.ndarray, list[int]]:
    """Reads a batch; returns record rows of this process, and of all."""
    first, order = self._loader.position, self._loader.order
    local = self._read()['row']
    return local, [order.row(first + i) for i in range(self._batch_size)]


def read_pairs(
  records: record_sets.RecordSet, rows: Sequence[int]
) -> list[framing.Pair | None]:
  """Reads rows with a single pair each; None for filler rows."""
  content = iter(records.read([row for row in rows if row != row_order.FILLER]))
  return [None if row == row_order.FILLER else next(content)[0] for row in rows]
