"""The base of losses that compare the two answers of a row.

A subclass gives the answers scores; held-out metrics follow from the margin,
the chosen answer's score minus the rejected one's.
"""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import errors
from encdec_adapt.models import base_model, build, model_config
from encdec_adapt.training.losses import loss

Values = dict[str, Float[Array, 'P']]


@dataclasses.dataclass(frozen=True)
class Comparison(loss.Loss):
  """Base of the losses; see the module's docstring.

  Metrics are means over examples, those of the divisor 'chosen' over the tokens
  of chosen answers. Steps and held-out rows have `accuracy`, the share of
  examples with a margin above 0 (a margin of 0 counts half); steps also the
  mean scores `chosen` and `rejected`, and held-out rows the mean `margin`,
  `brier`, the mean of (1 - sigmoid(margin))^2, and `length_difference`, the
  tokens of the chosen answer minus those of the rejected one.
  """

  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'accuracy': 'mean',
    'chosen': 'mean',
    'rejected': 'mean',
  }
  held_out: ClassVar[tuple[str, ...]] = (
    'loss',
    'accuracy',
    'brier',
    'margin',
    'length_difference',
  )
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy', 'brier')
  selects: ClassVar[str] = 'accuracy'
  highest: ClassVar[bool] = True
  allows_dropout: ClassVar[bool] = False
  unit: ClassVar[str] = 'of preferences'

  def check(
    self, model: model_config.ModelConfig, objectives: loss.Objectives
  ) -> None:
    """Checks that rows have two answers.

    Raises:
      UserError: they have not.
    """
    if any(objective.answers != 2 for objective in objectives):
      raise errors.UserError(
        f'config.loss.kind is {self.kind!r} and config.data.objective is'
        f' {" | ".join(map(str, objectives))!r}, whose rows have no two answers'
        ' to compare; choose the objective preferences or chat_preferences.'
      )

  def weight(self, batch: loss.Batch) -> Float[Array, '']:
    """Returns the number of examples."""
    return jnp.sum(exist(batch), dtype=jnp.float32)

  def compare(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], Values]:
    """Computes the scores of answers, and losses and metrics of examples.

    Args:
      outputs: outputs of the trained model.
      references: outputs of the references, by name.
      batch: fields of `objectives.framing`.

    Returns:
      The scores, and `loss` and metrics of the class by name.
    """
    raise NotImplementedError

  def terms(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    scores, values = self.compare(outputs, references, batch)
    values |= {'chosen': scores[:, 0], 'rejected': scores[:, 1]}
    values['accuracy'] = _accuracy(scores[:, 0] - scores[:, 1])
    return {
      name: jnp.sum(jnp.where(exist(batch), value, 0.0))
      for name, value in values.items()
    }

  def row_ratios(
    self,
    model: build.Model,
    params: base_model.Params,
    batch: loss.Batch,
    references: loss.References | None = None,
  ) -> Float[Array, 'm 2 P']:
    """Computes held-out metrics row by row; see `loss.Loss.row_ratios`."""
    frozen = {
      name: self.predict(self.models[name], references[name], batch)
      for name in self.references
    }
    outputs = self.predict(model, params, batch)
    scores, values = self.compare(outputs, frozen, batch)
    margins = scores[:, 0] - scores[:, 1]
    lengths = jnp.sum(batch['weights'], axis=-1)  # [P, 2]
    values |= {
      'accuracy': _accuracy(margins),
      'brier': jnp.square(jax.nn.sigmoid(-margins)),
      'margin': margins,
      'length_difference': lengths[:, 0] - lengths[:, 1],
    }
    # Most metrics are means over examples.
    count = exist(batch).astype(jnp.float32)
    ratios = [
      [
        jnp.where(count > 0, values[name], 0.0),
        lengths[:, 0] if self.metrics.get(name) == 'chosen' else count,
      ]
      for name in self.held_out
    ]
    return jnp.stack([jnp.stack(ratio) for ratio in ratios])


def exist(batch: loss.Batch) -> Array:
  """Returns which rows hold an example, [P]; the others are filler."""
  return jnp.any(batch['weights'] > 0, axis=(1, 2))


def _accuracy(margins: Float[Array, 'P']) -> Float[Array, 'P']:
  # Policy and reference are equal at the start: no answer is preferred.
  return (jnp.sign(margins) + 1) / 2
