"""Environment of a run: versions, hardware, options, source.

This module must not import models or data.
"""

from collections.abc import Mapping
import functools
import hashlib
from importlib import metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from typing import Any

from flax import traverse_util
import jax

from encdec_adapt.files import disk, paths

# Packages that may change a result with their version; grain's index shuffle is
# the order of the rows, and `platform_version` has the version of libtpu.
_EXACT = ('jax', 'jaxlib', 'flax', 'optax', 'grain')
_PACKAGES = (*_EXACT, 'libtpu', 'tokamax', 'orbax-checkpoint', 'numpy')
_PACKAGES += ('encdec_adapt',)
# Change compiled programs or random numbers.
_JAX_OPTIONS = (
  'jax_default_matmul_precision',
  'jax_default_prng_impl',
  'jax_enable_x64',
  'jax_numpy_dtype_promotion',
  'jax_threefry_partitionable',
)


def report() -> dict[str, Any]:
  """Returns all that could explain why two runs differ, JSON serialisable."""
  return {
    **versions(),
    **fingerprint(),
    'host': platform.node(),
    'git': git_revision(),
  }


def fingerprint() -> dict[str, Any]:
  """Returns the entries of `report` on which a bit-equal resume depends.

  The caller adds mesh and config.
  """
  return {
    **{package: _version(package) for package in _EXACT},
    **_kind(),
    # Numbers of devices and cores decide how sums are divided, so that rounding
    # may differ.
    'devices': len(jax.devices()),
    'processes': jax.process_count(),
    'cores': _cores(),
    'cpu': _cpu(),
    **options(),
  }


def versions() -> dict[str, str | None]:
  """Returns versions of Python and packages; None where not installed."""
  return {
    'python': platform.python_version(),
    **{package: _version(package) for package in _PACKAGES},
  }


def options() -> dict[str, Any]:
  """Returns options of the compiler and jax without using a device."""
  return {
    # Sorted, since the order of different flags has no effect.
    'xla_flags': ' '.join(sorted(os.environ.get('XLA_FLAGS', '').split())),
    **{option: getattr(jax.config, option) for option in _JAX_OPTIONS},
  }


def devices() -> dict[str, Any]:
  """Returns kind and number of this process's local devices."""
  return {**_kind(), 'local_devices': jax.local_device_count()}


def _kind() -> dict[str, str]:
  device = jax.local_devices()[0]
  return {
    'platform': device.platform,
    'platform_version': device.client.platform_version,
    'device_kind': device.device_kind,
  }


def cpu_multiplies_bfloat16() -> bool:
  """Whether this processor is known to multiply in bfloat16."""
  flags = _cpu_fields().get('flags', '').split()
  return 'avx512_bf16' in flags or 'amx_bf16' in flags


@functools.cache
def source_digest() -> str:
  """Returns a hash of the package's modules."""
  folder = pathlib.Path(__file__).resolve().parent.parent
  digest = hashlib.blake2b(digest_size=8)
  for path in sorted(folder.rglob('*.py')):
    # Names too: a module that was moved is another program.
    digest.update(path.relative_to(folder).as_posix().encode())
    digest.update(path.read_bytes())
  return digest.hexdigest()


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the leaves of a nested mapping by dotted key, as JSON values."""
  # Through JSON, so that tuples equal the lists that a saved tree has.
  return traverse_util.flatten_dict(json.loads(json.dumps(tree)), sep='.')


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Returns a line for every key in which two fingerprints differ."""
  # A version that records another key must not hide the change.
  absent = 'not recorded'
  keys = sorted(saved.keys() | now.keys())
  pairs = ((key, saved.get(key, absent), now.get(key, absent)) for key in keys)
  return [f'{k}: {a!r} before, {b!r} now' for k, a, b in pairs if a != b]


