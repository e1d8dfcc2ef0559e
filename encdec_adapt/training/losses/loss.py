"""The base class of losses, and what a step computes with any of them.

Imports no module of a loss.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import keys
from encdec_adapt.models import base_model, build, expert_layer, model_config

SECTION = 'config.loss.'
KIND = f'{SECTION}kind'
TEACHER = 'teacher'  # The frozen model that `config.teacher` names.

Batch = Mapping[str, Array]
Params = base_model.Params
Terms = dict[str, Array]


class Outputs(NamedTuple):
  """Results of a model for a batch.

  Attributes:
    hidden: states that predict the targets, [B, T, D].
    table: output table, [V, D].
    config: shape of the stack that computed the states.
  """

  hidden: Array
  table: Array
  config: model_config.StackConfig


# Outputs of a frozen model for a batch, by its name.
Readers = Mapping[str, Callable[[Batch], Outputs]]


class Frozen(NamedTuple):
  """A frozen model that a loss reads.

  Attributes:
    model: the model, static in a compiled step.
    params: its parameters, arguments of the step.
  """

  model: build.Model
  params: Params


@dataclasses.dataclass(frozen=True)
class Loss:
  """Base of the losses; its keys are those of every loss.

  Attributes:
    name: value of `config.loss.kind`, and name of the section of its options.
    references: names of the frozen models that the loss reads.
    metrics: metric of a step -> 'sum', or its divisor in `divisors`, such as
      'mean'. A loss adds its terms to those here: `loss`, `weight` (target
      tokens of all answers), and for models with experts `load_balance` (1 if
      all experts get equally many tokens) and `router_z_loss`, both unweighted
      means over layers and tokens of a microbatch.
  """

  name: ClassVar[str]
  references: ClassVar[tuple[str, ...]] = ()
  metrics: ClassVar[Mapping[str, str]] = {
    'loss': 'mean',
    'weight': 'sum',
    'load_balance': 'mean',
    'router_z_loss': 'mean',
  }

  load_balance: float = keys.key(
    0.01,
    'Models with experts: weight of the load-balancing loss, per layer over'
    ' the tokens of a microbatch (Switch Transformer: 0.01).',
    at_least=0,
    shared=True,
  )
  router_z_loss: float = keys.key(
    0.0,
    "Models with experts: weight of the router's z-loss (ST-MoE: 0.001).",
    at_least=0,
    shared=True,
  )
  chunk: int = keys.key(
    1024,
    'Tokens of a device whose logits are in memory at a time. Devices that'
    ' share a table gather theirs: 256 on each of 16 are 4096 rows of logits.',
    at_least=1,
    shared=True,
  )

  def __post_init__(self):
    keys.check(self, SECTION, f'{self.name}.')

  def predict(
    self, model: build.Model, params: Params, batch: Batch, **options: Any
  ) -> Outputs:
    """Computes the states of a model that predict the targets.

    Args:
      model: the trained model or a frozen one.
      params: its parameters.
      batch: fields of `objectives.framing`; the answers of a group, [P, G, T],
        are rows of the result, [P * G, T, D].
      **options: of `architecture.Architecture.predict`.
    """
    hidden = model.architecture.predict(model, params, batch, **options)
    return Outputs(hidden, model.head(params), model.config.decoder)

  def divisors(self, batch: Batch) -> Terms:
    """Returns the divisors that `metrics` names; 'mean' is that of the loss."""
    return {'mean': jnp.sum(batch['weights'])}

  def terms(self, outputs: Outputs, frozen: Readers, batch: Batch) -> Terms:
    """Computes the metrics of a batch as sums.

    Args:
      outputs: outputs of the trained model.
      frozen: for each of `references` the outputs for a batch.
      batch: fields of `objectives.framing`.

    Returns:
      Metric -> sum over the batch; `loss` carries the gradient.
    """
    raise NotImplementedError

  def objective(self, terms: Terms, divisors: Terms) -> Float[Array, '']:
    """Returns the part of a step's loss that the sums of a microbatch make."""
    return terms['loss'] / divisors['mean']


def divisors_of(loss: Loss, batch: Batch) -> Terms:
  """Returns the divisors of a batch, 1 in place of 0."""
  # A batch of weight zero has zero gradients; avoid 0 / 0.
  return jax.tree.map(
    lambda weight: jnp.where(weight > 0, weight, 1.0), loss.divisors(batch)
  )


def sums(
  loss: Loss,
  model: build.Model,
  params: Params,
  batch: Batch,
  frozen: Mapping[str, Frozen],
  dropout: base_model.Dropout | None = None,
  **options: Any,
) -> Terms:
  """Computes the terms of a batch, its weight, and the losses of routers.

  Args:
    loss: the loss.
    model: the trained model.
    params: its parameters.
    batch: fields of `objectives.framing`.
    frozen: the frozen models that the loss reads, which no gradient reaches.
    dropout: dropout of the trained model; frozen models have none.
    **options: further options of `predict`, of all models.
  """
  predict = functools.partial(loss.predict, **options)
  # Stopped at their parameters: their states then need no backward pass and
  # none of their activations are stored for it.
  readers = {
    name: functools.partial(predict, x.model, jax.lax.stop_gradient(x.params))
    for name, x in frozen.items()
  }
  routing = []
  outputs = predict(model, params, batch, routing=routing, dropout=dropout)
  terms = loss.terms(outputs, readers, batch)
  # Target tokens also where the divisor counts examples: the cost of a run is
  # counted by them.
  terms['weight'] = jnp.sum(batch['weights'])
  if not routing:
    return terms
  # Router losses are means; scaled by the weight they add up like the sums.
  weight = loss.divisors(batch)['mean']
  routed = jax.tree.map(
    lambda mean: weight * mean, expert_layer.mean_losses(routing)
  )
  total = terms['loss'] + loss.load_balance * routed.balance
  return terms | {
    'loss': total + loss.router_z_loss * routed.z,
    'load_balance': routed.balance,
    'router_z_loss': routed.z,
  }


def averages(loss: Loss, terms: Terms, divisors: Terms) -> Terms:
  """Returns the metrics of a step.

  Args:
    loss: the loss.
    terms: sums over the whole batch.
    divisors: divisors of the whole batch.
  """
  # Divided once, after all microbatches: their weights are unequal.
  means = {
    name: value
    if loss.metrics[name] == 'sum'
    else value / divisors[loss.metrics[name]]
    for name, value in terms.items()
  }
  return means | {'loss': loss.objective(terms, divisors)}
