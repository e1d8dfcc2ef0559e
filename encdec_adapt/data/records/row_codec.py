"""Serialisation of a row of examples, given its stored fields.

Little-endian: four uint32 (bytes per token: 2, or 4 if some id needs it; number
of examples; bit mask of the present fields; bytes of the document ids), then
the lengths of all fields, example by example, as uint32, then the fields
themselves as uint16 or uint32 (float32 as the bits of float16, JSON as its
bytes), then the ids as JSON: a list per example. Rows are framed when read
(`objectives/framing.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence
import json
from typing import Any

import numpy as np

from encdec_adapt.objectives import row_fields

_START = 16  # Bytes before the lengths: four uint32.


def encode_row(examples: Sequence[Any], rows: row_fields.RowFields) -> bytes:
  """Serialises a row in the format of the module's docstring.

  Args:
    examples: examples of the row.
    rows: fields of the row.

  Raises:
    ValueError: the examples do not have the same fields.
  """
  # The row has one field mask and a rectangular table of lengths, so its
  # examples must have the same optional fields.
  present = [
    [field for field in rows.stored if getattr(x, field.name) is not None]
    for x in examples
  ]
  fields = present[0] if present else []
  if any(names != fields for names in present):
    names = {field.name for field in fields}
    raise ValueError(f'the examples of a row have other fields than {names}')
  arrays = [
    _to_integers(getattr(example, field.name), field)
    for example in examples
    for field in fields
  ]
  tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
  # Most vocabularies have ids below 65,536: half the bytes.
  width = 2 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else 4
  documents = json.dumps([x.documents for x in examples], ensure_ascii=False)
  ids = documents.encode('utf-8')
  mask = sum(1 << rows.stored.index(field) for field in fields)
  header = [width, len(examples), mask, len(ids), *map(len, arrays)]
  return (
    np.array(header, '<u4').tobytes()
    + tokens.astype(f'<u{width}').tobytes()
    + ids
  )


def _to_integers(
  values: np.ndarray | str, field: row_fields.StoredField
) -> np.ndarray:
  if field.form == 'json':
    return np.frombuffer(values.encode('utf-8'), np.uint8)
  if field.form == 'floats':
    # Float16 bits keep the token width at 2 bytes; the objectives' weights, 0
    # and 1, are exact in float16.
    return np.asarray(values, np.float16).view(np.uint16)
  return values


def decode_row(record: bytes, rows: row_fields.RowFields) -> list[Any]:
  """Parses a row written by `encode_row`; returns `rows.example`s.

  Raises:
    ValueError: the bytes are not a row.
  """
  # A truncated header is padded with a width of 0, which is refused below.
  header = np.frombuffer(record[:_START].ljust(_START, b'\0'), '<u4')
  width, count, mask, ids = header.tolist()
  fields = [field for i, field in enumerate(rows.stored) if mask >> i & 1]
  start = _START + 4 * count * len(fields)
  # A bit beyond the declared fields indicates another kind of row.
  if width not in (2, 4) or mask >> len(rows.stored) or len(record) < start:
    raise ValueError(f'{len(record)} bytes are not a row of tokens')
  sizes = np.frombuffer(record, '<u4', count * len(fields), offset=_START)
  stop = start + width * int(sizes.sum())
  if len(record) != stop + ids:
    raise ValueError(f'{len(record)} bytes are not a row of {sizes} tokens')
  tokens = np.frombuffer(record[start:stop], f'<u{width}').astype(np.int32)
  arrays = iter(np.split(tokens, np.cumsum(sizes)[:-1]) if count else ())
  return [
    rows.example(
      **{field.name: _from_integers(next(arrays), field) for field in fields},
      documents=tuple(documents),
    )
    for documents in json.loads(record[stop:])
  ]


def _from_integers(
  values: np.ndarray, field: row_fields.StoredField
) -> np.ndarray | str:
  if field.form == 'json':
    return values.astype(np.uint8).tobytes().decode('utf-8')
  if field.form == 'floats':
    return values.astype(np.uint16).view(np.float16).astype(np.float32)
  return values
