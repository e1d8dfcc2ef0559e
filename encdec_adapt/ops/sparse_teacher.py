"""A few tokens of a teacher's distribution for every target, with weights.

| form   | tokens                               | weight                      |
|--------|--------------------------------------|-----------------------------|
| counts | k draws with replacement             | draws of the token; divided |
|        |                                      | by k, their expectation is  |
|        |                                      | the distribution            |
| gemma3 | the same draws, each token once      | probabilities, renormalised |
|        | (Gemma 3 report, section 2.2)        | (biased towards the head)   |
| top    | the k likeliest                      | probabilities, renormalised |

Draws invert the cumulative distribution. As in `vocabulary_loss` the logits of
a chunk of tokens are in memory at a time, sharded over the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import vocabulary_parallel

FORMS = ('counts', 'gemma3', 'top')


def choose(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  draws: Float[Array, 'B T K'],
  *,
  form: str,
  vocab_size: int,
  softcap: float | None = None,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
) -> tuple[Int[Array, 'B T K'], Float[Array, 'B T K']]:
  """Chooses tokens of softmax(hidden @ table.T) at temperature 1.

  Args:
    hidden: final hidden states of the teacher.
    table: its output table; rows from `vocab_size` on are padding.
    draws: uniform in [0, 1); k is its last dimension, at most `vocab_size`.
    form: one of `FORMS`; 'top' reads only the shape of `draws`.
    vocab_size: number of tokens.
    softcap: soft-cap of the logits.
    chunk: most tokens of a device with logits in memory at a time.

  Returns:
    Token ids, int32, and their weights, float32: numbers of draws that sum to
    k, or probabilities that sum to 1. An id that was drawn several times has
    weight 0 after its first place.
  """
  count = draws.shape[-1]

  def step(columns, tokens, tables):
    x, uniform = tokens
    logits = vocabulary_parallel.product(x, *tables)  # [rows, v]
    capped, _ = vocabulary_parallel.soft_cap(logits, softcap)
    scores = columns.only_tokens(capped, vocabulary_parallel.EXCLUDED)
    scores -= columns.max(scores)[0][:, None]
    probabilities = jnp.exp(scores)
    if form == 'top':
      ids, weights = _likeliest(columns, probabilities, count)
    else:
      ids, weights = _drawn(columns, probabilities, uniform)
      if form == 'gemma3':
        weights = jnp.where(weights > 0, _at(columns, probabilities, ids), 0.0)
    if form != 'counts':
      weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return (ids, weights), None

  (ids, weights), _, _ = vocabulary_parallel.sweep(
    step,
    [hidden, draws],
    [table.astype(hidden.dtype)],
    vocab_size=vocab_size,
    chunk=chunk,
    with_gradients=False,
  )
  return ids, weights


def _likeliest(
  columns: vocabulary_parallel.Columns,
  probabilities: Float[Array, 'rows v'],
  count: int,
) -> tuple[Int[Array, 'rows K'], Float[Array, 'rows K']]:
  """Returns ids and probabilities of the likeliest tokens."""
  # Of each device, then of all.
  local = min(count, probabilities.shape[1])
  weights, index = jax.lax.top_k(probabilities, local)
  ids = _gather(columns, columns.ids[index])
  weights, index = jax.lax.top_k(_gather(columns, weights), count)
  return jnp.take_along_axis(ids, index, axis=1), weights


def _drawn(
  columns: vocabulary_parallel.Columns,
  probabilities: Float[Array, 'rows v'],
  uniform: Float[Array, 'rows K'],
) -> tuple[Int[Array, 'rows K'], Float[Array, 'rows K']]:
  """Returns ascending ids of draws, and at the first of each its number."""
  cumulative = jnp.cumsum(probabilities, axis=1)
  masses = _gather(columns, cumulative[:, -1:])  # [rows, shards]
  if columns.axes:
    shard = jax.lax.axis_index(columns.axes)
    cumulative += (jnp.cumsum(masses, axis=1) - masses)[:, shard, None]
  points = jnp.sort(uniform, axis=1) * jnp.sum(masses, axis=1, keepdims=True)
  # A draw is the number of tokens that end before it, on all devices.
  ids = jax.vmap(lambda a, b: jnp.searchsorted(a, b, side='right'))(
    cumulative, points
  )
  if columns.axes:
    ids = jax.lax.psum(ids, columns.axes)
  # Rounding may put the last draw behind the last token.
  ids = jnp.minimum(ids, columns.vocab_size - 1).astype(jnp.int32)
  count = ids.shape[1]
  is_first = jnp.diff(ids, axis=1, prepend=-1) > 0
  # From the first draw of a token to that of the next.
  starts = jnp.where(is_first, jnp.arange(count), count)
  following = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=count)
  ends = jax.lax.cummin(following, axis=1, reverse=True)
  return ids, jnp.where(is_first, ends - starts, 0).astype(jnp.float32)


def _gather(columns: vocabulary_parallel.Columns, x: Array) -> Array:
  """Gathers [rows, n] of the devices that share the columns, side by side."""
  if not columns.axes:
    return x
  shards, shard = (
    jax.lax.psum(1, columns.axes),
    jax.lax.axis_index(columns.axes),
  )
  # A sum and no all-gather, whose result counts as one that devices differ in.
  mine = (jnp.arange(shards) == shard)[:, None]
  spread = jnp.where(mine, x[:, None], 0)  # [rows, shards, n]
  return jax.lax.psum(spread, columns.axes).reshape(len(x), -1)


def _at(
  columns: vocabulary_parallel.Columns,
  probabilities: Float[Array, 'rows v'],
  ids: Int[Array, 'rows K'],
) -> Float[Array, 'rows K']:
  """Returns the probabilities of ids, which any device may hold."""
  local = ids - columns.ids[0]
  is_local = (local >= 0) & (local < probabilities.shape[1])
  values = jnp.take_along_axis(
    probabilities, jnp.clip(local, 0, probabilities.shape[1] - 1), axis=1
  )
  values = jnp.where(is_local, values, 0.0)
  return jax.lax.psum(values, columns.axes) if columns.axes else values
