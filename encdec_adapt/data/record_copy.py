"""Records of a bucket on this machine: a copy to read, a place to write.

ArrayRecord reads files. A copy is made below $XDG_CACHE_HOME (by default
~/.cache), once per machine whatever the number of its processes, shard by
shard: what is there already and is what the manifest says is kept, so that a
copy that broke off goes on, and what arrives is compared with the manifest's
checksum before it has its name.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Mapping
from concurrent import futures
import contextlib
import fcntl
import hashlib
import os
import pathlib
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import disk, paths

_AT_ONCE = 8  # Shards.


def place(folder: paths.Path) -> pathlib.Path:
  """Where the files of a record set lie on this machine.

  Args:
    folder: of the record set; where it is on a file system, that is it.
  """
  if not paths.is_bucket(folder):
    return folder
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  address = str(folder)
  digest = hashlib.sha256(address.encode()).hexdigest()[:16]
  name = f'{folder.parent.name}-{folder.name}-{digest}'
  return pathlib.Path(cache).expanduser() / 'encdec_adapt' / 'records' / name


def fetch(
  folder: paths.Path, shards: Mapping[str, Mapping[str, Any]]
) -> pathlib.Path:
  """Copies shards to this machine, those that are not there yet.

  Args:
    folder: of the record set, in a bucket.
    shards: name below the folder -> `bytes` and `sha256`, of all of them.

  Returns:
    `place(folder)`.

  Raises:
    UserError: there is no room, or a shard is missing in the bucket or not
      what the manifest says.
  """
  target = place(folder)
  for name in shards:
    if pathlib.PurePosixPath(name).is_absolute() or '..' in name:
      raise errors.UserError(
        f'the manifest of {folder} names a file {name!r} outside; it is'
        ' damaged: materialise the records again.'
      )
  disk.require_writable(target)
  with _alone(target):
    with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      whole = pool.map(lambda n: is_whole(target / n, shards[n]), shards)
      missing = [n for n, there in zip(shards, whole, strict=True) if not there]
      nbytes = sum(shards[name]['bytes'] for name in missing)
      if missing:
        disk.require_space(target, nbytes, what='the records')
        print(
          f'records: copying {len(missing)} of {len(shards)} shards,'
          f' {disk.format_bytes(nbytes)}, from {folder} to {target}',
          flush=True,
        )
      list(pool.map(lambda n: _copy(folder, target, n, shards[n]), missing))
  return target


def is_whole(path: paths.Path, entry: Mapping[str, Any]) -> bool:
  """Whether a shard is what the manifest says.

  Args:
    path: of the shard, on a file system.
    entry: its `bytes` and `sha256`.
  """
  try:
    if path.stat().st_size != entry['bytes']:
      return False
    return file_hash(path) == entry['sha256']
  except FileNotFoundError:
    return False


def file_hash(path: str | os.PathLike) -> str:
  """SHA-256 of a file, hexadecimal."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def _copy(
  folder: paths.Path,
  target: pathlib.Path,
  name: str,
  entry: Mapping[str, Any],
) -> None:
  """Copies one shard and what vouches for it."""
  path = target / name
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_name(f'{path.name}.part')
  try:
    paths.copy(folder / name, draft)
    note = pathlib.PurePosixPath(name).with_suffix('.json')
    paths.copy(folder / str(note), target / note)
  except OSError as error:
    raise errors.UserError(
      f'record shard {folder / name} cannot be copied to {target} ({error});'
      ' where it is missing, materialise the records again.'
    ) from error
  if not is_whole(draft, entry):
    raise errors.UserError(
      f'record shard {folder / name} is not what the manifest says; remove the'
      ' manifest and materialise again.'
    )
  paths.sync(draft)
  os.replace(draft, path)


@contextlib.contextmanager
def _alone(target: pathlib.Path):
  """Holds the copy for this process; others of the machine wait."""
  with open(target.with_name(f'{target.name}.lock'), 'ab') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f'records: another process copies into {target}', flush=True)
      fcntl.flock(file, fcntl.LOCK_EX)
    yield
