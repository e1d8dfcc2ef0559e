"""Rows as bytes: literal bytes, round trips, and bytes that are no row."""

import numpy as np
import pytest

from encdec_adapt.data import batch, row_codec

ROW = [batch.Pair(np.array([101], np.int32), np.array([1, 5], np.int32))]


def test_the_bytes_of_a_row_are_as_documented():
  row = [
    batch.Pair(np.array([258], np.int32), np.array([3, 4], np.int32)),
    batch.Pair(np.array([], np.int32), np.array([5], np.int32)),
  ]
  u4 = lambda *values: b''.join(v.to_bytes(4, 'little') for v in values)  # noqa: E731
  assert row_codec.encode_row(row) == (
    u4(2, 2, 2) + u4(1, 2) + u4(0, 1) + b'\x02\x01\x03\x00\x04\x00\x05\x00'
  )
  row[0].targets[0] = 65536
  assert row_codec.encode_row(row) == u4(4, 2, 2, 1, 2, 0, 1, 258, 65536, 4, 5)


@pytest.mark.parametrize('cut', [0, 3, 9, -1])
def test_bytes_that_are_no_row_are_refused(cut):
  with pytest.raises(ValueError, match='are not a row'):
    row_codec.decode_row(row_codec.encode_row(ROW)[:cut])


def test_rows_with_the_teachers_prefix_come_back():
  row = [
    batch.Pair(*(np.array(part, np.int32) for part in parts))
    for parts in (([1, 2], [3], [4, 5, 6]), ([], [7, 8], []))
  ]
  found = row_codec.decode_row(row_codec.encode_row(row))
  for pair, other in zip(found, row, strict=True):
    for side, same in zip(pair.parts, other.parts, strict=True):
      np.testing.assert_array_equal(side, same)
  assert len(row_codec.encode_row(row)) == 12 + 6 * 4 + 8 * 2
  with pytest.raises(ValueError, match='some pairs of the row have a prefix'):
    row_codec.encode_row([row[0], row[1]._replace(prefix=None)])
