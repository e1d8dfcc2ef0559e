"""Reward models: a scalar head, trained on preferences (`kind='reward'`)."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from encdec_adapt.base import errors
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import base_model, build, layers, model_config
from encdec_adapt.training.losses import comparison, loss


@dataclasses.dataclass(frozen=True)
class Form:
  """Options of the loss, which has none."""


@dataclasses.dataclass(frozen=True)
class Reward(comparison.Comparison):
  """The loss of Bradley and Terry: -log sigmoid(chosen - rejected - margin).

  The score of an answer is the head's output at the state that has read all of
  it. The margin is that of the record, 0 where it has none (Llama 2,
  arXiv:2307.09288, equation 2; without it arXiv:2203.02155, equation 1).
  Metrics are of the scores without margins.
  """

  name: ClassVar[str] = 'reward'
  forms: ClassVar[Mapping[str, type]] = {'reward': Form}

  def __post_init__(self):
    super().__post_init__()
    if self.kind_name in self.forms:
      for part, _ in self.kind_parts[1]:
        raise part.error('must be left out: a reward model predicts no tokens')

  def shape(self, model: model_config.ModelConfig) -> model_config.ModelConfig:
    """Returns the model with a scalar head.

    Raises:
      UserError: it is encoder-only.
    """
    if model.architecture not in architectures.GENERATING:
      raise errors.UserError(
        f'config.loss.kind is {self.kind!r} and config.model.kind'
        f' {model.architecture.name}; a reward model reads a prompt and an'
        f' answer, as {architectures.names(architectures.GENERATING)} do.'
      )
    return model_config.reward_model(model)

  def predict(
    self,
    model: build.Model,
    params: base_model.Params,
    batch: loss.Batch,
    **options: Any,
  ) -> loss.Outputs:
    """Computes the states that have read the answers, [2 P, 1, D]."""
    states = model.architecture.read_answers(model, params, batch, **options)
    head = model.head(params)
    return loss.Outputs(states[:, None], head, model.config.decoder)

  def compare(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], comparison.Values]:
    """Computes scores and losses; see `comparison.Comparison`."""
    rewards = layers.rewards(outputs.table, outputs.hidden[:, 0])
    rewards = rewards.reshape(-1, 2)
    # The rejected answer's margin is 0.
    needed = rewards - batch['margins']
    losses = -jax.nn.log_sigmoid(needed[:, 0] - needed[:, 1])
    return rewards, {'loss': losses}
