"""Attention in chunks of queries and keys: memory linear in the length.

Pure XLA, for every platform. Only the scores of one chunk of queries and one
chunk of keys exist at a time, and the forward and backward passes skip chunks
of keys hidden from all queries of a chunk. The forward pass is flash attention
(arXiv:2205.14135, algorithm 1); the backward pass recomputes the scores.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import (
  attention_gradients,
  attention_reference,
  attention_shards,
  attention_tiles,
  masks,
  products,
  relative_bias,
)


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  bias: relative_bias.RelativeBias | None = None,
  *,
  scale: float,
  softcap: float | None,
  chunk: int,
) -> Float[Array, 'B T N H']:
  """Computes attention in chunks; see `attention.attention`.

  Up to `chunk` queries run in the reference backend, which saves the scores
  for the backward pass.
  """
  if q.shape[1] <= chunk:
    return attention_reference.attend(
      q, k, v, spec, bias, scale=scale, softcap=softcap
    )
  tiling = attention_tiles.Tiling(chunk, scale, softcap)
  return _attend(q, k, v, spec, bias, tiling)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, spec, bias, tiling: attention_tiles.Tiling):
  """Returns the attention's output [B, T, N, H]."""
  return _forward(q, k, v, spec, bias, tiling)[0]


def _forward(q, k, v, spec, bias, tiling):
  def add(block, tile, visible, part, sums):
    """Adds a tile's values, scaled by the running maxima."""
    (out, peak, total), *others = sums
    k, v = (x.swapaxes(1, 2) for x in tile)
    scores, _ = tiling.scores(block, k, visible, part, bias)
    top = jnp.maximum(peak, jnp.max(scores, -1, keepdims=True))
    weights, shrink = jnp.exp(scores - top), jnp.exp(peak - top)
    more = products.weighted_values(weights.astype(v.dtype), v)
    total = shrink * total + jnp.sum(weights, -1, keepdims=True)
    return (shrink * out + more, top, total), *others

  def finish(sums, *_):
    out, peak, total = sums
    total = jnp.where(total == 0, 1, total)
    return (out / total).astype(q.dtype), peak + jnp.log(total)

  blocks, *tiles = (tiling.cut(x, k.shape[2]) for x in (q, k, v))
  zeros = jnp.zeros(blocks.shape[1:], jnp.float32)
  zero = zeros[..., :1]
  sums = (zeros, zero + attention_tiles.LOWEST, zero), (), ()
  results = tiling.accumulate(add, finish, blocks, tiles, sums, spec)
  out, log_sums = (tiling.join(x, *q.shape[1:3]) for x in results)
  # Both have names, so that a policy can save both: with only the output saved,
  # the backward pass would recompute the softmax's sums.
  out, log_sums = (
    checkpoint_name(x, attention_shards.SAVED)
    for x in (out, log_sums[..., 0])  # A last dimension of 1 may be padded.
  )
  return out, (q, k, v, spec, bias, out, log_sums)


def _backward(tiling, saved, d_out):
  d_q, d_k, d_v, d_bias = attention_gradients.gradients(*saved, d_out, tiling)
  return d_q, d_k, d_v, None, d_bias


_attend.defvjp(_forward, _backward)


def split_queries(x: jax.Array, chunk: int) -> jax.Array:
  """Splits [B, T, ...] into [chunks, B, chunk, ...], padded with zeros.

  Padded queries have segment 0, so they see no key.
  """
  x = masks.pad_length(x, chunk)
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)
