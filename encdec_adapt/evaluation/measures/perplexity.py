"""Loss per target token, or other metrics of a loss, on held-out batches.

Encoder-decoders and decoder-only models are measured on the same target tokens
of the same batches of pairs (`models.architecture` feeds them); decoder-only
models also on causal batches. From `evaluation`, this module imports only
`results`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import types
from typing import Any

import jax
from jaxtyping import Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.models import base_model, build
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import loss
from encdec_adapt.training.metrics import held_out_metrics


@dataclasses.dataclass(frozen=True)
class Result:
  """Held-out metrics over all rows with targets.

  Attributes:
    metrics: names of the metrics.
    ratios: numerator and denominator of each metric by row, or by text of a
      packed row; see `metrics.held_out_metrics.HeldOut.ratios`.
    rows: indices of the rows in their record set, repeated for each text of a
      packed row; empty for rows without a record set.
  """

  metrics: tuple[str, ...]
  ratios: np.ndarray  # [metrics, 2, n]
  rows: Int[np.ndarray, ' n'] = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )

  @property
  def values(self) -> dict[str, float]:
    """The metrics: ratios of sums over the rows."""
    sums = self.ratios.sum(axis=2).tolist()
    # Not the mean of per-row ratios: rows are weighted by tokens.
    return {
      name: numerator / denominator
      for name, (numerator, denominator) in zip(self.metrics, sums, strict=True)
    }

  @property
  def weight(self) -> float:
    """Sum of the weights of the first metric."""
    return float(self.ratios[0, 1].sum())

  def scores(
    self, task: str, groups: Sequence[str] = ()
  ) -> list[results_store.Score]:
    """Returns the metrics as scores of a task.

    Args:
      task: name of the task.
      groups: group of each row; empty if each is a separate group.
    """
    return [
      results_store.ratio_score(task, name, *rows, groups)
      for name, rows in zip(self.metrics, self.ratios, strict=True)
    ]


def outputs(
  run: Callable[[dict[str, jax.Array]], Any],
  batches: Iterable[Mapping[str, np.ndarray]],
  placement: state_lib.Placement,
  axes: placement_lib.BatchAxes = types.MappingProxyType({}),
) -> Iterator[Any]:
  """Runs a compiled function on batches and yields its outputs on the host.

  Args:
    run: computes replicated arrays from the fields of a global batch.
    batches: this process's rows of every batch.
    placement: mesh and rules of the batches.
    axes: logical axes of batch fields, see `placement.batch_axes`.
  """
  pending = []
  for batch in batches:
    pending.append(run(step_lib.place_batch(batch, placement, axes)))
    # The copy blocks on the devices. Delayed by one batch, it overlaps their
    # computation with the host's preparation of the next batch.
    if len(pending) > 1:
      yield jax.device_get(pending.pop(0))
  yield from map(jax.device_get, pending)


class Evaluator:
  """Evaluates one model; compiles once per batch shape."""

  def __init__(
    self,
    placement: state_lib.Placement,
    metrics: held_out_metrics.HeldOut,
    axes: placement_lib.BatchAxes = types.MappingProxyType({}),
    models: Mapping[str, build.Model] = types.MappingProxyType({}),
  ):
    """Sets up the evaluation.

    Args:
      placement: the model and the placement of its parameters.
      metrics: the held-out metrics.
      axes: logical axes of batch fields, see `placement.batch_axes`.
      models: frozen models of the metrics, by name.
    """
    self._placement, self._metrics, self._axes = placement, metrics, axes

    def sums(params, batch, references) -> jax.Array:
      with partition.use(placement.mesh, placement.rules.as_dict()):
        frozen = {
          name: loss.Frozen(models[name], x) for name, x in references.items()
        }
        return held_out_metrics.ratios(
          metrics, placement.model, params, batch, frozen
        )

    # Public: `planner` compiles it without arrays.
    self.sums = jax.jit(
      sums,
      # Every process needs the ratios of all rows.
      out_shardings=placement_lib.replicated(placement.mesh),
      compiler_options=compiler.options(placement.mesh),
    )
    self._replicate = jax.jit(
      lambda x: x, out_shardings=placement_lib.replicated(placement.mesh)
    )

  def __call__(
    self,
    params: base_model.Params,
    batches: Iterable[Mapping[str, np.ndarray]],
    references: Mapping[str, base_model.Params] | None = None,
  ) -> Result:
    """Evaluates parameters on a stream of batches.

    Up to rounding, the result is independent of the batch size. Rows follow the
    order of the batches; with several processes, of the devices.

    Args:
      params: parameters of the model.
      batches: this process's rows of every batch, with record indices in the
        field `row` if they are records; filler rows have weight 0.
      references: parameters of the frozen models, by name.

    Raises:
      UserError: the batches have no target tokens.
    """
    metrics, no_rows = self._metrics.names, np.zeros(0, np.int32)

    def run(fields):
      # `row` has the record indices of a batch; models do not read it.
      rows = self._replicate(fields['row']) if 'row' in fields else no_rows
      return self.sums(params, fields, references or {}), rows

    # float64 promotes the concatenation: float32 sums over many rows would
    # lose precision.
    empty = np.zeros((len(metrics), 2, 0), np.float64), no_rows
    results = outputs(run, batches, self._placement, self._axes)
    chunks, rows = zip(empty, *results, strict=True)
    ratios = np.concatenate(chunks, axis=2)
    # Filler rows of the last batch have no weight.
    is_weighted = ratios[0, 1] != 0
    ratios, rows = ratios[..., is_weighted], np.hstack([*map(np.ravel, rows)])
    if not ratios.size:
      raise errors.UserError(
        'the evaluation has no target tokens: there are no held-out rows, or'
        ' all weights are 0. Materialise an evaluation split with text in it.'
      )
    return Result(metrics, ratios, rows[is_weighted] if len(rows) else rows)
