"""Held-out metrics of embedding models."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from encdec_adapt.training.losses import infonce
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import held_out_metrics


@dataclasses.dataclass(frozen=True)
class Queries(held_out_metrics.HeldOut):
  """In-batch metrics, averaged over queries.

  Queries are compared with the documents of their batch of
  `config.train.eval_batch_size` rows, with full-size vectors. `loss` is InfoNCE
  alone, `accuracy` whether the positive is the nearest document.
  """

  names: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  unit: ClassVar[str] = 'per query'

  loss: infonce.InfoNce

  def ratios(
    self,
    outputs: loss_lib.Outputs,
    readers: loss_lib.Readers,
    batch: loss_lib.Batch,
  ) -> held_out_metrics.Ratios:
    """Computes the metrics; see `HeldOut.ratios`."""
    del readers
    values = self.loss.compare(outputs, outputs.hidden, batch)
    weight = jnp.sum(batch['weights'], axis=1)
    return [(jnp.sum(value, axis=1), weight) for value in values]
