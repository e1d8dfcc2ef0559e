"""How a row of pairs is written as bytes.

Little-endian integers, without framing: uint32 w (bytes per token: 2, or 4 if
some id needs it), uint32 p (pairs), then p times uint32 m, uint32 n, then the
pairs' tokens m inputs, n targets, m inputs, .. as uint16 or uint32. Framing
happens when a row is read (`data/batch.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence

import numpy as np

from encdec_adapt.data import batch


def encode_row(pairs: Sequence[batch.Pair]) -> bytes:
  """Serialises a row as the module's docstring says."""
  tokens = np.concatenate([part for pair in pairs for part in pair])
  width = 2 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else 4
  sizes = [len(part) for pair in pairs for part in pair]
  header = np.array([width, len(pairs), *sizes], '<u4')
  return header.tobytes() + tokens.astype(f'<u{width}').tobytes()


def decode_row(record: bytes) -> list[batch.Pair]:
  """Inverse of `encode_row`; tokens are int32.

  Raises:
    ValueError: the bytes are not a row.
  """
  start = np.frombuffer(record, '<u4', 2) if len(record) >= 8 else [0, 0]
  width, count = int(start[0]), int(start[1])
  at = 8 + 8 * count
  if width not in (2, 4) or len(record) < at:
    raise ValueError(f'{len(record)} bytes are not a row of tokens')
  sizes = np.frombuffer(record, '<u4', 2 * count, offset=8)
  if len(record) != at + width * int(sizes.sum()):
    raise ValueError(f'{len(record)} bytes are not a row of {sizes} tokens')
  tokens = np.frombuffer(record, f'<u{width}', offset=at).astype(np.int32)
  parts = np.split(tokens, np.cumsum(sizes)[:-1]) if count else []
  return [batch.Pair(*two) for two in zip(parts[::2], parts[1::2], strict=True)]
