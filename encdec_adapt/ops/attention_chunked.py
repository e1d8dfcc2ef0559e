"""Attention by chunks of queries: memory linear in the length.

Pure XLA, for every platform. Only the scores of one chunk exist at a time; the
backward pass recomputes them (`jax.checkpoint`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import attention_reference, masks


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None,
  chunk: int,
) -> Float[Array, 'B T N H']:
  """Computes attention in chunks of queries; see `attention.attention`.

  Up to `chunk` queries run as one chunk, whose scores are kept for the
  backward pass as in the reference.
  """
  if q.shape[1] <= chunk:
    return attention_reference.attend(
      q, k, v, spec, scale=scale, softcap=softcap
    )
  dtype = q.dtype
  # Cotangents of what the loop closes over add up over the chunks in its
  # dtype: fp32 outside, the compute dtype inside.
  k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)

  @jax.checkpoint
  def attend_chunk(chunked):
    """Attention [B, chunk, N, H] of one chunk of queries to all keys."""
    q_chunk, q_segments, q_positions = chunked
    return attention_reference.attend(
      q_chunk,
      k32.astype(dtype),
      v32.astype(dtype),
      spec.replace(q_segments=q_segments, q_positions=q_positions),
      scale=scale,
      softcap=softcap,
    )

  chunks = jax.tree.map(
    lambda x: split_queries(x, chunk), (q, spec.q_segments, spec.q_positions)
  )
  out = jax.lax.map(attend_chunk, chunks)  # [chunks, B, chunk, N, H]
  out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
  return out[:, : q.shape[1]]


def split_queries(x: jax.Array, chunk: int) -> jax.Array:
  """[B, T, ...] -> [chunks, B, chunk, ...], padded with zeros.

  Padded queries have segment 0, so they see no key.
  """
  padding = -x.shape[1] % chunk
  x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)
