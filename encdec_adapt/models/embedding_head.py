"""Text embeddings: options of the head, pooling, projections, normalisation.

An embedding model is a stack of any role with this head in place of a table of
tokens. It pools the states of a text, multiplies them by its projections, as
EmbeddingGemma does (arXiv:2509.20354, section 2.1: to a larger width and back,
without biases), and divides by the norm. Imports jax and no other models.
"""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.base import errors, keys, option_strings

LABEL = 'config.model.embedding'
POOLINGS = ('mean', 'last', 'first')
EXACT = (
  jax.lax.Precision.HIGHEST
)  # Small products, of vectors that are compared.
_SMALLEST = 1e-12  # Norm below which a vector is not scaled up, as in torch.


class Widths(tuple):
  """Numbers above 0, written 768+256."""

  def __new__(cls, widths: str | Iterable[int] = ''):
    if isinstance(widths, str):
      widths = map(int, widths.split('+') if widths else ())
    widths = super().__new__(cls, widths)
    if widths and min(widths) < 1:
      raise ValueError
    return widths

  def __str__(self) -> str:
    return '+'.join(map(str, self))


@dataclasses.dataclass(frozen=True)
class EmbeddingHead:
  """Options of the head; keys are those of `config.model.embedding`.

  Attributes:
    temperature: initial value of a temperature that is a parameter; None if
      the model has none.
  """

  pooling: str = keys.key('mean', 'States of a text.', one_of=POOLINGS)
  projections: Widths = keys.key(Widths(), 'Widths after the pooled states.')
  dimensions: Widths = keys.key(Widths(), 'Leading parts that are vectors too.')
  temperature: float | None = None

  def __post_init__(self):
    keys.check(self, f'{LABEL}: ')

  def sizes(self, width: int) -> tuple[int, ...]:
    """Returns the size E of a vector, and those of its parts (Matryoshka).

    Args:
      width: width D of the stack.

    Raises:
      UserError: a part is not smaller than the vector.
    """
    size = (width, *self.projections)[-1]
    if max(self.dimensions, default=0) >= size:
      raise errors.UserError(
        f'{LABEL} has dimensions={self.dimensions}, and a vector has {size}'
        ' numbers; leave out parts that are not smaller.'
      )
    return (size, *self.dimensions)


def parse(text: str) -> EmbeddingHead | None:
  """Reads `config.model.embedding`; None for ''.

  Raises:
    UserError: an option is unknown or has a wrong value.
  """
  defaults = keys.defaults(EmbeddingHead)
  values = option_strings.key_values(LABEL, text, defaults)
  return keys.make(EmbeddingHead, values) if text else None


def spell(head: EmbeddingHead | None) -> str:
  """Returns the text that `parse` reads."""
  values = keys.values_of(head) if head else {}
  return ','.join(f'{key}={value}' for key, value in values.items() if value)


def pool(
  states: Float[Array, 'B L D'],
  segments: Int[Array, 'B L'],
  texts: int,
  pooling: str,
) -> Float[Array, 'B M D']:
  """Pools the states of every text of packed rows, in float32.

  Args:
    states: states of a stack.
    segments: number of the text of each token, from 1; 0 is padding.
    texts: number M of texts; pools segments 1 to M, to zeros if absent.
    pooling: one of `POOLINGS`.
  """
  mask = segments[:, None] == jnp.arange(1, texts + 1)[:, None]  # [B, M, L]
  number = jnp.cumsum(mask, axis=-1)  # Numbers the text's tokens from 1.
  count = number[..., -1:]
  weights = mask / jnp.maximum(count, 1)
  if pooling != 'mean':
    weights = mask & (number == (1 if pooling == 'first' else count))
  # A sum over a long text in bfloat16 would lose its last terms.
  weights, states = (x.astype(jnp.float32) for x in (weights, states))
  return jnp.einsum('BML,BLD->BMD', weights, states, precision=EXACT)


def project(
  head: EmbeddingHead, params: Mapping[str, Any], pooled: Float[Array, '*B D']
) -> Float[Array, '*B E']:
  """Projects pooled states, float32, and normalises them.

  Args:
    head: options of the head.
    params: parameters of the stack.
    pooled: pooled states.
  """
  for i in range(len(head.projections)):
    kernel = params['embedding'][f'projection_{i}']
    pooled = jnp.matmul(pooled, kernel, precision=EXACT)
  return normalised(pooled)


def normalised(x: Float[Array, '*B E']) -> Float[Array, '*B E']:
  """Divides vectors by their norms; zeros stay zeros."""
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  # Inside of the root: its gradient at 0 is infinite.
  return x * jax.lax.rsqrt(jnp.maximum(squares, _SMALLEST**2))
