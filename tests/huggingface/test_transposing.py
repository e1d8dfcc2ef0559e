"""Copies of views are the arrays that they show."""

import ml_dtypes
import numpy as np
import pytest

from encdec_adapt.huggingface import transposing


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
  'shape, axes',
  [
    ((5,), (0,)),
    ((3, 4), (0, 1)),
    ((300, 270), (1, 0)),
    ((0, 4), (1, 0)),
    ((6, 130, 200), (1, 0, 2)),
    ((6, 130, 200), (2, 0, 1)),
  ],
)
def test_every_element_is_in_its_place(shape, axes, dtype):
  view = np.arange(np.prod(shape)).astype(dtype).reshape(shape).transpose(axes)
  made = transposing.in_order(view)
  assert made.flags.c_contiguous
  assert made.dtype == view.dtype
  np.testing.assert_array_equal(made, view)


def test_what_is_in_order_is_not_copied():
  array = np.ones((3, 4))
  assert transposing.in_order(array) is array


def test_a_copy_has_the_dtype_of_what_it_fills():
  array = np.arange(1200).astype(ml_dtypes.bfloat16).reshape(300, 4)
  filled = np.zeros((4, 300), np.float32)
  transposing.copy(array.T, filled)
  np.testing.assert_array_equal(filled, array.T.astype(np.float32))
