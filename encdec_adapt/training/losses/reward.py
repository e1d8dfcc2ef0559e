"""Bradley-Terry loss of reward models on preferences."""

import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from encdec_adapt.models import base_model, build, layers
from encdec_adapt.training.losses import comparison, loss


@dataclasses.dataclass(frozen=True)
class Reward(comparison.Comparison):
  """Bradley-Terry loss: -log sigmoid(chosen - rejected - margin).

  The score of an answer is the head's output after its last token. The margin
  is a field of the record, by default 0 (Llama 2, arXiv:2307.09288, equation 2;
  without it arXiv:2203.02155, equation 1). Metrics use the scores without
  margins.
  """

  name: ClassVar[str] = 'reward'

  def predict(
    self,
    model: build.Model,
    params: base_model.Params,
    batch: loss.Batch,
    **options: Any,
  ) -> loss.Outputs:
    """Computes the state after the last token of each answer, [2 P, 1, D]."""
    states = model.architecture.read_answers(model, params, batch, **options)
    head = model.head(params)
    return loss.Outputs(states[:, None], head, model.config.decoder)

  def compare(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], comparison.Values]:
    """Computes scores and losses; see `comparison.Comparison`."""
    rewards = layers.rewards(outputs.table, outputs.hidden[:, 0])
    rewards = rewards.reshape(-1, 2)
    # The rejected answer's margin is 0.
    scores = rewards - batch['margins']
    losses = -jax.nn.log_sigmoid(scores[:, 0] - scores[:, 1])
    return rewards, {'loss': losses}
