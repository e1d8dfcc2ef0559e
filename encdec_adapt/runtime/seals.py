"""Seals: a checksum of every file under a folder, kept inside the folder.

A sealed folder is complete, on disk, and can later be shown to be unchanged:
a flipped byte, a truncation, a missing or unreadable file, and damage to the
seal itself are all found. Files that came after the seal are not looked at.
Imports nothing else of ours.
"""

from collections.abc import Callable
from concurrent import futures
import hashlib
import json
import os
import pathlib

from encdec_adapt.runtime import files

FILE = 'seal.json'
_FORMAT = 1
_THREADS = 4  # Hashing releases the interpreter's lock.


def is_sealed(folder: pathlib.Path) -> bool:
  """Whether the folder has a seal, sound or not."""
  return (folder / FILE).exists()


def write(folder: pathlib.Path) -> None:
  """Syncs every file of the folder and writes their checksums.

  The seal appears in one rename, after everything it speaks of is on disk.

  Raises:
    OSError: a file could not be read, or the seal not be written.
  """
  paths = _files(folder)
  body = {
    'format': _FORMAT,
    'digest': 'blake2b-256',
    'files': _map(lambda path: _entry(folder / path, sync=True), paths),
  }
  draft = folder / (FILE + '.tmp')
  with open(draft, 'w', encoding='utf-8') as file:
    json.dump({'body': body, 'own_digest': _own_digest(body)}, file, indent=1)
    file.flush()
    os.fsync(file.fileno())
  for directory in {folder, *(folder / path for path in _folders(paths))}:
    files.sync(directory)
  os.replace(draft, folder / FILE)
  files.sync(folder)


def problems(folder: pathlib.Path) -> list[str]:
  """Says what is wrong with a sealed folder; empty means unchanged."""
  try:
    document = json.loads((folder / FILE).read_bytes())
    body = document['body']
    intact = document['own_digest'] == _own_digest(body)
  except (OSError, ValueError, KeyError, TypeError) as error:
    return [f'{FILE} cannot be read ({error})']
  if not intact:
    return [f'{FILE} is damaged']
  if body['format'] != _FORMAT:
    return [f'{FILE} has format {body["format"]}, not {_FORMAT}']
  wanted = body['files']
  found = _map(lambda path: _problem(folder / path, wanted[path]), wanted)
  return [f'{path} {found[path]}' for path in sorted(wanted) if found[path]]


def _problem(path: pathlib.Path, wanted: dict[str, int | str]) -> str | None:
  """What is wrong with one file, or None."""
  try:
    size = path.stat().st_size
    if size != wanted['bytes']:
      return f'has {size} bytes instead of {wanted["bytes"]}'
    if _entry(path, sync=False) != wanted:
      return 'has other contents than were written'
  except FileNotFoundError:
    return 'is missing'
  except OSError as error:
    return f'cannot be read ({error.strerror or error})'
  return None


def _files(folder: pathlib.Path) -> list[str]:
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob('*')
    if path.is_file() and path.name not in (FILE, FILE + '.tmp')
  )


def _folders(paths: list[str]) -> set[pathlib.PurePosixPath]:
  return {
    parent for path in paths for parent in pathlib.PurePosixPath(path).parents
  }


def _map(function: Callable, paths) -> dict:
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(paths, pool.map(function, paths), strict=True))


def _entry(path: pathlib.Path, *, sync: bool) -> dict[str, int | str]:
  with open(path, 'rb') as file:
    digest = hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=32)
    ).hexdigest()
    if sync:
      os.fsync(file.fileno())
    return {'bytes': file.tell(), 'digest': digest}


def _own_digest(body: dict) -> str:
  text = json.dumps(body, sort_keys=True).encode()
  return hashlib.blake2b(text, digest_size=32).hexdigest()
