"""Seals: a checksum of every file under a folder, kept inside the folder.

A sealed folder is complete, on disk, and can later be shown to be unchanged:
a flipped byte, a truncation, a missing file, and damage to the seal itself are
all found. Files that came after the seal are not looked at. What a disk or a
mount does not let be read is no damage: nothing is known of it, and that is an
error.

On a file system, files are hashed as they are read back. In a bucket, where
reading back a checkpoint would take as long as saving it, the seal has the
CRC32C that the store computed of every object that it received and checks
what it sends against; one list shows them all. A folder that was copied from
one to the other is checked by what its seal has.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
import hashlib
import json
import os
import pathlib
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import paths as paths_lib

FILE = 'seal.json'
_FORMAT = 1
_BLAKE, _CRC = 'blake2b-256', 'crc32c'
_THREADS = 4  # Hashing releases the interpreter's lock.

# A file that is not there, or something else in its place.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Entries = dict[str, dict[str, int | str]]


def is_sealed(folder: paths_lib.Path) -> bool:
  """Whether the folder has a seal, sound or not."""
  return (folder / FILE).exists()


def write(folder: paths_lib.Path) -> None:
  """Syncs every file of the folder and writes their checksums.

  The seal appears at once, after everything it speaks of is on disk.

  Raises:
    OSError: a file could not be read, or the seal not be written.
  """
  if paths_lib.is_bucket(folder):
    found = paths_lib.objects(folder)
    digest, entries = _CRC, {path: found[path] for path in _sealed(found)}
  else:
    paths = _sealed(paths_lib.tree(folder))
    read = lambda path: _entry(folder / path, _BLAKE, sync=True)  # noqa: E731
    digest, entries = _BLAKE, _map(read, paths)
    for directory in {folder, *(folder / path for path in _folders(paths))}:
      paths_lib.sync(directory)
  body = {'format': _FORMAT, 'digest': digest, 'files': entries}
  document = {'body': body, 'own_digest': _own_digest(body)}
  paths_lib.write(folder / FILE, json.dumps(document, indent=1).encode())
  if not paths_lib.is_bucket(folder):
    paths_lib.sync(folder)


def problems(folder: paths_lib.Path) -> list[str]:
  """Says what is wrong with a sealed folder; empty means unchanged.

  Raises:
    UserError: a file cannot be read, so that it is not known.
  """
  try:
    document = json.loads(_readable(folder / FILE, lambda f: f.read_bytes()))
    body = document['body']
    intact = document['own_digest'] == _own_digest(body)
  except (*_ABSENT, ValueError, KeyError, TypeError) as error:
    return [f'{FILE} cannot be read ({error})']
  if not intact:
    return [f'{FILE} is damaged']
  if body['format'] != _FORMAT:
    return [f'{FILE} has format {body["format"]}, not {_FORMAT}']
  wanted, digest = body['files'], body['digest']
  if paths_lib.is_bucket(folder) and digest == _CRC:
    listed = _readable(folder, paths_lib.objects)
    found = {path: _listed(listed.get(path), wanted[path]) for path in wanted}
  else:
    found = _map(
      lambda path: _problem(folder / path, wanted[path], digest), wanted
    )
  return [f'{path} {found[path]}' for path in sorted(wanted) if found[path]]


def _problem(
  path: paths_lib.Path, wanted: dict[str, int | str], digest: str
) -> str | None:
  """What is wrong with one file, or None."""
  try:
    if wrong := _size_problem(_readable(path, paths_lib.size), wanted):
      return wrong
    entry = _readable(path, lambda p: _entry(p, digest, sync=False))
  except IsADirectoryError:
    return 'is a folder'
  except _ABSENT:
    return 'is missing'
  return _listed(entry, wanted)


def require_readable(folder: paths_lib.Path) -> None:
  """Reads every file of a folder, sealed or not; in a bucket their list.

  Raises:
    UserError: a file cannot be read.
  """
  names = _readable(folder, paths_lib.tree)
  if not paths_lib.is_bucket(folder):
    read = lambda path: _entry(path, _BLAKE, sync=False)  # noqa: E731
    _map(lambda name: _readable(folder / name, read), names)


def _readable(
  path: paths_lib.Path, read: Callable[[paths_lib.Path], Any]
) -> Any:
  """What `read(path)` gives.

  Raises:
    UserError: the path is there and cannot be read.
    OSError: of `_ABSENT`: it is not there.
  """
  try:
    return read(path)
  except _ABSENT:
    raise
  except OSError as error:
    raise errors.UserError(
      f'{path} cannot be read ({error.strerror or error}): whether it is'
      ' damaged is not known, and nothing was changed. See to its disk, mount'
      ' or rights and give the same command again; or move what it belongs to'
      ' out of its folder.'
    ) from error


def _listed(
  found: dict[str, int | str] | None, wanted: dict[str, int | str]
) -> str | None:
  """What is wrong with a file of which size and checksum are known."""
  if found is None:
    return 'is missing'
  if wrong := _size_problem(found['bytes'], wanted):
    return wrong
  return None if found == wanted else 'has other contents than were written'


def _size_problem(size: int, wanted: dict[str, int | str]) -> str | None:
  if size != wanted['bytes']:
    return f'has {size} bytes instead of {wanted["bytes"]}'
  return None


def _sealed(paths: Iterable[str]) -> list[str]:
  """What a seal speaks of: all but itself, and drafts that a kill left."""
  return [path for path in paths if not path.startswith(FILE)]


def _folders(paths: list[str]) -> set[pathlib.PurePosixPath]:
  return {
    parent for path in paths for parent in pathlib.PurePosixPath(path).parents
  }


def _map(function: Callable, paths) -> _Entries:
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(paths, pool.map(function, paths), strict=True))


def _entry(
  path: paths_lib.Path, digest: str, *, sync: bool
) -> dict[str, int | str]:
  """Reads a file for its size and checksum."""
  if digest == _CRC:
    return {
      'bytes': paths_lib.size(path),
      'digest': paths_lib.file_crc32c(path),
    }
  with path.open('rb') as file:
    found = hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=32)
    ).hexdigest()
    if sync:
      os.fsync(file.fileno())
    return {'bytes': file.tell(), 'digest': found}


def _own_digest(body: dict) -> str:
  text = json.dumps(body, sort_keys=True).encode()
  return hashlib.blake2b(text, digest_size=32).hexdigest()
