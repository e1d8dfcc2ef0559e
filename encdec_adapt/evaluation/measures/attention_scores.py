"""Attention weights of a layer's queries and keys, summed by key.

The weights are recomputed in chunks of queries, with the mask, scale and
soft-cap of the layer: only one chunk's scores are in memory at a time. From the
package, this module imports only `ops`.
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import (
  activations,
  attention_chunked,
  attention_reference,
  masks,
  relative_bias,
)


class Received(NamedTuple):
  """Attention by head, averaged over queries.

  Attributes:
    by_key: share of the attention received by each key.
    entropy: entropy of a query's attention, in nats.
  """

  by_key: Float[Array, 'B N S']
  entropy: Float[Array, 'B N']


def received(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  weights: Float[Array, 'B T'],
  *,
  scale: float,
  softcap: float | None,
  bias: relative_bias.RelativeBias | None = None,
  chunk: int,
) -> Received:
  """Sums the attention received by keys.

  Args:
    q: queries; head n reads key/value head n // (N/K).
    k: keys.
    spec: the mask.
    weights: weight of each query in the averages; they sum to 1 over a row.
    scale: factor of the scores.
    softcap: cap of the scores; None for no cap.
    bias: relative position bias of the scores; None for none.
    chunk: number of queries with scores in memory at once.
  """
  batch, _, heads, head_dim = q.shape
  keys, kv_heads = k.shape[1:3]

  def add_chunk(sums, chunked):
    q_chunk, weight, segments, positions = chunked
    # Group query heads by key head: keys need no copies.
    grouped = q_chunk.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim)
    scores = scale * jnp.einsum(
      'BTKGH,BSKH->BKGTS', grouped, k, preferred_element_type=jnp.float32
    )
    if softcap is not None:
      scores = activations.softcap(scores, softcap)
    # Queries of a chunk and keys have different indices.
    part = spec.replace(
      q_segments=segments, q_positions=positions, aligned=False
    )
    visible = masks.dense_mask(part)[:, None]  # [B, 1, T, S]
    scores = scores.reshape(batch, heads, -1, keys)
    if bias is not None:
      scores += relative_bias.scores(bias, part)
    shares = attention_reference.masked_softmax(scores, visible)
    # xlogy is 0 for masked keys; 0 log 0 would be NaN.
    nats = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1)
    # Padded queries contribute nothing: no visible keys, and zero weight.
    return Received(
      sums.by_key + jnp.einsum('BNTS,BT->BNS', shares, weight),
      sums.entropy + jnp.einsum('BNT,BT->BN', nats, weight),
    ), None

  chunks = jax.tree.map(
    lambda x: attention_chunked.split_queries(x, min(chunk, q.shape[1])),
    (q, weights, spec.q_segments, spec.q_positions),
  )
  start = Received(jnp.zeros((batch, heads, keys)), jnp.zeros((batch, heads)))
  return jax.lax.scan(add_chunk, start, chunks)[0]
