"""Checksum manifests: size and checksum of every file of a folder.

The manifest is a file inside the folder. A folder with a manifest is complete
and on disk, and a flipped byte, a truncation, a missing file and damage to the
manifest itself are all found later. Files that were added later are ignored.
A file that exists but cannot be read is not damage, since nothing is known of
its contents: that is an error.

On a file system, files are hashed as they are read back. In a bucket, where
reading a checkpoint back would take as long as saving it, the manifest has the
CRC32C that the store computed of every object it received and verifies when it
sends it; one listing returns them all. A folder that was copied from one to the
other is verified by the checksums that its manifest has.
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

FILE = 'checksums.json'
_BLAKE, _CRC = 'blake2b-256', 'crc32c'
_THREADS = 4  # Hashing releases the interpreter's lock.

# A file that does not exist, or is a folder now.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Entry = dict[str, int | str]


def has_manifest(folder: paths_lib.Path) -> bool:
  """Returns whether the folder has a manifest, damaged or not."""
  return (folder / FILE).exists()


def write(folder: paths_lib.Path) -> None:
  """Syncs every file of the folder and writes the manifest of their checksums.

  The manifest appears at once, after everything that it lists is on disk.

  Raises:
    OSError: a file could not be read, or the manifest not be written.
  """
  if paths_lib.is_bucket(folder):
    found = paths_lib.objects(folder)
    digest, entries = _CRC, {path: found[path] for path in _to_list(found)}
  else:
    paths = _to_list(paths_lib.tree(folder))
    read = lambda path: _entry(folder / path, _BLAKE, sync=True)  # noqa: E731
    digest, entries = _BLAKE, _map(read, paths)
    parents = {p for path in paths for p in pathlib.PurePosixPath(path).parents}
    for directory in {folder, *(folder / path for path in parents)}:
      paths_lib.sync(directory)
  body = {'digest': digest, 'files': entries}
  document = {'body': body, 'own_digest': _own_digest(body)}
  paths_lib.write(folder / FILE, json.dumps(document, indent=1).encode())
  paths_lib.sync(folder)


def problems(folder: paths_lib.Path) -> list[str]:
  """Compares a folder with its manifest.

  Returns:
    One line for every file that differs; empty if the folder is unchanged.

  Raises:
    UserError: a file exists but cannot be read.
  """
  try:
    document = json.loads(_read(folder / FILE, lambda f: f.read_bytes()))
    body = document['body']
    intact = document['own_digest'] == _own_digest(body)
  except (*_ABSENT, ValueError, KeyError, TypeError) as error:
    return [f'{FILE} cannot be read ({error})']
  if not intact:
    return [f'{FILE} is damaged']
  wanted, digest = body['files'], body['digest']

  def find(path: str) -> _Entry | None:
    """Returns the entry of a file, None if there is none."""
    try:
      return _read(folder / path, lambda p: _entry(p, digest, sync=False))
    except _ABSENT:
      return None

  if paths_lib.is_bucket(folder) and digest == _CRC:
    found = _read(folder, paths_lib.objects)
  else:
    found = _map(find, wanted)
  compared = {p: _compare(found.get(p), wanted[p]) for p in sorted(wanted)}
  return [f'{path} {problem}' for path, problem in compared.items() if problem]


def _compare(found: _Entry | None, wanted: _Entry) -> str | None:
  """Returns how an entry differs from the manifest's; None if equal."""
  if found is None:
    return 'is missing'
  if found['bytes'] != wanted['bytes']:
    return f'has {found["bytes"]} bytes instead of {wanted["bytes"]}'
  return None if found == wanted else 'has other contents than were written'


def _read(path: paths_lib.Path, read: Callable[[paths_lib.Path], Any]) -> Any:
  """Returns `read(path)`.

  Raises:
    UserError: the path exists and cannot be read.
    OSError: one of `_ABSENT`: it does not exist.
  """
  try:
    return read(path)
  except _ABSENT:
    raise
  except OSError as error:
    raise errors.UserError(
      f'{path} cannot be read ({error.strerror or error}), so whether it is'
      ' damaged is unknown; nothing was changed. Check its disk, mount and'
      ' permissions and give the same command again, or move the checkpoint'
      ' out of its folder.'
    ) from error


def _to_list(paths: Iterable[str]) -> list[str]:
  """Filters out the manifest and temporary files of interrupted writes."""
  return [path for path in paths if not path.startswith(FILE)]


def _map(function: Callable, paths: Iterable[str]) -> dict[str, Any]:
  paths = list(paths)
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(paths, pool.map(function, paths), strict=True))


def _entry(path: paths_lib.Path, digest: str, *, sync: bool) -> _Entry:
  """Reads a file for its size and checksum."""
  if digest == _CRC:
    size = paths_lib.size(path)
    return {'bytes': size, 'digest': paths_lib.file_crc32c(path)}
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
