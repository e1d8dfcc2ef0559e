"""Length buckets: padding to a few lengths limits compiled programs.

This module must not import models or the engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax import numpy as jnp
from jaxtyping import Array, Int
import numpy as np

_SHORTEST = 16
_SHORTEST_STATE = 64  # A smaller state would save little.


def bucket(length: int) -> int:
  """Rounds a length up to a bucket.

  Buckets are powers of two from 16, and three quarters of the powers from 64.
  Above 32 tokens, padding is less than half of the length.
  """
  power = max(_SHORTEST, 1 << (length - 1).bit_length())
  between = power // 4 * 3
  return between if power >= 64 and length <= between else power


def width(longest: int, capacity: int) -> int:
  """Returns the padded width of prompts for a state.

  The width is a bucket, at least a 32nd of the capacity, or the capacity.

  Args:
    longest: tokens of the longest prompt.
    capacity: maximum prompt tokens of the state.
  """
  # The lower bound limits the number of widths, hence of programs.
  return min(bucket(max(longest, capacity // 32)), capacity)


class Size(NamedTuple):
  """Size of an engine's state, per row.

  Attributes:
    length: positions of the decoder.
    source: tokens of the encoder, 0 without an encoder.
  """

  length: int
  source: int

  def holds(self, size: 'Size') -> bool:
    """Returns whether another size fits into this size."""
    return self.length >= size.length and self.source >= size.source

  def bucket(self) -> 'Size':
    """Rounds both fields up to buckets."""
    return Size(bucket(self.length), self.source and bucket(self.source))

  def widths(self) -> list[int]:
    """Returns all padded prompt widths, at most 12; see `width`."""
    room = self.source or self.length
    return sorted({width(n + 1, room) for n in range(room)})


NOTHING = Size(0, 0)


def state_sizes(
  prompt: int, generated: int, *, reads_encoder: bool
) -> list[Size]:
  """Returns at most four sizes of an engine's state, in ascending order.

  They fit short texts, long answers to short prompts, a quarter of both limits,
  and both limits. Without an encoder, they are fractions of the sum of both
  limits.

  Args:
    prompt: maximum prompt tokens.
    generated: maximum generated tokens.
    reads_encoder: whether an encoder reads prompts.
  """

  def part(limit: int, share: int) -> int:
    tokens = max(limit // share, min(limit, _SHORTEST_STATE))
    return -(-tokens // _SHORTEST) * _SHORTEST

  if reads_encoder:
    shares = (16, 16), (1, 16), (4, 4), (1, 1)
    sizes = {Size(part(generated, a), part(prompt, b)) for a, b in shares}
  else:
    sizes = {Size(part(prompt + generated, a), 0) for a in (64, 16, 4, 1)}
  return sorted(sizes, key=lambda size: (sum(size), size))


def pad(
  texts: Sequence[Int[np.ndarray, 'n']],
  rows: int,
  fill: int = 0,
  width: int | None = None,
) -> tuple[Int[np.ndarray, 'rows S'], Int[np.ndarray, 'rows']]:
  """Right-pads token ids to a bucket, and the batch with rows of padding.

  Args:
    texts: token ids of at most `rows` texts.
    rows: batch size.
    fill: padding token.
    width: length of the rows; a bucket by default.

  Returns:
    Tokens, int32, and the number of tokens per row, at least 1.
  """
  width = width or bucket(max(len(text) for text in texts))
  tokens = np.full((rows, width), fill, np.int32)
  # Rows of padding count one token: an empty row would have no last token and
  # no mean.
  counts = np.ones(rows, np.int32)
  for i, text in enumerate(texts):
    tokens[i, : len(text)], counts[i] = text, len(text)
  return tokens, counts


def positions_and_mask(
  tokens: Int[Array, 'B L'], counts: Int[Array, 'B']
) -> tuple[Int[Array, 'B L'], Int[Array, 'B L']]:
  """Returns positions 0, 1, .. and segments: 1 for tokens, 0 for padding."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return positions, (positions < counts[:, None]).astype(jnp.int32)
