"""Passages of an encoder's inputs, each read on its own (Fusion-in-Decoder).

Izacard and Grave 2020 (arXiv:2007.01282, section 3): the encoder reads every
passage with the question but without the other passages, and the decoder
attends to all of them. A row has two kinds of segments: those of the batch
number its examples, for cross-attention, and `split` numbers the passages in
them, for the encoder's self-attention.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from encdec_adapt.base import errors, keys


@dataclasses.dataclass(frozen=True)
class Passages:
  """Passages of an encoder; keys of `config.model.encoder.passages`."""

  length: int = keys.key(
    0,
    'Most tokens of a passage, framing included: the encoder reads each passage'
    ' on its own, at positions from 0; 0: it reads its inputs as one text. The'
    ' objective `passages` sets the section.',
    at_least=0,
  )
  token: int = keys.key(
    0, 'Token at the edge of every passage: BOS or EOS.', at_least=0
  )
  ends: bool = keys.key(
    False, 'That token ends a passage (T5) instead of beginning it.'
  )

  def __post_init__(self):
    keys.check(self, 'passages.')

  def require_fits(
    self, tokens: Sequence[int | np.integer] | np.ndarray
  ) -> None:
    """Checks framed inputs; fits without passages.

    Args:
      tokens: ids [n] of one or several passages.

    Raises:
      UserError: one is longer than `length`.
    """
    if not self.length:
      return
    edges = np.flatnonzero(np.asarray(tokens) == self.token) + self.ends
    parts = np.diff(np.unique([0, *edges, len(tokens)]))
    if max(parts, default=0) > self.length:
      raise errors.UserError(
        f'the encoder reads passages of at most {self.length} tokens'
        f' (config.model.encoder.passages.length), and one has {max(parts)};'
        ' give a question with its documents, or a shorter text.'
      )


def split(
  passages: Passages, tokens: Int[Array, 'B S'], segments: Int[Array, 'B S']
) -> tuple[Int[Array, 'B S'], Int[Array, 'B S']]:
  """Returns the number and the positions of the passages of a row.

  Args:
    passages: the passages of the stack, with the token at their edges.
    tokens: token ids.
    segments: number of the example of each token, from 1; 0 is padding.

  Returns:
    The number of each token's passage, counted from 1 within the row, and its
    position in the passage; both 0 at padding.
  """
  real, edges = segments > 0, tokens == passages.token
  previous = jnp.pad(segments, [(0, 0), (1, 0)])[:, :-1]
  if passages.ends:  # A passage follows the end of another.
    edges = jnp.pad(edges, [(0, 0), (1, 0)])[:, :-1]
  starts = real & (edges | (segments != previous))
  indices = jnp.arange(tokens.shape[1])
  first = jax.lax.cummax(jnp.where(starts, indices, 0), axis=1)
  numbers = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
  return jnp.where(real, numbers, 0), jnp.where(real, indices - first, 0)
