"""Loss per target token, or other metrics of a loss, on held-out batches.

Encoder-decoders and decoder-only models are measured on the same target tokens
of the same batches of pairs (`models.architecture` feeds them); decoder-only
models also on causal batches.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import types

import jax
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.models import base_model
from encdec_adapt.ops import partition
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.training import losses
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Result:
  """Held-out metrics over every row that has targets.

  Attributes:
    metrics: names of the metrics.
    ratios: numerator and denominator of each metric by row; see
      `losses.loss.Loss.row_ratios`.
  """

  metrics: tuple[str, ...]
  ratios: np.ndarray  # [metrics, 2, n]

  @property
  def values(self) -> dict[str, float]:
    """The metrics: ratios of sums over the rows."""
    sums = self.ratios.sum(axis=2).tolist()
    return {
      name: above / below
      for name, (above, below) in zip(self.metrics, sums, strict=True)
    }

  @property
  def weight(self) -> float:
    """Sum of the weights of the first metric."""
    return float(self.ratios[0, 1].sum())

  def scores(self, task: str) -> list[results_store.Score]:
    """Returns the metrics as scores of a task.

    A ratio of sums, such as the loss, has a standard error by the delta
    method: the scores of its rows are the ratio's linearisation, whose mean is
    the ratio.
    """
    return [
      ratio(task, name, *rows)
      for name, rows in zip(self.metrics, self.ratios, strict=True)
    ]


def ratio(
  task: str,
  metric: str,
  above: np.ndarray,
  below: np.ndarray,
) -> results_store.Score:
  """Returns the score of a ratio of sums over rows."""
  value, n = float(above.sum() / below.sum()), len(above)
  scores = value + (above - value * below) / below.mean()
  stderr = float(scores.std(ddof=1)) / n**0.5 if n > 1 else None
  return results_store.Score(
    task, metric, value, stderr, n, tuple(scores.tolist())
  )


class Evaluator:
  """Evaluates one model; compiles once per shape of batch."""

  def __init__(
    self,
    where: state_lib.Placement,
    loss: losses.loss.Loss,
    axes: placement.BatchAxes = types.MappingProxyType({}),
  ):
    """Defines the evaluation.

    Args:
      where: the model and the placement of its parameters.
      loss: has the held-out metrics.
      axes: logical axes of batch fields, see `placement.batch_axes`.
    """
    self._where, self._loss, self._axes = where, loss, axes

    def sums(params, batch, references) -> jax.Array:
      """Computes the ratios of every row of a batch."""
      with partition.use(where.mesh, where.rules.as_dict()):
        return loss.row_ratios(where.model, params, batch, references)

    self.sums = jax.jit(
      sums,
      out_shardings=placement.replicated(where.mesh),
      compiler_options=compiler.options(where.mesh),
    )

  def __call__(
    self,
    params: base_model.Params,
    batches: Iterable[Mapping[str, np.ndarray]],
    references: Mapping[str, base_model.Params] | None = None,
  ) -> Result:
    """Evaluates parameters on a stream of batches.

    Up to rounding, the result is independent of the batch size. Rows are in
    the order of the batches, of the devices where there are several processes.

    Args:
      params: parameters of the model.
      batches: this process's rows of every batch; filler rows have weight 0.
      references: parameters of `held_out_references` of the loss.

    Raises:
      UserError: the batches have no target tokens.
    """
    found: list[np.ndarray] = []
    running = None
    for batch in batches:
      fields = {name: x for name, x in batch.items() if name != 'row'}
      fields = step_lib.place_batch(fields, self._where, self._axes)
      previous, running = running, self.sums(params, fields, references or {})
      if previous is not None:  # One batch late, while the next is prepared.
        found.append(np.asarray(previous, np.float64))
    if running is not None:
      found.append(np.asarray(running, np.float64))
    metrics = self._loss.held_out
    empty = np.zeros((len(metrics), 2, 0))
    ratios = np.concatenate([empty, *found], axis=2)
    ratios = ratios[..., ratios[0, 1] != 0]
    if not ratios.size:
      raise errors.UserError(
        'the evaluation has no target tokens: there are no held-out rows, or'
        ' all weights are 0. Materialise an evaluation split with text in it.'
      )
    return Result(metrics, ratios)
