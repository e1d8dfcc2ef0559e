"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
  x: Float[Array, '*L D'], scale: Float[Array, 'D'], eps: float
) -> Float[Array, '*L D']:
  """Gemma's RMSNorm: gain `1 + scale`, all in fp32, one cast at the end.

  Args:
    x: activations in any float dtype.
    scale: gain minus one, so that zero initialises to the identity gain.
    eps: added to the mean square, inside the square root.

  Returns:
    Normalised activations in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  gain = 1.0 + scale.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(mean_square + eps) * gain).astype(x.dtype)
