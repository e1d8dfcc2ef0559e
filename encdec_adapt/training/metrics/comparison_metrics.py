"""Held-out metrics of pairwise losses over the two answers of a row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from encdec_adapt.training.losses import comparison
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import held_out_metrics


@dataclasses.dataclass(frozen=True)
class Comparisons(held_out_metrics.HeldOut):
  """Margin metrics, averaged over examples.

  `accuracy` is the fraction of margins above 0 (0 counts half), `brier` the
  mean of (1 - sigmoid(margin))^2, and `length_difference` the number of tokens
  of the chosen minus the rejected answer. `loss` excludes the cross-entropy.
  """

  names: ClassVar[tuple[str, ...]] = (
    'loss',
    'accuracy',
    'brier',
    'margin',
    'length_difference',
  )
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy', 'brier', 'margin')
  selects: ClassVar[str] = 'accuracy'
  shown: ClassVar[tuple[str, ...]] = ('loss', 'margin', 'accuracy')
  unit: ClassVar[str] = 'of preferences'

  loss: comparison.Comparison

  @property
  def references(self) -> tuple[str, ...]:
    """The references of the loss, for its scores."""
    return self.loss.references

  def ratios(
    self,
    outputs: loss_lib.Outputs,
    readers: loss_lib.Readers,
    batch: loss_lib.Batch,
  ) -> held_out_metrics.Ratios:
    """Computes the metrics; see `HeldOut.ratios`."""
    scores, values = self.loss.compare(outputs, readers, batch)
    margins = scores[:, 0] - scores[:, 1]
    lengths = jnp.sum(batch['weights'], axis=-1)  # [P, 2]
    values |= {
      'accuracy': comparison.accuracy(margins),
      'brier': jnp.square(jax.nn.sigmoid(-margins)),
      'margin': margins,
      'length_difference': lengths[:, 0] - lengths[:, 1],
    }
    # Most metrics are means over examples.
    count = comparison.exist(batch).astype(jnp.float32)
    return [
      (
        jnp.where(count > 0, values[name], 0.0),
        lengths[:, 0] if name == 'cross_entropy' else count,
      )
      for name in self.names
    ]


@dataclasses.dataclass(frozen=True)
class Likelihoods(Comparisons):
  """Metrics of log-probability losses, with cross-entropy to chosen answers.

  `cross_entropy` is the mean over tokens of the chosen answers.
  """

  names: ClassVar[tuple[str, ...]] = (*Comparisons.names, 'cross_entropy')
  curves: ClassVar[tuple[str, ...]] = (*Comparisons.curves, 'cross_entropy')
