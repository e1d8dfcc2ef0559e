"""Attention by its definition: all scores at once.

Memory grows with T x S. The tests use it as the reference; it suits few
queries: a decoding step, or at most a chunk.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from encdec_adapt.ops import (
  activations,
  attention_shards,
  masks,
  products,
  relative_bias,
)

# Below every score, and far enough from the largest fp32 number that
# `scores - peak` stays finite.
_HIDDEN = -1e30


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  bias: relative_bias.RelativeBias | None = None,
  *,
  scale: float,
  softcap: float | None,
) -> Float[Array, 'B T N H']:
  """Computes attention with every score in memory."""
  batch, queries, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  # Head n = k * G + g: query head n reads key/value head n // G. The groups
  # of a key head and their queries share a dimension: both products are then
  # plain batched matmuls, which XLA:CPU runs without copies of the scores.
  flat = batch, kv_heads, -1, head_dim
  q = q.swapaxes(1, 2).reshape(flat)  # [B, K, G * T, H]
  scores = products.scores(q, k) * scale
  if softcap is not None:
    scores = activations.softcap(scores, softcap)
  visible = masks.dense_mask(spec)[:, None]  # [B, 1, T, S]
  # Queries are a separate dimension again: the mask broadcasts over heads.
  by_head = scores.reshape(batch, heads, queries, -1)  # [B, N, T, S]
  if bias is not None:
    values = relative_bias.scores(bias, spec)
    by_head = products.add_to_rows(by_head, values)
  weights = masked_softmax(by_head, visible).astype(v.dtype)
  out = products.weighted_values(weights.reshape(scores.shape), v)
  out = out.astype(q.dtype).reshape(batch, heads, queries, head_dim)
  return checkpoint_name(out.swapaxes(1, 2), attention_shards.SAVED)


@jax.custom_vjp
def masked_softmax(
  scores: Float[Array, '*batch T S'], visible: Bool[Array, '*#batch #T #S']
) -> Float[Array, '*batch T S']:
  """Softmax over the visible keys; zeros where a query sees no key.

  No intermediate is infinite, so the gradients of rows without a visible key
  are zeros too and not NaN. Only the result is saved for the backward pass.

  Args:
    scores: fp32 scores.
    visible: True where the key is visible; broadcasts against `scores`.

  Returns:
    Weights that sum to 1 over the last dimension, or are all zero.
  """
  scores = jnp.where(visible, scores, _HIDDEN)
  peak = jnp.max(scores, axis=-1, keepdims=True)
  # Masked again: if every key is hidden, all scores equal the peak, and the
  # exponentials would be 1.
  weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)  # [..., T, 1]
  return weights / jnp.where(total == 0.0, 1.0, total)


def _softmax_forward(scores: jax.Array, visible: jax.Array):
  weights = masked_softmax(scores, visible)
  return weights, weights


def _softmax_backward(weights: jax.Array, cotangent: jax.Array):
  # Hidden keys have weight 0, so the mask need not be saved.
  product = weights * cotangent
  return product - weights * jnp.sum(product, axis=-1, keepdims=True), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)
