"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(
  x: Float[Array, '*L D'],
  scale: Float[Array, 'D'] | None,
  bias: Float[Array, 'D'] | None,
  eps: float,
) -> Float[Array, '*L D']:
  """Applies LayerNorm in fp32 (arXiv:1607.06450, section 3).

  Args:
    x: activations in any float dtype.
    scale: the gain; None for no gain.
    bias: added after the gain; None for none.
    eps: term added to the variance, inside the square root.

  Returns:
    Normalised activations in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normal = x32 * jax.lax.rsqrt(variance + eps)
  normal = normal if scale is None else normal * scale.astype(jnp.float32)
  normal = normal if bias is None else normal + bias.astype(jnp.float32)
  return normal.astype(x.dtype)


def rms_norm(
  x: Float[Array, '*L D'],
  scale: Float[Array, 'D'] | None,
  eps: float,
  *,
  gain: str = 'one_plus',
) -> Float[Array, '*L D']:
  """Applies RMSNorm; the mean square is in fp32.

  Args:
    x: activations in any float dtype.
    scale: the gain, with 'one_plus' the gain minus one; None for no gain.
    eps: term added to the mean square, inside the square root.
    gain: 'one_plus' multiplies by `1 + scale` in fp32 and casts at the end
      (Gemma 1 to 3), 'direct' casts first and multiplies by `scale` (Llama),
      'direct_fp32' multiplies by `scale` in fp32 (Gemma 4).

  Returns:
    Normalised activations in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normal = x32 * jax.lax.rsqrt(mean_square + eps)
  # Both casts are placed as in transformers; elsewhere they would change the
  # last bits of bf16 activations.
  if scale is None:
    return normal.astype(x.dtype)
  if gain == 'direct':
    return normal.astype(x.dtype) * scale.astype(x.dtype)
  scale = scale.astype(jnp.float32) + (gain == 'one_plus')
  return (normal * scale).astype(x.dtype)
