"""Gradients of attention in XLA, from its output and the softmax's sums.

The backward pass of flash attention (arXiv:2205.14135, algorithm 4), over pairs
of a block of queries and a visible tile of keys (`attention_tiles`): it
recomputes the scores and adds gradients to the sums of the block and of the
tile in place.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import attention_tiles, masks, products, relative_bias

# Size of blocks and tiles if kernels compute the forward pass.
SIZE = 1024


def gradients(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  bias: relative_bias.RelativeBias | None,
  out: Float[Array, 'B T N H'],
  log_sums: Float[Array, 'B T N'],
  d_out: Float[Array, 'B T N H'],
  tiling: attention_tiles.Tiling,
) -> tuple[
  Float[Array, 'B T N H'],
  Float[Array, 'B S K H'],
  Float[Array, 'B S K H'],
  relative_bias.RelativeBias | None,
]:
  """Returns the gradients of queries, keys, values and bias, in their dtypes.

  Args:
    q: queries.
    k: keys; N is a multiple of K.
    v: values.
    spec: the mask.
    bias: relative position bias; None for none.
    out: attention's output.
    log_sums: log-sum-exp of each query's scores.
    d_out: gradient of the output.
    tiling: blocks, tiles and scores.
  """
  (_, length, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape

  def add(block, tile, visible, part, sums):
    q, d_out, delta, log_sums = block
    k, v = (x.swapaxes(1, 2) for x in tile)
    d_q, d_kv, d_bias = sums
    scores, slope = tiling.scores(q, k, visible, part, bias)
    weights = jnp.exp(scores - log_sums)  # [1, K, Q, W]
    d_weights, more_v = products.values_gradients(
      weights.astype(q.dtype), v, d_out
    )
    d_scores = weights * (d_weights - delta)
    if bias is not None:
      _, pull = jax.vjp(lambda x: relative_bias.scores(x, part), bias)
      (more,) = pull(d_scores.reshape(1, heads, *visible.shape[1:]))
      d_bias = jax.tree.map(jnp.add, d_bias, more)
    more_q, more_k = products.scores_gradients(
      q, k, (d_scores * slope).astype(q.dtype)
    )
    d_kv += jnp.stack([more_k, more_v], 1).swapaxes(2, 3)
    return d_q + more_q, d_kv, d_bias

  def finish(d_q, d_kv, d_bias):
    d_k, d_v = tiling.scale * d_kv[:, 0], d_kv[:, 1]
    d_q *= tiling.scale
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias

  delta = jnp.sum(out.astype(jnp.float32) * d_out, -1)
  blocks = [
    tiling.cut(x, kv_heads)
    for x in (q, d_out, delta[..., None], log_sums[..., None])
  ]
  tiles = [tiling.cut(x, kv_heads) for x in (k, v)]
  _, count, *shape = tiles[0].shape
  sums = (
    jnp.zeros(blocks[0].shape[1:], jnp.float32),
    # A single array: XLA would merge two equal arrays, and copy them per row.
    jnp.zeros((count, 2, *shape), jnp.float32),
    jax.tree.map(jnp.zeros_like, bias),
  )
  d_q, d_k, d_v, d_bias = tiling.accumulate(
    add, finish, blocks, tiles, sums, spec
  )
  return (
    tiling.join(d_q, length, heads),
    tiling.join(d_k, keys, kv_heads),
    tiling.join(d_v, keys, kv_heads),
    jax.tree.map(lambda x: jnp.sum(x, 0), d_bias),
  )
