"""Serialisation of a row of pairs.

Little-endian integers, without framing: uint32 w (bytes per token: 2, or 4 if
some id needs it), uint32 p (pairs), uint32 k (parts of a pair: inputs and
targets, and the teacher's prefix if there are two vocabularies), then p times
k uint32 lengths, then the pairs' tokens, part by part, as uint16 or
uint32. Framing happens when a row is read (`data/batch.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence

import numpy as np

from encdec_adapt.data import batch

_START = 12  # Bytes of w, p and k.


def encode_row(pairs: Sequence[batch.Pair]) -> bytes:
  """Serialises a row in the format of the module's docstring.

  Raises:
    ValueError: some pairs have a teacher's prefix and others do not.
  """
  parts = [part for pair in pairs for part in pair.parts]
  counts = {len(pair.parts) for pair in pairs} or {2}
  if len(counts) > 1:
    raise ValueError('some pairs of the row have a prefix and some have not')
  tokens = np.concatenate(parts)
  width = 2 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else 4
  header = [width, len(pairs), *counts, *map(len, parts)]
  return (
    np.array(header, '<u4').tobytes() + tokens.astype(f'<u{width}').tobytes()
  )


def decode_row(record: bytes) -> list[batch.Pair]:
  """Parses a row written by `encode_row`; tokens are int32.

  Raises:
    ValueError: the bytes are not a row.
  """
  whole = len(record) >= _START
  start = np.frombuffer(record, '<u4', 3) if whole else [0, 0, 0]
  width, count, each = (int(value) for value in start)
  at = _START + 4 * each * count
  if width not in (2, 4) or each not in (2, 3) or len(record) < at:
    raise ValueError(f'{len(record)} bytes are not a row of tokens')
  sizes = np.frombuffer(record, '<u4', each * count, offset=_START)
  if len(record) != at + width * int(sizes.sum()):
    raise ValueError(f'{len(record)} bytes are not a row of {sizes} tokens')
  tokens = np.frombuffer(record, f'<u{width}', offset=at).astype(np.int32)
  parts = np.split(tokens, np.cumsum(sizes)[:-1]) if count else []
  return [batch.Pair(*parts[i : i + each]) for i in range(0, len(parts), each)]
