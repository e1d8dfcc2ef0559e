"""Batches of on-policy distillation (GKD, arXiv:2306.13649, algorithm 1).

Completions sampled from the student replace the targets of the first rows of a
batch (a fraction of it; rows are shuffled). No gradient flows through samples.
"""

from collections.abc import Callable

import numpy as np

from encdec_adapt.cluster import watchdog
from encdec_adapt.data.records import row_order
from encdec_adapt.models import base_model
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import job_telemetry
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.jobs import record_batches


class OnPolicyBatches(record_batches.SampledBatches):
  """Batches in which completions replace targets."""

  def __init__(
    self,
    job: job_lib.Job,
    telemetry: job_telemetry.JobTelemetry,
    watch: watchdog.Watchdog,
  ):
    """Prepares the sampler; see `record_batches.SampledBatches`."""
    super().__init__(job, telemetry, watch)
    mesh, rules = job.placement.mesh, job.placement.rules
    shards = placement_lib.row_shards(mesh, rules)
    self._count = self._recipe.sampling.rows(self._batch_size)
    # The number of prompts must divide over the mesh.
    self._filler = [None] * (-self._count % shards.total)

  def next(
    self, step: int, params: Callable[[], base_model.Params]
  ) -> tuple[framing.Batch, np.ndarray, dict[str, float]]:
    """Returns the batch of a step; see `record_batches.RecordBatches.next`."""
    local, numbers = self._read_numbers()
    records, count = self._data.train, self._count
    pairs = record_batches.read_pairs(records, numbers)
    prompts = pairs[:count] + self._filler
    with self._telemetry.phase(self._watch, step, 'sample'):
      samples = self._sampler(
        params(),
        prompts,
        numbers[:count] + [row_order.FILLER] * len(self._filler),
        step,
      )
    chosen = [i for i, pair in enumerate(pairs[:count]) if pair is not None]
    for i in chosen:
      pairs[i] = pairs[i]._replace(targets=samples.completion(i, 0))
    rows = framing.stack_rows(
      [
        framing.frame_row(
          [pairs[i]] if pairs[i] else [],
          self._recipe.rows.lengths,
          records.framing,
          teacher=self._teacher,
        )
        for i in self._local
      ]
    )
    # Never empty: filler rows come only after the last row of a job.
    drawn, divisor = samples.counts[chosen].sum(), len(chosen)
    metrics = {
      'sampled_tokens': float(drawn),
      'length': float(drawn / divisor),
      'cut_short': float((~samples.ended[chosen]).sum() / divisor),
    }
    batch = self._recipe.rows.transform(rows, records.framing.decoder)
    return batch, local, metrics
