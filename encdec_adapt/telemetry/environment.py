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

# Packages with versions that may affect results; grain's index shuffle sets the
# row order, and `platform_version` includes the version of libtpu.
_EXACT = ('jax', 'jaxlib', 'flax', 'optax', 'grain')
_PACKAGES = (*_EXACT, 'libtpu', 'tokamax', 'orbax-checkpoint', 'numpy')
_PACKAGES += ('encdec_adapt',)
# Options that affect compiled programs or random numbers.
_JAX_OPTIONS = (
  'jax_default_matmul_precision',
  'jax_default_prng_impl',
  'jax_enable_x64',
  'jax_numpy_dtype_promotion',
  'jax_threefry_partitionable',
)


def report() -> dict[str, Any]:
  """Returns possible causes of differences between runs, JSON serializable."""
  return {
    **versions(),
    **fingerprint(),
    'host': platform.node(),
    'git': git_revision(),
  }


def fingerprint() -> dict[str, Any]:
  """Returns the entries of `report` required for a bit-equal resume.

  The caller adds mesh and config.
  """
  return {
    **{package: _version(package) for package in _EXACT},
    **_kind(),
    # The numbers of devices and cores affect how sums are split, and so
    # rounding.
    'devices': len(jax.devices()),
    'processes': jax.process_count(),
    'cores': _cores(),
    'cpu': _cpu(),
    **options(),
  }


def versions() -> dict[str, str | None]:
  """Returns versions of Python and packages; None if not installed."""
  return {
    'python': platform.python_version(),
    **{package: _version(package) for package in _PACKAGES},
  }


def options() -> dict[str, Any]:
  """Returns options of the compiler and jax, without using a device."""
  return {
    # Sorted, as the order of flags has no effect.
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
  """Returns whether this CPU is known to multiply in bfloat16."""
  flags = _cpu_fields().get('flags', '').split()
  return 'avx512_bf16' in flags or 'amx_bf16' in flags


@functools.cache
def source_digest() -> str:
  """Returns a hash of the package's modules."""
  folder = pathlib.Path(__file__).resolve().parent.parent
  digest = hashlib.blake2b(digest_size=8)
  for path in sorted(folder.rglob('*.py')):
    # Hash names too: a moved module is a different program.
    digest.update(path.relative_to(folder).as_posix().encode())
    digest.update(path.read_bytes())
  return digest.hexdigest()


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the leaves of a nested mapping by dotted key, as JSON values."""
  # Through JSON, so that tuples equal the lists of a saved tree.
  return traverse_util.flatten_dict(json.loads(json.dumps(tree)), sep='.')


def difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Returns a line for every different key of two fingerprints."""
  # Compare the union of keys, as another version may record other keys.
  absent = 'not recorded'
  keys = sorted(saved.keys() | now.keys())
  pairs = ((key, saved.get(key, absent), now.get(key, absent)) for key in keys)
  return [f'{k}: {a!r} before, {b!r} now' for k, a, b in pairs if a != b]


def git_revision() -> str | None:
  """Returns the git commit of this code.

  Returns:
    Hash of the commit, with `-dirty` for local changes. If git is missing or
    does not track this file (an installed package), the hash in
    $ENCDEC_ADAPT_GIT (set in container images), or None.
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
  # Only the cores available to this process, as counted by XLA.
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _cpu() -> str:
  """Returns the CPU's model and a digest of its features.

  XLA compiles for the features, so hosts with other features may round
  differently.
  """
  fields = _cpu_fields()
  if not fields:
    return platform.processor()
  model = fields.get('model name', platform.machine())
  # ARM has 'Features' and no model name.
  features = fields.get('flags', fields.get('Features', ''))
  digest = hashlib.blake2b(features.encode(), digest_size=4).hexdigest()
  return f'{model} ({digest})'


def _cpu_fields() -> dict[str, str]:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8')
  except OSError:
    return {}
  # The first paragraph is the first core; the others are similar.
  return dict(
    [part.strip() for part in line.split(':', 1)]
    for line in text.split('\n\n')[0].splitlines()
    if ':' in line
  )


def memory_high_water() -> dict[str, int]:
  """Returns the peak memory use of any device of this process.

  Returns:
    `memory_peak_bytes`; for CPU devices, the peak of the process.
  """
  stats = [device.memory_stats() for device in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if s]
  if not peaks:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # KiB, but bytes on macOS.
    peaks = [peak if sys.platform == 'darwin' else 1024 * peak]
  return {'memory_peak_bytes': max(peaks)}


def memory_limit_and_use() -> tuple[int | None, int]:
  """Returns memory limit and use in bytes of this process's devices.

  The minimum limit and the maximum use over local devices; the limit is None if
  a device, such as a CPU, reports none.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  limits = [s.get('bytes_limit') for s in stats]
  used = max(s.get('bytes_in_use', 0) for s in stats)
  return (min(limits) if all(limits) else None), used


def memory_free() -> int | None:
  """Returns the free bytes of each device of this process.

  For CPU devices, the available memory of Linux divided by their number. None
  if unknown.
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
  """Returns the CPU time of all other processes since boot.

  In seconds over all CPUs; None without Linux's statistics.
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
  """Enables a persistent compilation cache; call before the first `jit`.

  XLA compiles for the host CPU, and machines may share a folder, so each kind
  of machine has a subfolder.

  Args:
    folder: local folder or bucket address; created if missing. Processes may
      share it.

  Raises:
    UserError: the folder cannot be written.
  """
  machine = json.dumps(fingerprint(), sort_keys=True).encode()
  digest = hashlib.blake2b(machine, digest_size=8).hexdigest()
  path = disk.require_writable(paths.join(folder, digest))
  jax.config.update('jax_compilation_cache_dir', str(paths.absolute(path)))
  # Do not cache short compilations.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