def git_revision() -> str | None:
  """Describes the checkout that this code runs from.

  Returns:
    Hash of the commit, with `-dirty` if there are local changes. Where git is
    missing or does not track this file (an installed package), the hash in
    $ENCDEC_ADAPT_GIT, which container images set, or None.
  """
  module = pathlib.Path(__file__).resolve()

  def git(*arguments: str) -> str:
    command = ['git', '-C', str(module.parent), *arguments]
    return subprocess.run(
      command, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()

  try:
    # An installed copy may be inside an unrelated checkout.
    git('ls-files', '--error-unmatch', module.name)
    return git('describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
  except (OSError, subprocess.SubprocessError):
    return os.environ.get('ENCDEC_ADAPT_GIT') or None


def _version(package: str) -> str | None:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


def _cores() -> int | None:
  # Only the cores that this process may use, as XLA counts them too.
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _cpu() -> str:
  """Returns the processor's model and a digest of its features.

  XLA compiles for the features, so hosts that differ in them may round
  differently.
  """
  fields = _cpu_fields()
  if not fields:
    return platform.processor()
  model = fields.get('model name', platform.machine())
  # ARM calls them Features, and states no model.
  features = fields.get('flags', fields.get('Features', ''))
  digest = hashlib.blake2b(features.encode(), digest_size=4).hexdigest()
  return f'{model} ({digest})'


def _cpu_fields() -> dict[str, str]:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8')
  except OSError:
    return {}
  # The first paragraph is the first core; the others are alike.
  return dict(
    [part.strip() for part in line.split(':', 1)]
    for line in text.split('\n\n')[0].splitlines()
    if ':' in line
  )


def memory_high_water() -> dict[str, int]:
  """Returns the peak memory use of any device of this process.

  Returns:
    `memory_peak_bytes`; of CPU devices the memory of the process, which they
    share.
  """
  stats = [device.memory_stats() for device in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if s]
  if not peaks:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In KiB, but in bytes on macOS.
    peaks = [peak if sys.platform == 'darwin' else 1024 * peak]
  return {'memory_peak_bytes': max(peaks)}


def memory_limit_and_use() -> tuple[int | None, int]:
  """Returns bytes that JAX may use of a device of this process, and does use.

  The smallest limit and the largest use over its devices; the limit is None if
  a device, such as a CPU, reports none.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  limits = [s.get('bytes_limit') for s in stats]
  used = max(s.get('bytes_in_use', 0) for s in stats)
  return (min(limits) if all(limits) else None), used


def memory_free() -> int | None:
  """Returns the bytes that are free on each device of this process.

  For CPU devices these are the available memory by Linux, divided by their
  number. None where neither is known.
  """
  stats = [device.memory_stats() for device in jax.local_devices()]
  if all(stats):
    return min(s['bytes_limit'] - s['bytes_in_use'] for s in stats)
  try:
    text = pathlib.Path('/proc/meminfo').read_text(encoding='utf-8')
  except OSError:
    return None
  # CPU devices share the host's memory.
  kibibytes = int(text.split('MemAvailable:')[1].split()[0])
  return 1024 * kibibytes // len(stats)


def foreign_processor_seconds() -> float | None:
  """Returns the processor time of all other processes since the system started.

  In seconds over all processors; None where Linux does not say.
  """
  try:
    text = pathlib.Path('/proc/stat').read_text(encoding='utf-8')
  except OSError:
    return None
  # user nice system idle iowait irq softirq steal, in ticks.
  ticks = list(map(int, text.split('\n', 1)[0].split()[1:9]))
  busy = sum(ticks) - sum(ticks[3:5])
  return busy / os.sysconf('SC_CLK_TCK') - time.process_time()


def enable_compile_cache(folder: str | os.PathLike[str]) -> None:
  """Keeps compiled programs in a folder; call before the first `jit`.

  XLA compiles for the processor it runs on, and a folder may be shared by
  machines or outlive them, so each kind of machine has a subfolder.

  Args:
    folder: local folder or bucket address; made if need be. Processes may
      share it.

  Raises:
    UserError: the folder cannot be written.
  """
  machine = json.dumps(fingerprint(), sort_keys=True).encode()
  digest = hashlib.blake2b(machine, digest_size=8).hexdigest()
  path = disk.require_writable(paths.join(folder, digest))
  jax.config.update('jax_compilation_cache_dir', str(paths.absolute(path)))
  # Shorter compilations are not worth a file.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
