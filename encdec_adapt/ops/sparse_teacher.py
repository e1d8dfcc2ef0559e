"""Samples or truncates a teacher's distribution to a few tokens per target.

| form   | tokens                               | weight                      |
|--------|--------------------------------------|-----------------------------|
| counts | k draws with replacement             | draws of the token; divided |
|        |                                      | by k, their expectation is  |
|        |                                      | the distribution            |
| gemma3 | the same draws, each token once      | probabilities, renormalised |
|        | (Gemma 3 report, section 2.2)        | (biased towards the head)   |
| top    | the k most probable                  | probabilities, renormalised |
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import partition, vocabulary_parallel

FORMS = ('counts', 'gemma3', 'top')


def choose(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  draws: Float[Array, 'B T K'],
  *,
  form: str,
  vocab_size: int,
  softcap: float | None = None,
) -> tuple[Int[Array, 'B T K'], Float[Array, 'B T K']]:
  """Chooses tokens from softmax(hidden @ table.T) at temperature 1.

  Logits exist for one position per row at a time. Rows are sharded over the
  devices, and the table is replicated.

  Args:
    hidden: final hidden states of the teacher.
    table: output table of the teacher; rows from `vocab_size` on are padding.
    draws: uniform in [0, 1); k is its last dimension, at most `vocab_size`.
    form: one of `FORMS`; 'top' reads only the shape of `draws`.
    vocab_size: number of tokens.
    softcap: soft-cap of the logits.

  Returns:
    Int32 token ids and their float32 weights: counts of draws, which sum to k,
    or probabilities, which sum to 1. Repetitions of a drawn id have weight 0.
  """
  table = partition.shard(table[:vocab_size].astype(hidden.dtype), None, None)
  count = draws.shape[-1]

  def step(arrays):
    x, uniform = arrays
    logits, _ = vocabulary_parallel.soft_cap(
      vocabulary_parallel.product(x, table), softcap
    )
    probabilities = jax.nn.softmax(partition.shard(logits, 'batch', None))
    if form == 'top':
      weights, ids = jax.lax.top_k(probabilities, count)  # [B, K]
    else:
      ids, weights = _drawn(probabilities, uniform)
      if form == 'gemma3':
        chosen = jnp.take_along_axis(probabilities, ids, axis=1)
        weights = jnp.where(weights > 0, chosen, 0.0)
    if form != 'counts':
      weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return ids, weights

  arrays = hidden.swapaxes(0, 1), draws.swapaxes(0, 1)  # By position.
  ids, weights = jax.lax.map(step, arrays)
  return ids.swapaxes(0, 1), weights.swapaxes(0, 1)


def _drawn(
  probabilities: Float[Array, 'B V'], uniform: Float[Array, 'B K']
) -> tuple[Int[Array, 'B K'], Float[Array, 'B K']]:
  """Returns sorted ids, and each id's count of draws at its first place."""
  cumulative = jnp.cumsum(probabilities, axis=1)
  # Scaled by the last sum, which rounding keeps from being exactly 1.
  points = jnp.sort(uniform, axis=1) * cumulative[:, -1:]
  ids = jax.vmap(lambda a, b: jnp.searchsorted(a, b, side='right'))(
    cumulative, points
  )
  ids = jnp.minimum(ids, probabilities.shape[1] - 1)
  is_same = ids[:, :, None] == ids[:, None]  # [B, K, K]
  is_first = jnp.diff(ids, axis=1, prepend=-1) > 0
  return ids, jnp.where(is_first, jnp.sum(is_same, axis=2), 0.0)
