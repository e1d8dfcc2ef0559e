"""Base class of held-out metrics."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.models import build
from encdec_adapt.training.losses import loss as loss_lib

# Numerator and denominator of every metric, by row.
Ratios = Iterable[tuple[Float[Array, ' n'], Float[Array, ' n']]]


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Held-out metrics of a recipe.

  Attributes:
    names: names of the metrics, in the order of `ratios`.
    curves: metrics recorded during training, including `loss`; metrics not in
      `names` are computed from completions (`training.jobs.policy_batches`).
    selects: the metric of `keep_best` and `patience`: the loss, or a metric of
      which higher values are better.
    shown: metrics of progress lines (of a step), and of the last line and the
      model card (held-out); those of `curves`, in the order shown.
    unit: its unit in printed lines.
    references: names of frozen models of the metrics.
    loss: the loss, for its predictions and options.
  """

  names: ClassVar[tuple[str, ...]]
  curves: ClassVar[tuple[str, ...]]
  selects: ClassVar[str] = 'loss'
  shown: ClassVar[tuple[str, ...]] = ('loss',)
  unit: ClassVar[str]
  references: ClassVar[tuple[str, ...]] = ()

  loss: loss_lib.Loss

  def ratios(
    self,
    outputs: loss_lib.Outputs,
    readers: loss_lib.Readers,
    batch: loss_lib.Batch,
  ) -> Ratios:
    """Returns numerator and denominator of every metric, row by row.

    Rows with a first denominator of 0 do not count.

    Args:
      outputs: outputs of the model.
      readers: function of each reference from a batch to its outputs.
      batch: fields of `objectives.framing`; if `row` is [B, K], each of the K
        segments per packed row is a row of the result.
    """
    raise NotImplementedError


def ratios(
  metrics: HeldOut,
  model: build.Model,
  params: loss_lib.Params,
  batch: loss_lib.Batch,
  frozen: Mapping[str, loss_lib.Frozen],
) -> Float[Array, 'm 2 n']:
  """Computes metrics of a batch; see `HeldOut.ratios`.

  Args:
    metrics: the metrics.
    model: the model.
    params: parameters of the model.
    batch: fields of `objectives.framing`.
    frozen: the models of `HeldOut.references`.
  """
  predict = metrics.loss.predict
  readers = {name: functools.partial(predict, *x) for name, x in frozen.items()}
  pairs = metrics.ratios(predict(model, params, batch), readers, batch)
  return jnp.stack([jnp.stack(pair) for pair in pairs])


def rank(metrics: HeldOut, value: float) -> float:
  """Returns a sort key of a value of `selects`, lowest for the best."""
  return value if metrics.selects == 'loss' else -value


def format_value(name: str, value: float) -> str:
  """Formats the value of a metric for printing."""
  return f'{value:.4f}' if name == 'loss' else f'{value:.4g}'


def describe(metrics: HeldOut, value: float) -> str:
  """Formats a value of `selects` for printing."""
  return f'held-out {metrics.selects} {value:.4f}'
