"""Streams lazily computed leaves into a checkpoint.

Converting a model to a checkpoint then needs host memory for about two leaves:
the leaf being written and the next leaf, being computed. Only this module,
`manager` and `orbax_folder` import Orbax.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures

from absl import logging
import numpy as np
import orbax.checkpoint as ocp

from encdec_adapt.files import lazy_array


def register() -> None:
  """Registers an Orbax type handler for `LazyArray`."""
  # Orbax copies host arrays by default, in case they change during the save;
  # lazy arrays do not change.
  handler = _Handler(deepcopy_host_arrays=False)
  verbosity = logging.get_verbosity()
  # Orbax warns that the type is stored like NumPy arrays, as intended.
  logging.set_verbosity(logging.ERROR)
  try:
    ocp.type_handlers.register_type_handler(
      lazy_array.LazyArray, handler, override=True
    )
  finally:
    logging.set_verbosity(verbosity)


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes leaves as NumPy arrays while computing the next leaf."""

  async def serialize(self, values, infos, args=None):
    """Returns a single future that writes the leaves in sequence."""
    args = args or [ocp.SaveArgs()] * len(values)
    return [_Writes(super().serialize, values, infos, args)]


class _Writes:
  """A future of all writes, started by the first call of `result`."""

  def __init__(self, serialize: Callable, leaves: Sequence, infos, args):
    self._serialize = serialize
    self._pending = list(zip(leaves, infos, args, strict=True))

  def result(self, timeout: float | None = None) -> None:
    """Computes and writes the pending leaves."""
    pending, self._pending = self._pending, []  # For later calls.
    with futures.ThreadPoolExecutor(1) as pool:
      # A generator submits leaves on demand, so at most one is computed ahead
      # of the writes.
      computations = (pool.submit(np.asarray, leaf) for leaf, _, _ in pending)
      computation = next(computations, None)
      for _, info, arg in pending:
        array, computation = computation.result(), next(computations, None)
        self._write(array, info, arg, timeout)
        del array  # Freed before waiting for the next array.

  def _write(self, array: np.ndarray, info, arg, timeout) -> None:
    for future in asyncio.run(self._serialize([array], [info], [arg])):
      future.result(timeout)
