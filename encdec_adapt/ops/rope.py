"""Rotary position embedding (Su et al. 2021), half-split as in Gemma.

Dimension j is rotated with dimension j + H/2. All layers of a kind share
their `angles`.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.base import errors, keys

# Kind of scaling -> keys of its numbers.
NUMBERS = {
  'none': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low', 'high', 'original_length'),
  'proportional': ('fraction',),
}


@dataclasses.dataclass(frozen=True)
class Scaling:
  """Scaling of the frequencies, for contexts longer than in training.

  The fields are the keys of `config.model.encoder.rope_scaling`.
  """

  kind: str = keys.key(
    'none',
    "Scaling of RoPE frequencies: 'none'; 'linear' divides all by the factor;"
    " 'llama3' (Llama 3.1) divides those with wavelengths above"
    ' original_length / low, keeps those below original_length / high, and'
    " blends in between; 'proportional' (Gemma 4) keeps the first fraction and"
    ' sets the others to 0.',
    one_of=tuple(NUMBERS),
  )
  factor: float = keys.key(8.0, 'Divisor of the frequencies.', above=0)
  low: float = keys.key(1.0, 'Llama 3.1: low factor, below high.', above=0)
  high: float = keys.key(4.0, 'Llama 3.1: high factor.', above=0)
  original_length: int = keys.key(
    8192, 'Llama 3.1: length of the training rows in tokens.', at_least=1
  )
  fraction: float = keys.key(
    0.25, 'Gemma 4: part of the frequencies that rotates.', above=0, at_most=1
  )

  def __post_init__(self):
    keys.check(self, 'rope_scaling.')
    unread = keys.defaults(type(self))
    for name in ('kind', *NUMBERS[self.kind]):
      del unread[name]
    reason = f'rope_scaling.kind is {self.kind!r}'
    keys.require_defaults(keys.values_of(self), unread, 'rope_scaling.', reason)
    if self.low >= self.high:
      raise errors.UserError(
        f'rope_scaling.low is {self.low} and rope_scaling.high {self.high};'
        ' low must be below high.'
      )


def frequencies(
  head_dim: int, theta: float, scaling: Scaling
) -> Float[Array, 'J']:
  """Returns the J = H/2 scaled frequencies in radians per position."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim  # [J]
  frequency = theta**-exponent
  if scaling.kind == 'none':
    return frequency
  if scaling.kind == 'proportional':
    # Rounded down, as in transformers, modeling_rope_utils.py.
    rotated = int(scaling.fraction * head_dim // 2)
    return jnp.where(jnp.arange(len(frequency)) < rotated, frequency, 0.0)
  slow = frequency / scaling.factor
  if scaling.kind == 'linear':
    return slow
  # Periods in the original length; the two factors bound them.
  periods = scaling.original_length * frequency / (2 * math.pi)
  width = scaling.high - scaling.low
  blend = jnp.clip((periods - scaling.low) / width, 0.0, 1.0)
  return (1 - blend) * slow + blend * frequency


def angles(
  positions: Int[Array, 'B L'],
  head_dim: int,
  theta: float,
  dtype,
  scaling: Scaling = Scaling(),
) -> tuple[Float[Array, 'B L 1 J'], Float[Array, 'B L 1 J']]:
  """Computes the cosines and sines of every position.

  Args:
    positions: position of every token, from 0.
    head_dim: H, even.
    theta: base; frequency j is theta^(-2j/H).
    dtype: dtype of the result, cast before the products for bf16 parity with
      transformers; the angles themselves are fp32.
    scaling: scaling of the frequencies.

  Returns:
    (cos, sin), each [B, L, 1, H/2], to broadcast over heads.
  """
  frequency = frequencies(head_dim, theta, scaling)  # [J]
  # Always fp32: bf16 cannot represent all integers above 256.
  angle = positions[..., None].astype(jnp.float32) * frequency  # [B, L, J]
  angle = angle[:, :, None, :]  # [B, L, 1, J]
  return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(
  x: Float[Array, 'B L N H'],
  cos: Float[Array, 'B #L 1 J'],
  sin: Float[Array, 'B #L 1 J'],
) -> Float[Array, 'B L N H']:
  """Rotates each half-split pair of `x` by the angle of its position."""
  first, second = jnp.split(x, 2, axis=-1)  # each [B, L, N, J]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
