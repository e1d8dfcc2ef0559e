"""Local copies of record sets in buckets.

ArrayRecord reads local files only. Shards are cached below $XDG_CACHE_HOME (by
default ~/.cache), once per machine, shared by all its processes. Existing
shards that match the manifest are kept, so an interrupted copy resumes. A
copied shard is verified before it is renamed to its final name.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Mapping
from concurrent import futures
import fcntl
import hashlib
import itertools
import os
import pathlib
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import disk, paths

# Shards hashed or copied concurrently.
_THREADS = 8


def local_folder(folder: paths.Path) -> pathlib.Path:
  """Returns the folder itself if local, or the cache folder for a bucket."""
  if not paths.is_bucket(folder):
    return folder
  # Names are ambiguous: every data folder has `train` and `eval`.
  digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
  name = f'{folder.parent.name}-{folder.name}-{digest}'
  return paths.user_cache('records') / name


def fetch(
  folder: paths.Path, shards: Mapping[str, Mapping[str, Any]]
) -> pathlib.Path:
  """Verifies a local record set or copies missing shards from its bucket.

  Args:
    folder: folder of the record set.
    shards: manifest entries of all shards, by name below the folder.

  Returns:
    `local_folder(folder)`.

  Raises:
    UserError: the disk is full, or a shard is missing or differs from the
      manifest.
  """
  target = local_folder(folder)
  if target == folder:
    for name, entry in shards.items():
      if problem := damage(folder / name, entry):
        raise errors.UserError(
          f'record shard {folder / name} {problem}; materialise again: finished'
          ' shards are kept'
        )
    return target
  disk.require_writable(target)
  with (
    open(target.with_name(f'{target.name}.lock'), 'ab') as lock,
    futures.ThreadPoolExecutor(_THREADS) as pool,
  ):
    # The kernel releases the lock however a process ends. Without it, a shard
    # being copied by another process would look missing and be copied twice.
    fcntl.flock(lock, fcntl.LOCK_EX)
    damaged = pool.map(lambda name: damage(target / name, shards[name]), shards)
    missing = [*itertools.compress(shards, damaged)]
    nbytes = sum(shards[name]['bytes'] for name in missing)
    if missing:
      disk.require_space(target, nbytes, label='the records')
      print(
        f'records: copying {len(missing)} of {len(shards)} shards,'
        f' {disk.format_bytes(nbytes)}, from {folder} to {target}',
        flush=True,
      )
    # `list` raises the errors of the copies; `map` alone discards them.
    list(pool.map(lambda n: _copy(folder, target, n, shards[n]), missing))
  return target


def damage(path: paths.Path, entry: Mapping[str, Any]) -> str:
  """Describes how a shard differs from its manifest entry; '' if equal.

  For objects, only the size is compared: the upload verified the checksum.
  """
  try:
    size = paths.size(path)
    if size != entry['bytes']:
      return f'has {size} bytes instead of {entry["bytes"]}'
    same = paths.is_bucket(path) or file_hash(path) == entry['sha256']
    return '' if same else 'has another SHA-256 than the manifest'
  except FileNotFoundError:
    return 'is missing'


def file_hash(path: str | os.PathLike) -> str:
  """Returns the SHA-256 hex digest of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _copy(
  folder: paths.Path, target: pathlib.Path, name: str, entry: Mapping[str, Any]
) -> None:
  path = target / name
  path.parent.mkdir(parents=True, exist_ok=True)
  # A killed copy leaves this file, which nothing reads.
  draft = path.with_name(f'{path.name}.part')
  counts = pathlib.PurePosixPath(name).with_suffix('.json')
  try:
    paths.copy(folder / name, draft)
    paths.copy(folder / str(counts), target / counts)
  except OSError as error:
    raise errors.UserError(
      f'record shard {folder / name} cannot be copied to {target} ({error});'
      ' if it is missing, materialise the records again.'
    ) from error
  # The bucket's checksum covers the uploaded object, not the original file.
  if problem := damage(draft, entry):
    raise errors.UserError(
      f'record shard {folder / name} {problem}; remove {folder}/manifest.json'
      ' and materialise the records again.'
    )
  paths.sync(draft)
  os.replace(draft, path)
