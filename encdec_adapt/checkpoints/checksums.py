"""Checksum manifests: size and checksum of every file in a folder.

The manifest is a file inside the folder. A folder with a manifest is complete
and on disk; flipped bytes, truncations, missing files and damage to the
manifest itself are detected later. Files added later are ignored. An existing
file that cannot be read is an error, not damage, because its contents are
unknown.

On a file system, files are read back and hashed. In a bucket, where reading a
checkpoint back would take as long as saving it, the manifest holds the store's
CRC32C of every object, computed on upload and verified on download; a single
listing returns them all. A folder copied between the two is verified with the
checksums in its manifest.
"""

from collections.abc import Callable, Iterable
from concurrent import futures
import hashlib
import json
import os
import pathlib
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import paths as paths_lib

FILE = 'checksums.json'
_BLAKE, _CRC = 'blake2b-256', 'crc32c'
_THREADS = 4  # Hashing releases the GIL.

# Raised for a missing file, or a folder in its place: damage. Any other OSError
# may be transient (a mount, permissions) and must not mark a step as damaged.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Entry = dict[str, int | str]


def has_manifest(folder: paths_lib.Path) -> bool:
  """Returns whether the folder has a manifest, damaged or not."""
  return (folder / FILE).exists()


def write(folder: paths_lib.Path) -> None:
  """Syncs every file in the folder and writes their checksum manifest.

  The manifest is written atomically, after all its files are on disk.

  Raises:
    OSError: a file cannot be read, or the manifest cannot be written.
  """
  if paths_lib.is_bucket(folder):
    objects = paths_lib.objects(folder)
    digest, entries = _CRC, {path: objects[path] for path in _to_list(objects)}
  else:
    paths = _to_list(paths_lib.tree(folder))
    digest = _BLAKE
    entries = _map(lambda p: _entry(folder / p, digest, sync=True), paths)
    # A file is on disk only once its directory entry is.
    parents = {p for path in paths for p in pathlib.PurePosixPath(path).parents}
    for directory in {folder, *(folder / path for path in parents)}:
      paths_lib.sync(directory)
  body = {'digest': digest, 'files': entries}
  # The digest of the body distinguishes a damaged manifest from damaged files.
  document = {'body': body, 'own_digest': _digest_of(body)}
  paths_lib.write(folder / FILE, json.dumps(document, indent=1).encode())
  paths_lib.sync(folder)


def problems(folder: paths_lib.Path) -> list[str]:
  """Compares a folder with its manifest.

  Returns:
    One line per differing file; empty if the folder is unchanged.

  Raises:
    UserError: a file exists but cannot be read.
  """
  try:
    document = json.loads(_read(folder / FILE, lambda f: f.read_bytes()))
    body = document['body']
    intact = document['own_digest'] == _digest_of(body)
  except errors.UserError:
    raise
  except (*_ABSENT, ValueError, KeyError, TypeError) as error:
    return [f'{FILE} cannot be read ({error})']
  if not intact:
    return [f'{FILE} is damaged']
  recorded, digest = body['files'], body['digest']

  def find(path: str) -> _Entry | None:
    try:
      return _read(folder / path, lambda p: _entry(p, digest, sync=False))
    except _ABSENT:
      return None

  # A checkpoint copied from a file system into a bucket keeps its BLAKE2b
  # manifest; the CRCs of a listing cannot verify it, so its files are read.
  if paths_lib.is_bucket(folder) and digest == _CRC:
    current = _read(folder, paths_lib.objects)
  else:
    current = _map(find, recorded)
  compared = {
    p: _compare(current.get(p), recorded[p]) for p in sorted(recorded)
  }
  return [f'{path} {problem}' for path, problem in compared.items() if problem]


def _compare(current: _Entry | None, recorded: _Entry) -> str | None:
  if current is None:
    return 'is missing'
  if current['bytes'] != recorded['bytes']:
    return f'has {current["bytes"]} bytes instead of {recorded["bytes"]}'
  return None if current == recorded else 'has other contents than were written'


def _read(path: paths_lib.Path, reader: Callable[[paths_lib.Path], Any]) -> Any:
  """Returns `reader(path)`.

  Raises:
    UserError: the path exists and cannot be read.
    OSError: the path does not exist; the type is in `_ABSENT`.
  """
  try:
    return reader(path)
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
  # `paths_lib.write` appends to the manifest's name for its temporary file.
  return [path for path in paths if not path.startswith(FILE)]


def _map(function: Callable, paths: Iterable[str]) -> dict[str, Any]:
  paths = list(paths)
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(paths, pool.map(function, paths), strict=True))


def _entry(path: paths_lib.Path, digest: str, *, sync: bool) -> _Entry:
  if digest == _CRC:
    size = paths_lib.size(path)
    return {'bytes': size, 'digest': paths_lib.file_crc32c(path)}
  with path.open('rb') as file:
    checksum = hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=32)
    ).hexdigest()
    # Orbax does not sync its JSON files: after a power cut, a manifest could
    # list files that never reached the disk.
    if sync:
      os.fsync(file.fileno())
    return {'bytes': file.tell(), 'digest': checksum}


def _digest_of(body: dict) -> str:
  text = json.dumps(body, sort_keys=True).encode()
  return hashlib.blake2b(text, digest_size=32).hexdigest()
