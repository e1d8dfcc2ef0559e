"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
  x: Float[Array, '*L D'],
  scale: Float[Array, 'D'],
  eps: float,
  *,
  one_plus: bool = True,
) -> Float[Array, '*L D']:
  """Applies RMSNorm; the mean square is in fp32.

  Args:
    x: activations in any float dtype.
    scale: the gain; with `one_plus` the gain minus one.
    eps: term added to the mean square, inside the square root.
    one_plus: whether to multiply by `1 + scale` in fp32 and cast at the end
      (Gemma), instead of casting first and multiplying by `scale` (Llama).

  Returns:
    Normalised activations in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normal = x32 * jax.lax.rsqrt(mean_square + eps)
  # Both casts are placed as in transformers; elsewhere they would change the
  # last bits of bf16 activations.
  if not one_plus:
    return normal.astype(x.dtype) * scale.astype(x.dtype)
  return (normal * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
