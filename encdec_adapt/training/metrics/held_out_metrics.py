"""Base class of held-out metrics."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from encdec_adapt.models import build
from encdec_adapt.training.losses import loss


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Held-out metrics of a recipe.

  Attributes:
    names: names of the metrics, in the order of `ratios`.
    curves: metrics recorded during training, including `loss`; metrics not in
      `names` are computed from completions (`training.jobs.policy_batches`).
    selects: the metric of `keep_best` and `patience`.
    highest: whether higher values are better.
    unit: its unit in printed lines.
    references: names of frozen models of the metrics.
  """

  names: ClassVar[tuple[str, ...]]
  curves: ClassVar[tuple[str, ...]]
  selects: ClassVar[str] = 'loss'
  highest: ClassVar[bool] = False
  unit: ClassVar[str]
  references: ClassVar[tuple[str, ...]] = ()

  def ratios(
    self,
    model: build.Model,
    params: loss.Params,
    batch: loss.Batch,
    frozen: Mapping[str, loss.Frozen],
  ) -> Float[Array, 'm 2 n']:
    """Computes the metrics as ratios of sums, row by row.

    Args:
      model: the model.
      params: its parameters.
      batch: fields of `objectives.framing`; if `row` is [B, K], each of the K
        segments per packed row is a row of the result.
      frozen: the models of `references`.

    Returns:
      Numerator and denominator of every metric. Rows with a first denominator
      of 0 do not count.
    """
    raise NotImplementedError


def rank(metrics: HeldOut, value: float) -> float:
  """Returns a sort key of a value of `selects`, lowest for the best."""
  return -value if metrics.highest else value


def describe(metrics: HeldOut, value: float) -> str:
  """Formats a value of `selects` for printing."""
  return f'held-out {metrics.selects} {value:.4f}'
