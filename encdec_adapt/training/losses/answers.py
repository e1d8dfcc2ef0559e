"""Per-token log-probabilities of answers, shared by several losses."""

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
  """Computes the log-probability of every answer token.

  Args:
    outputs: outputs of a model.
    batch: rows of G answers; targets and weights [P, G, T].
    chunk: tokens per chunk of logits.
    temperature: divisor of the logits, after the soft-cap.
    entropy: whether to return entropies too.

  Returns:
    Float32 [P, G, T], 0 at tokens of weight 0; with `entropy`, a pair of log
    probabilities and entropies.
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
  # jnp.where, not a product: infinities at padding have NaN gradients.
  counted = batch['weights'] > 0
  return jax.tree.map(
    lambda x: jnp.where(counted, x.reshape(shape), 0.0), results
  )
