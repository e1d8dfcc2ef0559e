"""Text embeddings: pooling, projections and normalisation.

An embedding model is a stack of any role with the head `heads.Embedding`. It
pools the states of a text, applies projections without biases as EmbeddingGemma
does (arXiv:2509.20354, section 2.1: to a larger width and back), and divides by
the norm. Imports jax and no other models.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from encdec_adapt.models import heads

EXACT = jax.lax.Precision.HIGHEST  # Small products of vectors to compare.
_SMALLEST = 1e-12  # Lower bound of the norm, as in torch.


def pool(
  states: Float[Array, 'B L D'],
  segments: Int[Array, 'B L'],
  texts: int,
  pooling: str,
) -> Float[Array, 'B M D']:
  """Pools the states of every text in packed rows, in float32.

  Args:
    states: states of a stack.
    segments: text number of each token, from 1; 0 is padding.
    texts: number M of texts; absent texts pool to zeros.
    pooling: one of `heads.POOLINGS`.
  """
  mask = segments[:, None] == jnp.arange(1, texts + 1)[:, None]  # [B, M, L]
  number = jnp.cumsum(mask, axis=-1)  # Numbers the text's tokens from 1.
  count = number[..., -1:]
  weights = mask / jnp.maximum(count, 1)
  if pooling != 'mean':
    weights = mask & (number == (1 if pooling == 'first' else count))
  # Summing a long text in bfloat16 would lose the last terms.
  weights, states = (x.astype(jnp.float32) for x in (weights, states))
  return jnp.einsum('BML,BLD->BMD', weights, states, precision=EXACT)


def pool_in_place(
  states: Num[Array, 'B L D'], segments: Int[Array, 'B L'], pooling: str
) -> Num[Array, 'B L D']:
  """Replaces each state (or token) with the pooled one of its text.

  Unlike `pool`, it makes no arrays of texts by tokens: a row may have as many
  texts as tokens.
  """

  def pool_row(states: jax.Array, segments: jax.Array) -> jax.Array:
    length = len(segments)
    ids = dict(segment_ids=segments, num_segments=length + 1)
    if pooling == 'mean':
      totals = jax.ops.segment_sum(states.astype(jnp.float32), **ids)
      counts = jax.ops.segment_sum(jnp.ones(length), **ids)
      return totals[segments] / counts[segments, None]
    edge = {'first': jax.ops.segment_min, 'last': jax.ops.segment_max}[pooling]
    return states[edge(jnp.arange(length), **ids)[segments]]

  return jax.vmap(pool_row)(states, segments).astype(states.dtype)


def vectors(
  head: heads.Head,
  params: Mapping[str, Any],
  states: Float[Array, 'B L D'],
  segments: Int[Array, 'B L'],
  texts: int,
  pooling: str,
) -> Float[Array, 'B M E']:
  """Pools states and, with a head of embeddings, projects and normalises.

  Args:
    head: the head of the stack.
    params: parameters of the stack.
    states: as for `pool`, like the other arguments.
    segments: text number of each token.
    texts: number M of texts.
    pooling: one of `heads.POOLINGS`.
  """
  pooled = pool(states, segments, texts, pooling)
  if not isinstance(head, heads.Embedding):
    return pooled
  for i in range(len(head.projections)):
    kernel = params['embedding'][f'projection_{i}']
    pooled = jnp.matmul(pooled, kernel, precision=EXACT)
  return normalised(pooled)


def normalised(x: Float[Array, '*B E']) -> Float[Array, '*B E']:
  """Divides vectors by their norms; zeros stay zeros."""
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  # Clipped inside the root, whose gradient at 0 is infinite.
  return x * jax.lax.rsqrt(jnp.maximum(squares, _SMALLEST**2))
