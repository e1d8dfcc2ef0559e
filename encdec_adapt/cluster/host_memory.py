"""Host memory of a process with the CPU as its backend.

XLA:CPU allocates the buffers of a step at each call, and glibc returns
large ones to the system when they are freed: every step then waits for the
kernel to map, and fill with zeros, the pages that it has just given back. A
small model's step spends about as much time on that as on arithmetic.
"""

import ctypes
import importlib.util
import os
import sys

# Parameters of mallopt. Source: glibc's malloc.h; see mallopt(3).
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1
# A model with more parameters computes longer on a byte, and what lies unused
# between its arrays weighs more: 121M took 1.75 times the memory.
_LARGEST = 2**25


def share_arena() -> None:
  """Lets all threads allocate from one arena, the only one for large blocks.

  Call it before JAX starts its backend: the threads choose their arenas then.
  It does nothing where an accelerator may be the backend.
  """
  platforms = os.environ.get('JAX_PLATFORMS')
  # JAX finds accelerators by these modules.
  plugins = ('jax_plugins', 'libtpu')
  if platforms == 'cpu' or not (
    platforms or any(map(importlib.util.find_spec, plugins))
  ):
    _set(_ARENA_MAX, 1)


def keep_freed(parameters: int = 0) -> None:
  """Keeps freed memory in this process, for its next allocations.

  Call it in a process that shares an arena; it does nothing for large models.

  Args:
    parameters: number of parameters of the model that is trained.
  """
  if parameters <= _LARGEST:
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, 2**31 - 1)


def _set(parameter: int, value: int) -> None:
  if sys.platform == 'linux':
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
      mallopt(parameter, value)
