"""Arrays read or computed on demand.

This module must not import jax: lazy arrays may be larger than a device.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """An array read on demand, in full or in slices.

  Attributes:
    shape: shape of the full array.
    dtype: dtype of the array.
    read_part: index (a tuple of one slice per dimension) -> the slice.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read_part: Callable[[tuple[slice, ...]], np.ndarray]

  @classmethod
  def in_full(
    cls, shape: tuple[int, ...], dtype: Any, make: Callable[[], Any]
  ) -> 'LazyArray':
    """Returns an array that is computed in full, even if a slice is read.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.
      make: returns the array, or an array-like that NumPy converts.
    """

    def read(index: tuple[slice, ...]) -> np.ndarray:
      # With an ellipsis, a scalar stays an array.
      return np.asarray(make())[(*index, ...)]

    return cls(shape, np.dtype(dtype), read)

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Size of the full array in bytes, as stored."""
    return self.size * np.dtype(self.dtype).itemsize

  def __getitem__(self, index: int | tuple[int, ...]) -> np.ndarray:
    """Reads a slice, at an index into the leading axes."""
    index = index if isinstance(index, tuple) else (index,)
    # `read_part` takes only slices, to keep all dimensions.
    slices = [slice(i, i + 1) for i in index]
    slices += [slice(None)] * (len(self.shape) - len(index))
    return self.read_part(tuple(slices))[(0,) * len(index)]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """Reads the full array."""
    del copy  # Every read returns a new array.
    array = self.read_part((slice(None),) * len(self.shape))
    return array if dtype is None else array.astype(dtype)
