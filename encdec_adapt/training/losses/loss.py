"""Base class of losses, and the sums and metrics of a step.

Imports no loss.
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
TEACHER = 'teacher'  # The frozen model of `config.teacher`.

Batch = Mapping[str, Array]
Params = base_model.Params
Terms = dict[str, Array]


class Outputs(NamedTuple):
  """Outputs of a model for a batch.

  Attributes:
    hidden: hidden states before the head, [B, T, D].
    table: output table, [V, D].
    config: the stack of the hidden states.
  """

  hidden: Array
  table: Array
  config: model_config.StackConfig


# Functions from a batch to the outputs of a frozen model, by name.
Readers = Mapping[str, Callable[[Batch], Outputs]]


class Frozen(NamedTuple):
  """A frozen model of a loss.

  Attributes:
    model: the model, static in a compiled step.
    params: its parameters, arguments of the step.
  """

  model: build.Model
  params: Params


@dataclasses.dataclass(frozen=True)
class Loss:
  """Base class of losses, with the keys of every loss.

  Attributes:
    name: value of `config.loss.kind`, and section of its options.
    references: names of the frozen models that the loss reads.
    metrics: metric of a step -> 'sum', or its divisor in `divisors`, such as
      'mean'. Subclasses add their terms to the common metrics: `loss`, `weight`
      (target tokens of all answers), and for models with experts
      `load_balance` (1 if all experts get equally many tokens) and
      `router_z_loss`, both unweighted means over layers and tokens of a
      microbatch.
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
    """Computes the hidden states that predict the targets.

    Args:
      model: the trained model or a frozen model.
      params: its parameters.
      batch: fields of `objectives.framing`; G answers per row, [P, G, T],
        become rows of the result, [P * G, T, D].
      **options: options of `architecture.Architecture.predict`.
    """
    hidden = model.architecture.predict(model, params, batch, **options)
    return Outputs(*model.projection(params, hidden), model.config.decoder)

  def divisors(self, batch: Batch) -> Terms:
    """Returns the divisors named in `metrics`; 'mean' divides the loss."""
    return {'mean': jnp.sum(batch['weights'])}

  def terms(self, outputs: Outputs, frozen: Readers, batch: Batch) -> Terms:
    """Computes the metrics of a batch as sums.

    Args:
      outputs: outputs of the trained model.
      frozen: function of each reference from a batch to its outputs.
      batch: fields of `objectives.framing`.

    Returns:
      Metric -> sum over the batch; `loss` is differentiated.
    """
    raise NotImplementedError

  def objective(self, terms: Terms, divisors: Terms) -> Float[Array, '']:
    """Returns the contribution of a microbatch's sums to a step's loss."""
    return terms['loss'] / divisors['mean']


def divisors_of(loss: Loss, batch: Batch) -> Terms:
  """Returns the divisors of a batch, with 0 replaced by 1."""
  # A batch of weight 0 has zero gradients; avoid 0 / 0.
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
  """Computes the terms of a batch, its weight, and the router losses.

  Args:
    loss: the loss.
    model: the trained model.
    params: its parameters.
    batch: fields of `objectives.framing`.
    frozen: the frozen models that the loss reads, without gradients.
    dropout: dropout of the trained model; frozen models have none.
    **options: further options of `predict`, for all models.
  """
  predict = functools.partial(loss.predict, **options)
  # stop_gradient on the parameters: no activations are stored for a backward
  # pass of frozen models.
  readers = {
    name: functools.partial(predict, x.model, jax.lax.stop_gradient(x.params))
    for name, x in frozen.items()
  }
  routing = []
  outputs = predict(model, params, batch, routing=routing, dropout=dropout)
  terms = loss.terms(outputs, readers, batch)
  # Target tokens even where the divisor counts examples: the cost of a run is
  # computed from them.
  terms['weight'] = jnp.sum(batch['weights'])
  if not routing:
    return terms
  # Router losses are means; scaled by the weight, they add up like sums.
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
  # Divide once, after all microbatches: their weights are unequal.
  means = {
    name: value
    if loss.metrics[name] == 'sum'
    else value / divisors[loss.metrics[name]]
    for name, value in terms.items()
  }
  return means | {'loss': loss.objective(terms, divisors)}
