"""Length buckets: rows are padded to few lengths, as each is compiled."""

from collections.abc import Sequence

from jaxtyping import Int
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
