"""Rotary position embedding (Su et al. 2021), half-split as in Gemma.

Dimension j is rotated with dimension j + H/2. `angles` are computed once for
all layers of a kind, and each layer rotates by them.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.base import option_strings

# The numbers of each kind of scaling, in the order of `Scaling.numbers`.
NUMBERS = {
  'none': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_factor', 'high_factor', 'original_length'),
}


@dataclasses.dataclass(frozen=True)
class Scaling:
  """How frequencies are changed for rows longer than those trained on.

  'linear' divides all by the factor. 'llama3' (Llama 3.1's) divides those with
  a wavelength above original_length / low_factor, keeps those below
  original_length / high_factor, and blends in between; the original length is
  that of the training rows. As a text a scaling is its kind and its numbers:
  'none', 'linear:8' or 'llama3:32,1,4,8192'.

  Attributes:
    kind: 'none', 'linear' or 'llama3'.
    numbers: numbers of the kind, as `NUMBERS` names them.
  """

  kind: str = 'none'
  numbers: tuple[float, ...] = ()

  @classmethod
  def parse(cls, text: str) -> 'Scaling':
    """Parses the text of a scaling.

    Raises:
      UserError: the kind is unknown, there are too few or too many numbers, a
        number is not positive and finite, or the low factor is not below the
        high factor.
    """
    scaling = option_strings.Part('rope_scaling', text)
    kind = scaling.partition(':')[0].text
    numbers = tuple(
      option.read(float, 'a number above 0', lambda n: 0 < n < math.inf)
      for option in scaling.options()
    )
    if (
      kind not in NUMBERS
      or len(numbers) != len(NUMBERS[kind])
      or (kind == 'llama3' and numbers[1] >= numbers[2])
    ):
      raise scaling.error(
        "must be 'none', 'linear:FACTOR' or 'llama3:FACTOR,LOW,HIGH,LENGTH',"
        ' with LOW below HIGH.'
      )
    return cls(kind, numbers)

  def __str__(self) -> str:
    numbers = [repr(number).removesuffix('.0') for number in self.numbers]
    return f'{self.kind}:{",".join(numbers)}' if numbers else self.kind


def frequencies(
  head_dim: int, theta: float, scaling: Scaling
) -> Float[Array, 'J']:
  """Returns the J = H/2 scaled frequencies, in radians per position."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim  # [J]
  frequency = theta**-exponent
  if scaling.kind == 'none':
    return frequency
  factor, *bounds = scaling.numbers
  slow = frequency / factor
  if scaling.kind == 'linear':
    return slow
  low, high, length = bounds
  # Periods in the original length, which the two factors are bounds of.
  periods = length * frequency / (2 * math.pi)
  blend = jnp.clip((periods - low) / (high - low), 0.0, 1.0)
  return (1 - blend) * slow + blend * frequency


def angles(
  positions: Int[Array, 'B L'],
  head_dim: int,
  theta: float,
  dtype,
  scaling: Scaling = Scaling(),
) -> tuple[Float[Array, 'B L 1 J'], Float[Array, 'B L 1 J']]:
  """Computes cosines and sines of every position.

  Args:
    positions: position of every token, from 0.
    head_dim: H, even.
    theta: base; frequency j is theta^(-2j/H).
    dtype: dtype of the result, cast before the products as bf16 parity with
      transformers needs; the angles themselves are fp32.
    scaling: scaling of the frequencies.

  Returns:
    (cos, sin), each [B, L, 1, H/2], to broadcast over heads.
  """
  frequency = frequencies(head_dim, theta, scaling)  # [J]
  # fp32 whatever the model's dtype: bf16 cannot count positions above 256.
  angle = positions[..., None].astype(jnp.float32) * frequency  # [B, L, J]
  angle = angle[:, :, None, :]  # [B, L, 1, J]
  return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(
  x: Float[Array, 'B L N H'],
  cos: Float[Array, 'B #L 1 J'],
  sin: Float[Array, 'B #L 1 J'],
) -> Float[Array, 'B L N H']:
  """Rotates each half-split pair of `x` by the angles of its position."""
  first, second = jnp.split(x, 2, axis=-1)  # each [B, L, N, J]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
