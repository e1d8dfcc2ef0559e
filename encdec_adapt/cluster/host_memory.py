"""Host memory of a process with the CPU backend.

XLA:CPU allocates the buffers of a step at each call, and glibc returns large
freed buffers to the system: every step then waits for the kernel to map and
zero the same pages again. A small model's step spends about as much time on
this as on arithmetic.
"""

import ctypes
import importlib.util
import os
import sys

# Parameters of mallopt. Source: glibc's malloc.h; see mallopt(3).
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1
# Larger models compute longer per byte, and fragmentation costs more: 121M
# parameters took 1.75 times the memory.
_LARGEST = 2**25


def share_arena() -> None:
  """Makes all threads allocate from one arena, the only arena for large blocks.

  Call before JAX starts its backend, when threads choose their arenas. Does
  nothing if an accelerator may be the backend.
  """
  platforms = os.environ.get('JAX_PLATFORMS')
  # JAX discovers accelerators through these modules.
  plugins = ('jax_plugins', 'libtpu')
  if platforms == 'cpu' or not (
    platforms or any(map(importlib.util.find_spec, plugins))
  ):
    _set(_ARENA_MAX, 1)


def keep_freed(parameters: int = 0) -> None:
  """Keeps freed memory in this process for later allocations.

  Call after `share_arena`. Does nothing for large models.

  Args:
    parameters: number of parameters of the trained model.
  """
  if parameters <= _LARGEST:
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, 2**31 - 1)


def _set(parameter: int, value: int) -> None:
  if sys.platform == 'linux':
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
      mallopt(parameter, value)
