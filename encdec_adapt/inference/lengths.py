"""Length buckets: rows are padded to few lengths, as each is compiled."""

from collections.abc import Sequence

from jax import numpy as jnp
from jaxtyping import Array, Int
import numpy as np

_SHORTEST = 16


def bucket(length: int) -> int:
  """Returns the least bucket that holds a length.

  Buckets are powers of two from 16 on, and three quarters of those from 64 on:
  at most half of the smaller one is padding.
  """
  power = max(_SHORTEST, 1 << (length - 1).bit_length())
  between = power // 4 * 3
  return between if power >= 64 and length <= between else power


def pad(
  texts: Sequence[Int[np.ndarray, 'n']], rows: int, fill: int = 0
) -> tuple[Int[np.ndarray, 'rows S'], Int[np.ndarray, 'rows']]:
  """Pads token ids on the right to a bucket, and the batch by rows of one pad.

  Args:
    texts: token ids, at most `rows` of them.
    rows: rows of the batch.
    fill: token of the padding.

  Returns:
    Tokens, int32, and the number of each row's tokens, at least 1.
  """
  longest = max(len(text) for text in texts)
  tokens = np.full((rows, bucket(longest)), fill, np.int32)
  counts = np.ones(rows, np.int32)
  for i, text in enumerate(texts):
    tokens[i, : len(text)], counts[i] = text, len(text)
  return tokens, counts


def frame(
  tokens: Int[Array, 'B L'], counts: Int[Array, 'B']
) -> tuple[Int[Array, 'B L'], Int[Array, 'B L']]:
  """Returns positions 0, 1, .. and segments: 1 up to a row's count, then 0."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return positions, (positions < counts[:, None]).astype(jnp.int32)
