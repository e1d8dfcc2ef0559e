"""Base class of pairwise losses over the two answers of a row."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.training.losses import loss

Values = dict[str, Float[Array, 'P']]


@dataclasses.dataclass(frozen=True)
class Comparison(loss.Loss):
  """Base class; subclasses score the answers.

  Metrics are means over examples: `accuracy`, the fraction of examples with a
  margin above 0 (a margin of 0 counts half), `margin`, and the mean scores
  `chosen` and `rejected`. The margin is the chosen minus the rejected score.
  """

  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'accuracy': 'mean',
    'margin': 'mean',
    'chosen': 'mean',
    'rejected': 'mean',
  }

  def divisors(self, batch: loss.Batch) -> loss.Terms:
    """Returns the number of examples."""
    return {'mean': jnp.sum(exist(batch), dtype=jnp.float32)}

  def compare(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], Values]:
    """Computes the scores of answers, and losses and metrics per example.

    Args:
      outputs: outputs of the trained model.
      frozen: see `loss.Loss.terms`.
      batch: fields of `objectives.framing`.

    Returns:
      The scores, and a dictionary of `loss` and further metrics.
    """
    raise NotImplementedError

  def terms(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    scores, values = self.compare(outputs, frozen, batch)
    values |= {'chosen': scores[:, 0], 'rejected': scores[:, 1]}
    values['margin'] = scores[:, 0] - scores[:, 1]
    values['accuracy'] = accuracy(values['margin'])
    return {
      name: jnp.sum(jnp.where(exist(batch), value, 0.0))
      for name, value in values.items()
    }


def exist(batch: loss.Batch) -> Array:
  """Returns a mask of the rows with an example, [P]; others are filler."""
  return jnp.any(batch['weights'] > 0, axis=(1, 2))


def accuracy(margins: Float[Array, 'P']) -> Float[Array, 'P']:
  """Returns 1 where the margin is above 0, and 0.5 where it is 0."""
  # Policy and reference are equal at the start, so all margins are 0.
  return (jnp.sign(margins) + 1) / 2
