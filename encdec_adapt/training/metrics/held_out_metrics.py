"""The base of held-out metrics."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from encdec_adapt.models import build
from encdec_adapt.training.losses import loss


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Held-out metrics of a kind of training.

  Attributes:
    names: names of the metrics, in the order of `ratios`.
    curves: metrics that a run records, `loss` among them; those not in `names`
      are computed from completions (`training.jobs.policy_batches`).
    selects: the metric that `keep_best` and `patience` follow.
    highest: whether its highest value is the best; else the lowest.
    unit: its unit in printed lines.
    references: names of the frozen models that the metrics read.
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
      batch: fields of `objectives.framing`; where `row` is [B, K], each of the
        K segments that a row may have is a row of the result.
      frozen: the models of `references`.

    Returns:
      Numerator and denominator of every metric. A row whose first denominator
      is 0 does not count.
    """
    raise NotImplementedError


def rank(metrics: HeldOut, value: float) -> float:
  """Returns a number that is lowest for the best value of `selects`."""
  return -value if metrics.highest else value


def describe(metrics: HeldOut, value: float) -> str:
  """Names a value of `selects` in printed lines."""
  return f'held-out {metrics.selects} {value:.4f}'
