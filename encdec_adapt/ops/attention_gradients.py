"""Gradients of attention from its output and the softmax's sums, by XLA.

The backward pass of flash attention (arXiv:2205.14135, algorithm 4): scores are
computed again, a block of a row's queries at a time. A block reads a span of
keys that has all those that its queries see, of one of a few static sizes. So
keys of other examples of a row, later ones and those outside a window are left
out where they are far enough.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERIES = 1024  # Of a block.
# Most pairs (query, key) of a block, whose scores are in memory for every head.
PAIRS = 2**23
_TILE = 128  # Products of other sizes are slow.
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def gradients(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  first: Int[Array, 'B T'],
  last: Int[Array, 'B T'],
  out: Float[Array, 'B T N H'],
  log_sums: Float[Array, 'B N T'],
  d_out: Float[Array, 'B T N H'],
  *,
  scale: float,
  softcap: float | None,
  queries: int | None = None,
) -> tuple[
  Float[Array, 'B T N H'], Float[Array, 'B S K H'], Float[Array, 'B S K H']
]:
  """Returns the gradients of queries, keys and values, in their dtypes.

  Args:
    q: queries.
    k: keys; N is a multiple of K.
    v: values.
    first: first key that a query sees.
    last: end of the keys that it sees, exclusive.
    out: attention's output.
    log_sums: logarithm of the sum of the exponentials of a query's scores.
    d_out: gradient of the output.
    scale: factor of the scores, applied before the soft-cap.
    softcap: positive cap of the scores; None for no cap.
    queries: queries of a block; None for those of `block`.
  """
  (_, length, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
  size = min(queries or block(length, keys), length)
  widths = [size << i for i in range(keys.bit_length()) if size << i < keys]

  def span(width, start, k, v, arrays, sums):
    """Adds gradients of keys and values; returns those of a block's queries."""
    q, d_out, delta, log_sums, first, last = arrays
    start = jnp.minimum(start, keys - width)
    cut = functools.partial(
      jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=width, axis=1
    )
    k, v = cut(k), cut(v)
    scores, slope = scale * _product('kqh,ksh->kqs', q, k), 1.0
    if softcap is not None:
      capped = jnp.tanh(scores / softcap)
      scores, slope = softcap * capped, 1 - capped**2
    index = start + jnp.arange(width)
    sees = (first <= index) & (index < last)
    weights = jnp.where(sees, jnp.exp(scores - log_sums), 0)
    d_weights = _product('kqh,ksh->kqs', d_out, v)
    d_scores = (weights * (d_weights - delta) * slope).astype(q.dtype)
    added = (
      _product('kqs,kqh->ksh', d_scores, q),
      _product('kqs,kqh->ksh', weights.astype(q.dtype), d_out),
    )
    sums = tuple(
      jax.lax.dynamic_update_slice_in_dim(x, cut(x) + more, start, axis=1)
      for x, more in zip(sums, added, strict=True)
    )
    return sums, _product('kqs,ksh->kqh', d_scores, k)

  def row(arrays):
    """Returns the gradients of a row: of keys and values, and of queries."""
    k, v, *blocks = arrays

    def add(sums, arrays):
      """Runs `span` of a block with the narrowest span that holds its keys."""
      first, last = arrays[-2:]
      start, seen = jnp.min(first), jnp.max(last) - jnp.min(first)
      return jax.lax.switch(
        sum((seen > x).astype(jnp.int32) for x in widths),
        [functools.partial(span, x) for x in (*widths, keys)],
        *(start, k, v, arrays, sums),
      )

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    return jax.lax.scan(add, sums, tuple(blocks))

  delta = _product('btnh,btnh->btn', out, d_out)
  log_sums = jnp.moveaxis(log_sums, 1, 2)
  ranges = (jnp.broadcast_to(x[..., None], delta.shape) for x in (first, last))
  (d_k, d_v), d_q = jax.lax.map(
    row,
    (
      *(jnp.swapaxes(x, 1, 2) for x in (k, v)),
      *(_blocks(x, size, kv_heads) for x in (q, d_out)),
      *(_blocks(x[..., None], size, kv_heads) for x in (delta, log_sums)),
      # Padded queries have the range of the last.
      *(_blocks(x[..., None], size, kv_heads, 'edge') for x in ranges),
    ),
  )
  d_q = d_q.reshape(*d_q.shape[:3], heads // kv_heads, size, -1)
  d_q = d_q.transpose(0, 1, 4, 2, 3, 5)
  d_q = d_q.reshape(d_q.shape[0], -1, *q.shape[2:])[:, :length]
  return (
    (scale * d_q).astype(q.dtype),
    jnp.swapaxes(scale * d_k, 1, 2).astype(k.dtype),
    jnp.swapaxes(d_v, 1, 2).astype(v.dtype),
  )


def block(length: int, keys: int) -> int:
  """Returns the queries of a block, given the numbers of queries and keys."""
  fitting = PAIRS // keys // _TILE * _TILE
  return min(QUERIES, length, max(fitting, _TILE))


def _blocks(
  x: jax.Array, size: int, kv_heads: int, mode: str = 'constant'
) -> jax.Array:
  """Splits [B, T, N, H] into [B, blocks, K, N / K * size, H].

  Args:
    x: an array of queries.
    size: queries of a block.
    kv_heads: number of key heads K.
    mode: how the last block is padded, see `jnp.pad`.
  """
  rows, length, heads, width = x.shape
  padding = [(0, 0), (0, -length % size), (0, 0), (0, 0)]
  x = jnp.pad(x, padding, mode=mode)
  x = x.reshape(rows, -1, size, kv_heads, heads // kv_heads, width)
  x = x.transpose(0, 1, 3, 4, 2, 5)
  return x.reshape(*x.shape[:3], -1, width)
