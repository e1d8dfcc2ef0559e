"""Serialisation of a row of examples by the declared fields of its objective.

Little-endian: four uint32 (bytes per token: 2, or 4 if some id needs it;
number of examples; bit mask of the declared fields that the examples have;
bytes of the documents' ids), then the lengths of all fields, example by
example, as uint32, then the fields themselves as uint16 or uint32 (float32 as
the bits of float16), then the ids as JSON: a list per example. Framing happens
when a row is read (`objectives/framing.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence
import json
from typing import Any

import numpy as np

from encdec_adapt.objectives import definition

Maker = type[definition.ExampleMaker]
_START = 16  # Bytes before the lengths.


def encode_row(examples: Sequence[Any], maker: Maker) -> bytes:
  """Serialises a row in the format of the module's docstring.

  Args:
    examples: examples of the row.
    maker: class of their maker, which declares the fields.

  Raises:
    ValueError: some examples have a field that others have not.
  """
  fields = [
    field
    for field in maker.fields
    if examples and getattr(examples[0], field.name) is not None
  ]
  names = {field.name for field in fields}
  for example in examples:
    if names != {
      f.name for f in maker.fields if getattr(example, f.name) is not None
    }:
      raise ValueError(f'the examples of a row have other fields than {names}')
  arrays = [
    _to_integers(getattr(example, field.name), field)
    for example in examples
    for field in fields
  ]
  tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
  width = 2 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else 4
  ids = json.dumps([x.documents for x in examples], ensure_ascii=False)
  ids = ids.encode('utf-8')
  mask = sum(1 << maker.fields.index(field) for field in fields)
  header = [width, len(examples), mask, len(ids), *map(len, arrays)]
  return (
    np.array(header, '<u4').tobytes()
    + tokens.astype(f'<u{width}').tobytes()
    + ids
  )


def _to_integers(values: np.ndarray, field: definition.RowField) -> np.ndarray:
  if field.dtype == 'float32':
    return np.asarray(values, np.float16).view(np.uint16)
  return values


def decode_row(record: bytes, maker: Maker) -> list[Any]:
  """Parses a row written by `encode_row`; returns `maker.example`s.

  Raises:
    ValueError: the bytes are not a row.
  """
  whole = len(record) >= _START
  start = np.frombuffer(record, '<u4', 4) if whole else [0, 0, 0, 0]
  width, count, mask, ids = (int(value) for value in start)
  fields = [field for i, field in enumerate(maker.fields) if mask >> i & 1]
  at = _START + 4 * count * len(fields)
  if width not in (2, 4) or mask >> len(maker.fields) or len(record) < at:
    raise ValueError(f'{len(record)} bytes are not a row of tokens')
  sizes = np.frombuffer(record, '<u4', count * len(fields), offset=_START)
  stop = at + width * int(sizes.sum())
  if len(record) != stop + ids:
    raise ValueError(f'{len(record)} bytes are not a row of {sizes} tokens')
  tokens = np.frombuffer(record[at:stop], f'<u{width}').astype(np.int32)
  arrays = iter(np.split(tokens, np.cumsum(sizes)[:-1]) if count else ())
  return [
    maker.example(
      **{field.name: _from_integers(next(arrays), field) for field in fields},
      documents=tuple(documents),
    )
    for documents in json.loads(record[stop:])
  ]


def _from_integers(
  values: np.ndarray, field: definition.RowField
) -> np.ndarray:
  if field.dtype == 'float32':
    return values.astype(np.uint16).view(np.float16).astype(np.float32)
  return values
