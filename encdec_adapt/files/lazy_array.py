"""Arrays that are read, or computed, on demand.

This module must not import jax: such arrays may be larger than a device.
"""

from collections.abc import Callable
import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """An array that is read on demand, whole or in parts.

  Attributes:
    shape: shape of the whole array.
    dtype: dtype of the array.
    read_part: index (a tuple with a slice for each dimension) -> that part.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read_part: Callable[[tuple[slice, ...]], np.ndarray]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Size of the whole array in bytes, as stored."""
    return self.size * np.dtype(self.dtype).itemsize

  def __getitem__(self, index: int | tuple[int, ...]) -> np.ndarray:
    """Reads the part at an index into the first axis, or the first axes."""
    index = index if isinstance(index, tuple) else (index,)
    # Readers take slices only, so that a part has the dimensions of the array.
    slices = [slice(i, i + 1) for i in index]
    slices += [slice(None)] * (len(self.shape) - len(index))
    return self.read_part(tuple(slices))[(0,) * len(index)]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """Reads the whole array."""
    del copy  # Every read makes a new array.
    array = self.read_part((slice(None),) * len(self.shape))
    return array if dtype is None else array.astype(dtype)
