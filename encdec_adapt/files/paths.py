"""Local and bucket paths, and atomic writes of files and folders.

All paths that may be gs://BUCKET/NAME use this module. Buckets have no rename,
append or folders, but atomic writes of objects. One rule covers both:

- A file is written to a temporary name, synced and renamed; in a bucket it is
  one upload. `write` does either.
- A folder is created under a temporary name and renamed, by `new_folder` or
  Orbax; in a bucket it is complete once it has its marker, written last:
  config.json of a model, manifest.json of records, commit_success.txt and
  then the checksum manifest of a checkpoint. `remove` and `move` delete the
  markers first.

The functions accept both kinds of paths. Callers test `is_bucket` where the
kinds differ fundamentally:

- an append log is several objects (`append_log`), and a lock is an object
  renewed by its holder (`cluster.lock`);
- the store has checksums of its objects (`checkpoints.checksums`), and a step
  is committed by a marker instead of its name (`checkpoints.step_folders`);
- a new folder is drafted on a local disk and uploaded (`huggingface.new_folder`
  with `export` and `stored.work_directory`); only disks have a limit
  (`disk`);
- records, headers of weights and a cache of tokens need local files
  (`data.records.record_copy`, `huggingface.tensor_folder`,
  `data.making.shard_jobs`), and remote workers reach buckets only
  (`data.making.pipeline_jobs`).

Buckets are accessed through etils.epath and gcsfs, whether TensorFlow is
installed or not; arrays through Orbax and TensorStore. Of the package, this
module must import only `base`.
"""

import base64
from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import glob
import io
import logging
import os
import pathlib
import shutil
import tempfile
from typing import Any, BinaryIO

from etils import epath

from encdec_adapt.base import errors, packages

Path = pathlib.Path | epath.Path
AnyPath = str | os.PathLike[str]

SCHEME = 'gs://'
_THREADS = 16  # Objects copied in parallel.
# Read buffer of an open object in bytes: every read is a request.
_BLOCK = 1 << 20


def is_bucket(path: AnyPath) -> bool:
  """Returns whether a path is an address such as gs://BUCKET/NAME."""
  return '://' in os.fspath(path)


def at(path: AnyPath) -> Path:
  """Returns a path object for a local path or bucket address.

  Raises:
    UserError: the address is not on GCS or has no bucket, or the bucket cannot
      be reached (gcsfs or credentials are missing).
  """
  if not is_bucket(path):
    return pathlib.Path(path)
  address = os.fspath(path)
  bucket = address.removeprefix(SCHEME).partition('/')[0]
  if not address.startswith(SCHEME) or not bucket:
    raise errors.UserError(
      f'{address} is no path: give a mounted file system, or'
      ' gs://BUCKET/NAME. Buckets of other stores can be mounted; hf:// is for'
      ' models that are read, `convert push` uploads.'
    )
  _connect()
  _reach(bucket)
  return epath.Path(address)


def join(folder: AnyPath, *names: str) -> str:
  """Joins names to a folder, without I/O."""
  if is_bucket(folder):
    return '/'.join([os.fspath(folder).rstrip('/'), *names])
  return str(pathlib.Path(folder, *names))


def absolute(path: AnyPath) -> Path:
  """Returns the canonical absolute path, with links resolved."""
  path = at(path)
  # etils would prepend the current folder to an address.
  return path if is_bucket(path) else path.resolve()


def size(path: Path) -> int:
  """Returns the size of a file in bytes."""
  stat = path.stat()
  # etils renames the fields of an object.
  return stat.length if is_bucket(path) else stat.st_size


def user_cache(name: str) -> pathlib.Path:
  """Returns a cache folder of this package, in $XDG_CACHE_HOME or ~/.cache."""
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return pathlib.Path(cache).expanduser() / 'encdec_adapt' / name


def version(path: Path) -> str:
  """Returns size and mtime of a file as its version."""
  stat = path.stat()
  return f'{size(path)} {stat.mtime if is_bucket(path) else stat.st_mtime}'


def tree(folder: Path) -> list[str]:
  """Returns the sorted names of all files below a folder, relative to it."""
  if is_bucket(folder):
    return sorted(objects(folder))
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob('*')
    if path.is_file()
  )


