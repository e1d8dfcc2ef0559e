"""Held-out metrics of embedding models."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.models import build
from encdec_adapt.training.losses import infonce, loss
from encdec_adapt.training.metrics import held_out_metrics


@dataclasses.dataclass(frozen=True)
class Queries(held_out_metrics.HeldOut):
  """Means over queries, which are compared with the texts of their batch.

  The batch is that of `config.train.eval_batch_size`, and whole vectors are
  compared: `loss` is InfoNCE alone, `accuracy` whether no document is nearer
  than the positive.

  Attributes:
    loss: the loss, which has the options of the similarities.
  """

  names: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  unit: ClassVar[str] = 'per query'

  loss: infonce.InfoNce

  def ratios(
    self,
    model: build.Model,
    params: loss.Params,
    batch: loss.Batch,
    frozen: Mapping[str, loss.Frozen],
  ) -> Float[Array, 'm 2 B']:
    """Computes the metrics row by row; see `HeldOut.ratios`."""
    del frozen
    outputs = self.loss.predict(model, params, batch)
    values = self.loss.compare(outputs, outputs.hidden, batch)
    weight = jnp.sum(batch['weights'], axis=1)
    ratios = [[jnp.sum(value, axis=1), weight] for value in values]
    return jnp.stack([jnp.stack(ratio) for ratio in ratios])
