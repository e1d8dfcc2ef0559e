"""What a run depends on outside of its config: versions, hardware, source."""

from collections.abc import Iterator, Mapping
import functools
import hashlib
from importlib import metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from encdec_adapt.files import disk, paths

# Grain's index shuffle is the order of the rows.
_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'grain',
  'orbax-checkpoint',
  'numpy',
)
# Change compiled programs or random numbers.
_JAX_OPTIONS = (
  'jax_default_matmul_precision',
  'jax_default_prng_impl',
  'jax_enable_x64',
  'jax_numpy_dtype_promotion',
  'jax_threefry_partitionable',
)
# Our own, where it is installed; and the TPU's compiler.
_ALSO = ('encdec_adapt', 'libtpu')
# Part of `report` that bit-equal continuation does not depend on; that on
# libtpu is told by `platform_version`.
_NOT_IN_FINGERPRINT = (
  *('python', 'orbax-checkpoint', 'numpy', 'git', 'host'),
  *_ALSO,
)
_GIT_SECONDS = 10


def report() -> dict[str, Any]:
  """Everything that could explain why two runs differ; JSON can hold it."""
  return {
    **versions(),
    **_kind(),
    'devices': len(jax.devices()),
    'processes': jax.process_count(),
    'cores': _cores(),
    'cpu': _cpu(),
    **options(),
    'host': host(),
    'git': git_revision(),
  }


def versions() -> dict[str, str | None]:
  """Versions of Python and of packages; None for what is not installed."""
  return {
    'python': platform.python_version(),
    **{package: _version(package) for package in (*_PACKAGES, *_ALSO)},
  }


def options() -> dict[str, Any]:
  """What the compiler and jax were told; no device is asked."""
  return {
    'xla_flags': ' '.join(sorted(os.environ.get('XLA_FLAGS', '').split())),
    **{option: getattr(jax.config, option) for option in _JAX_OPTIONS},
  }


def devices() -> dict[str, Any]:
  """What this process computes on: kind and number of its own devices."""
  return {**_kind(), 'local_devices': jax.local_device_count()}


def _kind() -> dict[str, str]:
  device = jax.local_devices()[0]
  return {
    'platform': device.platform,
    'platform_version': device.client.platform_version,
    'device_kind': device.device_kind,
  }


def host() -> str:
  """Name of this machine."""
  return platform.node()


@functools.cache
def source_digest() -> str:
  """Hash of the package's modules: two copies of one version may differ."""
  folder = pathlib.Path(__file__).resolve().parent.parent
  digest = hashlib.blake2b(digest_size=8)
  for path in sorted(folder.rglob('*.py')):
    digest.update(path.relative_to(folder).as_posix().encode())
    digest.update(path.read_bytes())
  return digest.hexdigest()


def flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Leaves of a nested mapping by dotted key, as JSON has them."""
  for key, value in json.loads(json.dumps(tree)).items():
    if isinstance(value, dict):
      for below, leaf in flat(value):
        yield f'{key}.{below}', leaf
    else:
      yield key, value


def fingerprint() -> dict[str, Any]:
  """The part of `report` on which bit-equal continuation depends.

  The mesh and the config are the caller's to add.
  """
  return {
    key: value
    for key, value in report().items()
    if key not in _NOT_IN_FINGERPRINT
  }


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Names what differs between two fingerprints, one line per key."""
  missing = object()
  lines = []
  for key in sorted(before.keys() | now.keys()):
    old, new = before.get(key, missing), now.get(key, missing)
    if old != new:
      old_text, new_text = (
        'not recorded' if value is missing else repr(value)
        for value in (old, new)
      )
      lines.append(f'{key}: {old_text} before, {new_text} now')
  return lines


def git_revision() -> dict[str, Any] | None:
  """Commit of the checkout that this code runs from, and local changes.

  Returns:
    `{'revision': hash, 'dirty': bool}`; None where this file is not tracked
    in a git checkout (an installed package), or git is not there.
  """
  here = pathlib.Path(__file__).resolve()
  # An installed copy inside somebody's checkout is not that checkout's.
  if _git(here.parent, 'ls-files', '--error-unmatch', here.name) is None:
    return None
  revision = _git(here.parent, 'rev-parse', 'HEAD')
  status = _git(here.parent, 'status', '--porcelain')
  if revision is None or status is None:
    return None
  return {'revision': revision, 'dirty': bool(status)}


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
  try:
    done = subprocess.run(
      ['git', '-C', str(folder), *arguments],
      capture_output=True,
      text=True,
      timeout=_GIT_SECONDS,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()


def _version(package: str) -> str | None:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return None


def _cores() -> int | None:
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _cpu() -> str:
  """Model of the host's processor with a digest of its features.

  XLA compiles for the features, so hosts that differ in them may differ in
  rounding.
  """
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text(encoding='utf-8')
  except OSError:
    return platform.processor()
  fields = dict(
    [part.strip() for part in line.split(':', 1)]
    for line in text.split('\n\n')[0].splitlines()
    if ':' in line
  )
  model = fields.get('model name', platform.machine())
  features = fields.get('flags', fields.get('Features', ''))
  digest = hashlib.blake2b(features.encode(), digest_size=4).hexdigest()
  return f'{model} ({digest})'


def memory_high_water() -> dict[str, int]:
  """Most bytes in use at once on a device of this process, since its start.

  Returns:
    `memory_peak_bytes`; nothing where the platform does not tell (the CPU).
  """
  found = [device.memory_stats() for device in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in found if s]
  return {'memory_peak_bytes': max(peaks)} if peaks else {}


def enable_compile_cache(folder: str | os.PathLike[str]) -> None:
  """Keeps compiled programs in a folder; call before the first `jit`.

  XLA compiles for the processor it runs on, and a folder may be shared by
  machines or outlive one, so each kind of machine has a subfolder.

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
