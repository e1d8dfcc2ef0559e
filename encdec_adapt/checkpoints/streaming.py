"""Streaming leaves into a checkpoint: arrays are computed as they are written.

Converting a model to a checkpoint then needs host memory for about two leaves:
the one being written, and the next one, which is computed meanwhile. With
`manager` and `orbax_folder` the only importer of Orbax.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures

from absl import logging
import numpy as np
import orbax.checkpoint as ocp

from encdec_adapt.files import lazy_array


def register() -> None:
  """Registers a type handler with which Orbax saves a `LazyArray`."""
  handler = _Handler(deepcopy_host_arrays=False)
  verbosity = logging.get_verbosity()
  # Orbax warns that the type is stored as NumPy arrays are; that is intended.
  logging.set_verbosity(logging.ERROR)
  try:
    ocp.type_handlers.register_type_handler(
      lazy_array.LazyArray, handler, override=True
    )
  finally:
    logging.set_verbosity(verbosity)


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes leaves as NumPy arrays, each while the next is computed."""

  async def serialize(self, values, infos, args=None):
    """Returns one future, which writes the leaves one after the other."""
    args = args or [ocp.SaveArgs()] * len(values)
    return [_Writes(super().serialize, values, infos, args)]


class _Writes:
  """A future of all writes, which start at the first call of `result`."""

  def __init__(self, serialize: Callable, leaves: Sequence, infos, args):
    self._serialize = serialize
    self._rest = list(zip(leaves, infos, args, strict=True))

  def result(self, timeout: float | None = None) -> None:
    """Computes and writes the leaves that are not written yet."""
    rest, self._rest = self._rest, []
    with futures.ThreadPoolExecutor(1) as maker:
      coming = (maker.submit(np.asarray, leaf) for leaf, _, _ in rest)
      making = next(coming, None)
      for _, info, arg in rest:
        array, making = making.result(), next(coming, None)
        self._write(array, info, arg, timeout)
        del array  # Freed before waiting for the next one.

  def _write(self, array: np.ndarray, info, arg, timeout) -> None:
    for future in asyncio.run(self._serialize([array], [info], [arg])):
      future.result(timeout)
