"""Host memory of a process whose backend is the CPU.

XLA:CPU allocates the buffers of a step anew at each call, and glibc returns
large ones to the system when they are freed: every step then waits for the
kernel to map, and fill with zeros, the pages that it has just given back. A
small model's step spends more time on that than on arithmetic.
"""

import ctypes
import importlib.util
import os
import sys

# Parameters of mallopt and their values. Source: glibc's malloc.h; mallopt(3).
_PARAMETERS = (
  (-8, 1),  # M_ARENA_MAX: other arenas than the first cannot hold large blocks.
  (-4, 0),  # M_MMAP_MAX: no mapping of its own for a large block.
  (-1, 2**31 - 1),  # M_TRIM_THRESHOLD: bytes that are kept when freed.
)


def keep_freed() -> None:
  """Keeps freed memory in this process, for its next allocations.

  Call it before JAX starts its backend, whose threads choose their arenas
  then. It does nothing where an accelerator may be the backend, or where the C
  library is not glibc.
  """
  platforms = os.environ.get('JAX_PLATFORMS')
  # JAX finds accelerators by these modules.
  plugins = ('jax_plugins', 'libtpu')
  if platforms:
    on_cpu = platforms == 'cpu'
  else:
    on_cpu = not any(map(importlib.util.find_spec, plugins))
  if on_cpu and sys.platform == 'linux':
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:  # musl has none.
      for parameter, value in _PARAMETERS:
        mallopt(parameter, value)
