"""Copies of transposed arrays, made in strips that caches hold.

Kernels are stored as [out, in] and used as [in, out]. NumPy copies such a
view element by element across the whole array, at a third of the speed. Each
strip is one call of NumPy's, in which other threads run.
"""

import numpy as np

_STRIP = 64  # Lines of memory that are read from side by side.


def in_order(view: np.ndarray) -> np.ndarray:
  """The array in row-major order: itself where it is, or a copy.

  Args:
    view: of any shape and strides.
  """
  if view.ndim < 2 or view.flags.c_contiguous:
    return view
  made = np.empty(view.shape, view.dtype)
  copy(view, made)
  return made


def copy(view: np.ndarray, out: np.ndarray) -> None:
  """Fills an array with what a view shows, cast to its dtype.

  Args:
    view: of any strides.
    out: of its shape.
  """
  if view.ndim < 2 or view.flags.c_contiguous:
    out[...] = view
    return
  fast = min(range(view.ndim), key=lambda axis: view.strides[axis])
  others = [axis for axis in range(view.ndim) if axis != fast]
  other = max(others, key=lambda axis: view.shape[axis])
  for start in range(0, view.shape[other], _STRIP):
    strip = (slice(None),) * other + (slice(start, start + _STRIP),)
    out[strip] = view[strip]
