"""Rows as bytes: literal bytes, round trips, and bytes that are no row."""

import numpy as np
import pytest

from encdec_adapt.data.records import row_codec
from encdec_adapt.objectives import framing, row_fields


def _ints(*values):
  return np.array(values, np.int32)


ROWS = row_fields.PAIRS
ROW = [framing.Pair(_ints(101), _ints(1, 5))]


def test_the_bytes_of_a_row_are_as_documented():
  row = [
    framing.Pair(_ints(258), _ints(3, 4), documents=('a', '\u00e9')),
    framing.Pair(_ints(), _ints(5)),
  ]
  u4 = lambda *values: b''.join(v.to_bytes(4, 'little') for v in values)  # noqa: E731
  ids = '[["a", "\u00e9"], []]'.encode()
  assert row_codec.encode_row(row, ROWS) == (
    u4(2, 2, 0b11, len(ids), 1, 2, 0, 1)
    + b'\x02\x01\x03\x00\x04\x00\x05\x00'
    + ids
  )
  row[0].targets[0] = 65536
  assert row_codec.encode_row(row, ROWS) == (
    u4(4, 2, 0b11, len(ids), 1, 2, 0, 1, 258, 65536, 4, 5) + ids
  )


@pytest.mark.parametrize('cut', [0, 3, 9, -1])
def test_bytes_that_are_no_row_are_refused(cut):
  with pytest.raises(ValueError, match='are not a row'):
    row_codec.decode_row(row_codec.encode_row(ROW, ROWS)[:cut], ROWS)


@pytest.mark.parametrize(
  'row',
  [
    [
      framing.Pair(_ints(1, 2), _ints(3), _ints(4, 5, 6)),
      framing.Pair(_ints(), _ints(7, 8), _ints()),
    ],
    [
      framing.Pair(
        _ints(1),
        _ints(3, 70000),
        decoder_inputs=_ints(4, 3),
        weights=np.array([0, 0.5], np.float32),
        fields='{"tests": "\u00e9"}',
        documents=('x::1',),
      ),
    ],
    [],
  ],
)
def test_rows_come_back(row):
  found = row_codec.decode_row(row_codec.encode_row(row, ROWS), ROWS)
  for pair, other in zip(found, row, strict=True):
    assert pair.documents == other.documents
    for field, same in zip(pair[:-1], other[:-1], strict=True):
      assert (field is None) == (same is None)
      if same is not None:
        np.testing.assert_array_equal(field, same)
        assert type(field) is type(same)
        assert isinstance(same, str) or field.dtype == same.dtype


def test_pairs_of_a_row_have_the_same_fields():
  with pytest.raises(ValueError, match='other fields'):
    row_codec.encode_row([ROW[0], ROW[0]._replace(prefix=_ints(1))], ROWS)
