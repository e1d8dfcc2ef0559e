"""Compiled programs kept on disk, so that the next process need not compile.

Jax keeps the cache; this says where, and that programs of another kind of
machine are not taken: XLA compiles for the very processor, and a folder may
be shared by machines or outlive one.
"""

import hashlib
import json
import os

import jax

from encdec_adapt.files import disk, paths
from encdec_adapt.telemetry import environment

# Shorter compilations are not worth a file.
_SECONDS = 0.5


def enable(folder: str | os.PathLike[str]) -> None:
  """Keeps compiled programs below a folder. Call before the first `jit`.

  Args:
    folder: of the cache; made if need be. May be shared by processes.

  Raises:
    UserError: the folder cannot be written.
  """
  machine = json.dumps(environment.fingerprint(), sort_keys=True).encode()
  digest = hashlib.blake2b(machine, digest_size=8).hexdigest()
  path = disk.require_writable(paths.join(folder, digest))
  jax.config.update('jax_compilation_cache_dir', str(paths.absolute(path)))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _SECONDS)