def sync(path: AnyPath) -> None:
  """Flushes a file's content, or a folder's entries, to the disk.

  Objects in a bucket are stored already.

  Raises:
    OSError: it cannot be opened, or the disk fails.
  """
  if is_bucket(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write(path: AnyPath, data: bytes) -> None:
  """Writes a file atomically; creates its folder.

  Args:
    path: file to create or replace.
    data: content of the file.

  Raises:
    OSError: it cannot be written.
  """
  path = at(path)
  if is_bucket(path):
    # No draft: an object appears only when its upload ends.
    with _as_os_errors(path):
      _gcs().pipe_file(str(path), data)
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  try:
    with open(draft, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(draft, path)
  finally:
    draft.unlink(missing_ok=True)


def copy(source: AnyPath, target: AnyPath) -> None:
  """Copies a file, and compares checksums to or from a bucket.

  Raises:
    OSError: the file cannot be read or written, or the copy is damaged.
  """
  source, target = at(source), at(target)
  if not is_bucket(source) and not is_bucket(target):
    shutil.copyfile(source, target)
    return
  local, remote = (target, source) if is_bucket(source) else (source, target)
  with _as_os_errors(remote):
    if is_bucket(local):  # The store copies and verifies the object.
      _gcs().cp_file(str(source), str(target))
      return
    transfer = _gcs().get_file if remote is source else _gcs().put_file
    transfer(str(source), str(target))
    # Done here, as gcsfs would need crcmod.
    digest = _described(_gcs().info(str(remote)))['digest']
  if file_crc32c(local) != digest:
    raise OSError(f'{target} differs from {source}: the copy was damaged')


def remove(folder: Path, markers: Sequence[str] = ()) -> None:
  """Removes a folder with its content.

  Args:
    folder: the folder; may be missing.
    markers: files that mark it as complete; removed first in a bucket.
  """
  if not is_bucket(folder):
    if folder.exists():
      shutil.rmtree(folder)
    return
  # So that a kill in between leaves an incomplete folder.
  for name in markers:
    (folder / name).unlink(missing_ok=True)
  names = [str(folder / name) for name in objects(folder)]
  if names:
    with _as_os_errors(folder):
      _gcs().rm(names)


def move(folder: Path, target: Path, markers: Sequence[str] = ()) -> None:
  """Renames a folder; in a bucket, copies and removes it.

  Args:
    folder: source.
    target: must not exist; on the same file system or bucket.
    markers: see `remove`.

  Raises:
    OSError: it cannot be read or written.
  """
  if not is_bucket(folder):
    folder.rename(target)
    return
  _each(objects(folder), lambda name: copy(folder / name, target / name))
  remove(folder, markers)


def upload(folder: pathlib.Path, target: Path, marker: str = '') -> None:
  """Copies a local folder into a bucket, its marker last.

  Skips files already uploaded with the same content, to resume an interrupted
  upload.

  Args:
    folder: local folder.
    target: bucket address.
    marker: name of the file that marks the folder as complete; '' for none.

  Raises:
    OSError: a file cannot be read or written.
  """
  uploaded = objects(target)

  def put(name: str) -> None:
    entry, path = uploaded.get(name), folder / name
    # Compare sizes first, as a checksum reads the whole file.
    same = entry and entry['bytes'] == size(path)
    if not same or entry['digest'] != file_crc32c(path):
      copy(path, target / name)

  _each([name for name in tree(folder) if name != marker], put)
  if marker and (folder / marker).exists():
    copy(folder / marker, target / marker)


@contextlib.contextmanager
def staged(folder: AnyPath) -> Iterator[pathlib.Path]:
  """Provides a local folder for software without bucket support.

  Yields:
    The folder itself, created if missing; for a bucket, a temporary folder to
    be uploaded at the end.
  """
  folder = at(folder)
  if not is_bucket(folder):
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    return
  with tempfile.TemporaryDirectory() as draft:
    yield pathlib.Path(draft)
    upload(pathlib.Path(draft), folder)


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
  """Reads `nbytes` bytes of an object from `offset` on.

  Raises:
    OSError: the object cannot be read, or is too short.
  """
  with _as_os_errors(path):
    data = _gcs().cat_file(str(path), start=offset, end=offset + nbytes)
  if len(data) != nbytes:
    raise OSError(f'{path} ends {nbytes - len(data)} bytes too early')
  return data


def objects(folder: Path) -> dict[str, dict[str, Any]]:
  """Lists the objects below a folder of a bucket.

  Returns:
    Name relative to the folder -> `bytes` and `digest`, the hexadecimal CRC32C
    computed by the store on upload.
  """
  with _as_os_errors(folder):
    entries = _gcs().find(str(folder), detail=True)
  start = len(str(folder).removeprefix(SCHEME).rstrip('/')) + 1
  # Skip the entry of the folder itself, uploaded by some tools.
  return {
    name[start:]: _described(info)
    for name, info in entries.items()
    if len(name) > start
  }


def matching(pattern: str) -> dict[str, dict[str, Any]]:
  """Lists the files matching a glob.

  Args:
    pattern: glob; `**` matches any depth.

  Returns:
    Path -> `bytes`, and in a bucket `digest` (see `objects`), sorted.

  Raises:
    UserError: the bucket cannot be reached.
    OSError: the bucket cannot be listed, or `**` is only part of a name.
  """
  if not is_bucket(pattern):
    files = filter(os.path.isfile, sorted(glob.glob(pattern, recursive=True)))
    return {file: {'bytes': os.path.getsize(file)} for file in files}
  at(pattern)  # Checks that the bucket can be reached.
  with _as_os_errors(pattern):
    entries = _gcs().glob(pattern, detail=True)
  return {
    SCHEME + name: _described(info)
    for name, info in sorted(entries.items())
    if info['type'] == 'file'
  }


def _described(info: dict[str, Any]) -> dict[str, Any]:
  digest = base64.b64decode(info['crc32c']).hex()
  return {'bytes': int(info['size']), 'digest': digest}


def open_to_read(path: AnyPath) -> BinaryIO:
  """Opens a file for reading, buffered in a bucket.

  Raises:
    OSError: the file does not exist.
  """
  file = at(path).open('rb')
  return io.BufferedReader(file, _BLOCK) if is_bucket(path) else file


def file_crc32c(path: Path) -> str:
  """Returns the hexadecimal CRC32C of a file.

  Raises:
    UserError: the module that computes it is not installed.
  """
  packages.require(f'a {SCHEME} path', 'gcs', 'google_crc32c')
  # Local import, as it is installed only for buckets.
  import google_crc32c

  checksum = google_crc32c.Checksum()
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      checksum.update(block)
  return checksum.digest().hex()


def key_value_store(folder: Path) -> Any:
  """Opens a folder of a bucket in TensorStore, for conditional writes.

  Raises:
    ValueError: the folder cannot be opened.
  """
  # Local import, as it is slow and only locks need it.
  import tensorstore

  bucket, _, name = str(folder).removeprefix(SCHEME).partition('/')
  return tensorstore.KvStore.open(
    {'driver': 'gcs', 'bucket': bucket, 'path': name.rstrip('/') + '/'}
  ).result()


def _each(names, function) -> None:
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(function, names))  # `list` raises errors of threads.


@functools.cache
def _connect() -> None:
  packages.require(f'a {SCHEME} path', 'gcs', 'gcsfs')
  # etils prefers an installed TensorFlow, and caches this decision.
  os.environ['EPATH_USE_TF'] = 'false'
  epath.gpath._is_tf_installed.cache_clear()
  from fsspec import config

  # These libraries log tracebacks of errors they also raise.
  for name in ('gcsfs', 'google.auth._default'):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  # A cached listing would hide the writes of other hosts.
  for name in ('gs', 'gcs'):
    config.conf.setdefault(name, {})['use_listings_cache'] = False


@functools.cache
def _gcs() -> Any:
  import fsspec

  _connect()
  return fsspec.filesystem('gcs', finalize_on_close=True)


@functools.cache
def _reach(bucket: str) -> None:
  """Checks once that a bucket exists and can be read.

  Raises:
    UserError: the bucket does not exist or refuses access.
    AbsentError: the bucket does not answer, which may be temporary.
  """
  try:
    # An object lookup does not distinguish a missing object from a missing
    # bucket.
    with _as_os_errors(epath.Path(SCHEME + bucket)):
      _gcs().call('GET', 'b/{}/o', bucket, maxResults=1, json_out=True)
  except ConnectionError as error:
    raise errors.AbsentError(
      f'the bucket {SCHEME}{bucket} does not answer ({error}); give the same'
      ' command again later.'
    ) from error
  except OSError as error:
    absent = isinstance(error, FileNotFoundError)
    reason = 'there is none of this name' if absent else error
    raise errors.UserError(
      f'the bucket {SCHEME}{bucket} cannot be reached ({reason}). Log in with'
      ' `gcloud auth application-default login`, or give the machine a service'
      ' account that may read and write there, and check the name.'
    ) from error


@contextlib.contextmanager
def _as_os_errors(path: AnyPath) -> Iterator[None]:
  """Raises gcsfs' errors as OSError, temporary errors as ConnectionError."""
  try:
    yield
  # The errors of `requests` are also OSErrors.
  except (FileNotFoundError, errors.UserError):
    raise
  except Exception as error:
    error_class = ConnectionError if _is_temporary(error) else OSError
    if isinstance(error, OSError) and error_class is OSError:
      raise
    raise error_class(f'{path}: {type(error).__name__}: {error}') from error


def _is_temporary(error: Exception) -> bool:
  from gcsfs import retry

  # gcsfs retries refused credentials (expired tokens); here its retries are
  # exhausted.
  if str(getattr(error, 'code', '')) == '401':
    return False
  # Errors of google.auth state whether a retry may help.
  if not getattr(error, 'retryable', True):
    return False
  return retry.is_retriable(error)
