"""Rotary position embedding (Su et al. 2021), half-split as in Gemma.

Dimension j is rotated with dimension j + H/2. All layers share positions and
theta: `angles` are computed once and each layer rotates by them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def angles(
  positions: Int[Array, 'B L'], head_dim: int, theta: float, dtype
) -> tuple[Float[Array, 'B L 1 J'], Float[Array, 'B L 1 J']]:
  """Cosines and sines of every position, J = H/2 frequencies.

  Args:
    positions: position of every token, from 0.
    head_dim: H, even.
    theta: base; frequency j is theta^(-2j/H).
    dtype: dtype of the result, cast before the products as bf16 parity with
      transformers needs; the angles themselves are fp32.

  Returns:
    (cos, sin), each [B, L, 1, H/2], to broadcast over heads.

  Raises:
    ValueError: `head_dim` is odd.
  """
  if head_dim % 2:
    raise ValueError(f'head_dim is {head_dim}; rotary embedding needs it even')
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim  # [J]
  frequency = theta**-exponent
  angle = positions[..., None].astype(jnp.float32) * frequency  # [B, L, J]
  angle = angle[:, :, None, :]  # [B, L, 1, J]
  return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(
  x: Float[Array, 'B L N H'],
  cos: Float[Array, 'B L 1 J'],
  sin: Float[Array, 'B L 1 J'],
) -> Float[Array, 'B L N H']:
  """Rotates each half-split pair of `x` by the angles of its position."""
  first, second = jnp.split(x, 2, axis=-1)  # each [B, L, N, J]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
