"""Log-probabilities of the tokens of answers, which several losses compare."""

from typing import Any

import jax
import jax.numpy as jnp

from encdec_adapt.ops import vocabulary_loss
from encdec_adapt.training.losses import loss


def log_probs(
  outputs: loss.Outputs,
  batch: loss.Batch,
  chunk: int,
  *,
  temperature: float = 1.0,
  entropy: bool = False,
) -> Any:
  """Computes the log-probability of every token of the answers of rows.

  Args:
    outputs: outputs of a model.
    batch: fields of rows of G answers; targets and weights [P, G, T].
    chunk: tokens whose logits are in memory at a time.
    temperature: divisor of the logits, after the soft-cap.
    entropy: whether to return entropies too.

  Returns:
    Float32 [P, G, T], 0 at tokens of weight 0; with `entropy` a pair.
  """
  shape = batch['targets'].shape
  results = vocabulary_loss.token_log_probs(
    outputs.hidden,
    outputs.table,
    batch['targets'].reshape(-1, shape[-1]),
    vocab_size=outputs.config.outputs,
    softcap=outputs.config.final_softcap,
    temperature=temperature,
    chunk=chunk,
    entropy=entropy,
  )
  # Selected, as the gradient of padding's infinite values is NaN.
  counted = batch['weights'] > 0
  return jax.tree.map(
    lambda x: jnp.where(counted, x.reshape(shape), 0.0), results
  )
