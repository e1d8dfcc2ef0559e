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
  """In-batch metrics, averaged over queries.

  Queries are compared with the documents of their batch of
  `config.train.eval_batch_size` rows, with full-size vectors. `loss` is InfoNCE
  alone, `accuracy` whether the positive is the nearest document.

  Attributes:
    loss: the loss, with the options of the similarities.
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
