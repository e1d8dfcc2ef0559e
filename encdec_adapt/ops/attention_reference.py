"""Attention as its definition: all scores at once.

Memory grows with T x S. It is the reference of the tests, the inside of the
chunked backend, and right for the few queries of a decoding step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from encdec_adapt.ops import activations, masks

# Below every score, and far enough from the largest fp32 number that
# `scores - peak` stays finite.
_HIDDEN = -1e30


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None,
) -> Float[Array, 'B T N H']:
  """Attention with every score in memory; see `attention.attention`."""
  groups = q.shape[2] // k.shape[2]
  # Head n = k * G + g: query head n reads key/value head n // G.
  q = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
  scores = jnp.einsum(
    'BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32
  )
  scores *= scale
  if softcap is not None:
    scores = activations.softcap(scores, softcap)
  visible = masks.dense_mask(spec)[:, None, None]  # [B, 1, 1, T, S]
  weights = masked_softmax(scores, visible).astype(v.dtype)
  out = jnp.einsum(
    'BKGTS,BSKH->BTKGH', weights, v, preferred_element_type=jnp.float32
  )
  return out.astype(q.dtype).reshape(*q.shape[:2], -1, q.shape[-1])


@jax.custom_vjp
def masked_softmax(
  scores: Float[Array, '*batch T S'], visible: Bool[Array, '*#batch #T #S']
) -> Float[Array, '*batch T S']:
  """Softmax over the visible keys; zeros where a query sees none.

  No intermediate is infinite, so the gradients of rows without a visible key
  are zeros too and not NaN. Only the result is kept for the backward pass.

  Args:
    scores: fp32 scores.
    visible: True where the key is visible; broadcasts against `scores`.

  Returns:
    Weights that sum to one over the last dimension, or are all zero.
  """
  scores = jnp.where(visible, scores, _HIDDEN)
  peak = jnp.max(scores, axis=-1, keepdims=True)
  weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)  # [..., T, 1]
  return weights / jnp.where(total == 0.0, 1.0, total)


def _softmax_forward(scores: jax.Array, visible: jax.Array):
  weights = masked_softmax(scores, visible)
  return weights, weights


def _softmax_backward(weights: jax.Array, cotangent: jax.Array):
  product = weights * cotangent
  return product - weights * jnp.sum(product, axis=-1, keepdims=True), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)
