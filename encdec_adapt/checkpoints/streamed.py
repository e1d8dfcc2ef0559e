"""Leaves of a checkpoint that are made while it is written.

So that host memory stays near the largest two leaves when a model passes from
files into a checkpoint: one is written and the next is made. Beside
`checkpoint` and `orbax_folder`, the only module that imports Orbax.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import math

from absl import logging
import numpy as np
import orbax.checkpoint as ocp


@dataclasses.dataclass(frozen=True)
class Leaf:
  """An array that is made when it is written.

  Attributes:
    shape: of the array.
    dtype: of the array.
    make: gives it; called once, in another thread.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Bytes of the array."""
    return self.size * np.dtype(self.dtype).itemsize


def register() -> None:
  """Lets Orbax save such leaves, as the arrays they stand for."""
  handler = _Handler(deepcopy_host_arrays=False)
  verbosity = logging.get_verbosity()
  # It warns that what is stored is not told from NumPy arrays, as is meant.
  logging.set_verbosity(logging.ERROR)
  try:
    ocp.type_handlers.register_type_handler(Leaf, handler, override=True)
  finally:
    logging.set_verbosity(verbosity)


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes leaves as NumPy arrays, each while the next is made."""

  async def serialize(self, values, infos, args=None):
    args = args or [ocp.SaveArgs()] * len(values)
    return [_Writes(super().serialize, values, infos, args)]


class _Writes:
  """The future of all writes: they happen when it is first waited for."""

  def __init__(self, serialize: Callable, leaves: Sequence[Leaf], infos, args):
    self._serialize = serialize
    self._rest = list(zip(leaves, infos, args, strict=True))

  def result(self, timeout: float | None = None) -> None:
    """Makes and writes what is left."""
    rest, self._rest = self._rest, []
    with futures.ThreadPoolExecutor(1) as maker:
      coming = map(maker.submit, [leaf.make for leaf, _, _ in rest])
      making = next(coming, None)
      for _, info, arg in rest:
        array, making = making.result(), next(coming, None)
        self._write(array, info, arg, timeout)
        del array  # Before the next is waited for.

  def _write(self, array: np.ndarray, info, arg, timeout) -> None:
    for future in asyncio.run(self._serialize([array], [info], [arg])):
      future.result(timeout)
