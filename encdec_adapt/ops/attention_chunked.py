"""Attention by chunks of queries: memory linear in the length.

Pure XLA, for every platform. Only a single chunk's scores exist at a time; the
backward pass recomputes them (`jax.checkpoint`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import attention_reference, masks, relative_bias


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
  """Computes attention in chunks of queries; see `attention.attention`.

  At most `chunk` queries run as in the reference, which saves the scores for
  the backward pass.
  """
  if q.shape[1] <= chunk:
    return attention_reference.attend(
      q, k, v, spec, bias, scale=scale, softcap=softcap
    )
  dtype = q.dtype
  # The gradients of keys and values are summed over the chunks in the dtype of
  # the arrays that the loop closes over, so these are fp32. The products inside
  # run in the compute dtype.
  k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)

  @jax.checkpoint
  def attend_chunk(chunk_arrays):
    """Computes attention [B, chunk, N, H] of a chunk of queries to all keys."""
    q_chunk, q_segments, q_positions, offset = chunk_arrays
    return attention_reference.attend(
      q_chunk,
      k32.astype(dtype),
      v32.astype(dtype),
      spec.replace(
        q_segments=q_segments, q_positions=q_positions, offset=offset
      ),
      bias,
      scale=scale,
      softcap=softcap,
    )

  chunks = jax.tree.map(
    lambda x: split_queries(x, chunk), (q, spec.q_segments, spec.q_positions)
  )
  offsets = None
  if bias is not None and spec.first_query is not None:
    offsets = spec.first_query + chunk * jnp.arange(len(chunks[0]))
  # [chunks, B, chunk, N, H]
  out = jax.lax.map(attend_chunk, (*chunks, offsets))
  out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
  return out[:, : q.shape[1]]


def split_queries(x: jax.Array, chunk: int) -> jax.Array:
  """Splits [B, T, ...] into [chunks, B, chunk, ...], padded with zeros.

  Padded queries have segment 0, so they see no key.
  """
  x = masks.pad_length(x, chunk)
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)
