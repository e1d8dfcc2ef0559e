"""Serialisation of a row of pairs.

Little-endian: four uint32 (bytes per token: 2, or 4 if some id needs it;
number of pairs; bit mask of the fields that the pairs have; bytes of the
documents' ids), then the lengths of all fields, pair by pair, as uint32, then
the fields themselves as uint16 or uint32 (weights as the bits of float16), then
the ids as JSON: a list per pair. Framing happens when a row is read
(`data/batch.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence
import json

import numpy as np

from encdec_adapt.data import batch

_START = 16  # Bytes before the lengths.
_FIELDS = ('inputs', 'targets', 'prefix', 'decoder_inputs', 'weights')


def encode_row(pairs: Sequence[batch.Pair]) -> bytes:
  """Serialises a row in the format of the module's docstring.

  Raises:
    ValueError: some pairs have a field that others have not.
  """
  names = _fields(pairs[0]) if pairs else _FIELDS[:2]
  if any(_fields(pair) != names for pair in pairs):
    raise ValueError(f'the pairs of a row have different fields than {names}')
  arrays = [_to_integers(getattr(pair, n), n) for pair in pairs for n in names]
  tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
  width = 2 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else 4
  ids = json.dumps([pair.documents for pair in pairs], ensure_ascii=False)
  ids = ids.encode('utf-8')
  mask = sum(1 << _FIELDS.index(name) for name in names)
  header = [width, len(pairs), mask, len(ids), *map(len, arrays)]
  return (
    np.array(header, '<u4').tobytes()
    + tokens.astype(f'<u{width}').tobytes()
    + ids
  )


def _fields(pair: batch.Pair) -> tuple[str, ...]:
  return tuple(name for name in _FIELDS if getattr(pair, name) is not None)


def _to_integers(values: np.ndarray, name: str) -> np.ndarray:
  if name == 'weights':
    return np.asarray(values, np.float16).view(np.uint16)
  return values


def decode_row(record: bytes) -> list[batch.Pair]:
  """Parses a row written by `encode_row`; tokens are int32, weights float32.

  Raises:
    ValueError: the bytes are not a row.
  """
  whole = len(record) >= _START
  start = np.frombuffer(record, '<u4', 4) if whole else [0, 0, 0, 0]
  width, count, mask, ids = (int(value) for value in start)
  names = [name for i, name in enumerate(_FIELDS) if mask >> i & 1]
  at = _START + 4 * count * len(names)
  if width not in (2, 4) or mask >> len(_FIELDS) or len(record) < at:
    raise ValueError(f'{len(record)} bytes are not a row of tokens')
  sizes = np.frombuffer(record, '<u4', count * len(names), offset=_START)
  stop = at + width * int(sizes.sum())
  if len(record) != stop + ids:
    raise ValueError(f'{len(record)} bytes are not a row of {sizes} tokens')
  tokens = np.frombuffer(record[at:stop], f'<u{width}').astype(np.int32)
  arrays = iter(np.split(tokens, np.cumsum(sizes)[:-1]) if count else ())
  documents = json.loads(record[stop:])
  return [_pair(names, arrays, documents[i]) for i in range(count)]


def _pair(names, arrays, documents) -> batch.Pair:
  """Makes a pair of its fields, the next of `arrays`."""
  fields = {name: next(arrays) for name in names}
  if 'weights' in fields:
    bits = fields['weights'].astype(np.uint16)
    fields['weights'] = bits.view(np.float16).astype(np.float32)
  return batch.Pair(**fields, documents=tuple(documents))
