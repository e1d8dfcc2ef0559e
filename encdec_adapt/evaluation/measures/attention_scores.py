"""Attention weights of a layer's queries and keys, summed by key.

The weights are computed again by chunks of queries, with the mask, scale and
soft-cap of the layer: no more than a chunk's scores are in memory at a time.
The module imports nothing of the package but `ops`.
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
    by_key: share of the attention that each key receives.
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
  """Sums the attention that keys receive.

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
    # Query heads by the key head that they read: keys need no copies.
    grouped = q_chunk.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim)
    scores = scale * jnp.einsum(
      'BTKGH,BSKH->BKGTS', grouped, k, preferred_element_type=jnp.float32
    )
    if softcap is not None:
      scores = activations.softcap(scores, softcap)
    # The queries of a chunk have other indices than the keys.
    part = spec.replace(
      q_segments=segments, q_positions=positions, aligned=False
    )
    visible = masks.dense_mask(part)[:, None]  # [B, 1, T, S]
    scores = scores.reshape(batch, heads, -1, keys)
    if bias is not None:
      scores += relative_bias.scores(bias, part)
    shares = attention_reference.masked_softmax(scores, visible)
    # xlogy is 0 at the shares of hidden keys; 0 log 0 would be NaN.
    nats = -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1)
    # Padded queries add nothing: they see no key, and their weight is 0.
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
