"""Arrays that are read, or computed, on demand."""

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
    read: index (a tuple of slices, one per dimension) -> that part.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[tuple[slice, ...]], np.ndarray]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Size of the whole array in bytes, as stored."""
    return self.size * np.dtype(self.dtype).itemsize

  def __getitem__(self, place: int | tuple[int, ...]) -> np.ndarray:
    """Reads the part at an index into the first axis, or the first axes."""
    place = place if isinstance(place, tuple) else (place,)
    ones = tuple(slice(i, i + 1) for i in place)
    rest = tuple(slice(None) for _ in self.shape[len(place) :])
    return self.read((*ones, *rest))[(0,) * len(place)]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """Reads the whole array."""
    del copy
    whole = self.read(tuple(slice(None) for _ in self.shape))
    return whole if dtype is None else whole.astype(dtype)
