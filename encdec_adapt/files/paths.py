"""Where files lie: on mounted file systems, or as objects in a bucket.

Whatever may be given as gs://BUCKET/NAME goes through here. A bucket has no
renames, no appending and no folders, but an object is seen whole or not at
all. So there is one rule for what counts as written, and callers need not ask
where they write:

- A file: on a file system written beside, synced and renamed; in a bucket put
  at once. `write` does it.
- A folder: on a file system made beside and renamed, by `new_folder` or
  Orbax; in a bucket it counts once its marker is there, which is put last:
  config.json of a model, manifest.json of records, commit_success.txt and
  then seal.json of a checkpoint. `remove` and `move` take the markers away
  first.

Buckets are reached through etils.epath and gcsfs, with TensorFlow installed
or not, so that there is one way; arrays are Orbax's and TensorStore's.
"""

import base64
from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import importlib.util
import io
import os
import pathlib
import shutil
import tempfile
from typing import Any, BinaryIO

from etils import epath

from encdec_adapt.cli import errors

Path = pathlib.Path | epath.Path
AnyPath = str | os.PathLike[str]

SCHEME = 'gs://'
INSTALL = "pip install 'encdec_adapt[gcs]' (in a checkout: -e '.[gcs]')"
_THREADS = 16  # Objects that are copied at once.
_BLOCK = 1 << 20  # Bytes that are taken from an open object at a time.


def is_bucket(path: AnyPath) -> bool:
  """Whether a path is a bucket's address."""
  return '://' in os.fspath(path)


def at(path: AnyPath) -> Path:
  """The path, to be read and written.

  Raises:
    UserError: it is in a bucket, and of another store than GCS, without a
      name in it, or not to be reached: gcsfs or credentials are missing.
  """
  if not is_bucket(path):
    return pathlib.Path(path)
  address = os.fspath(path)
  bucket = address.removeprefix(SCHEME).partition('/')[0]
  if not address.startswith(SCHEME) or not bucket:
    raise errors.UserError(
      f'{address} is no path: give a mounted file system, or'
      ' gs://BUCKET/NAME. Buckets of other stores can be mounted.'
    )
  _connect()
  _reach(bucket)
  return epath.Path(address)


def join(folder: AnyPath, *names: str) -> str:
  """A path below a folder; nothing is looked up."""
  if is_bucket(folder):
    return '/'.join([os.fspath(folder).rstrip('/'), *names])
  return str(pathlib.Path(folder, *names))


def absolute(path: AnyPath) -> Path:
  """The path from the root on, without links: one spelling of each place."""
  found = at(path)
  # etils has an address below the current folder.
  return found if is_bucket(found) else found.resolve()


def size(path: Path) -> int:
  """Bytes of a file."""
  found = path.stat()
  return found.length if is_bucket(path) else found.st_size


def tree(folder: Path) -> list[str]:
  """Names of all files below a folder, from it on, in order."""
  if is_bucket(folder):
    return sorted(objects(folder))
  return sorted(
    path.relative_to(folder).as_posix()
    for path in folder.rglob('*')
    if path.is_file()
  )


def sync(path: AnyPath) -> None:
  """Sees to it that a file's content, or a folder's names, are on the disk.

  Raises:
    OSError: it cannot be opened, or the disk fails.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write(path: AnyPath, data: bytes) -> None:
  """Writes a file whole or not at all; its folder is made.

  Args:
    path: what was there is replaced.
    data: the content.

  Raises:
    OSError: it cannot be written.
  """
  path = at(path)
  if is_bucket(path):
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
  """Copies a file; into a bucket, or out of one, with its checksum compared.

  Raises:
    OSError: it cannot be read or written, or is not what was sent.
  """
  source, target = at(source), at(target)
  if not is_bucket(source) and not is_bucket(target):
    shutil.copyfile(source, target)
    return
  with _as_os_errors(target if is_bucket(target) else source):
    if not is_bucket(target):
      _gcs().get_file(str(source), str(target))
      here, there = target, source
    elif not is_bucket(source):
      _gcs().put_file(str(source), str(target))
      here, there = source, target
    else:
      _gcs().cp_file(str(source), str(target))
      return
    wanted = base64.b64decode(_gcs().info(str(there))['crc32c'])
  if file_crc32c(here) != wanted.hex():
    raise OSError(f'{target} is not what {source} is: the copy was damaged')


def remove(folder: Path, markers: Sequence[str] = ()) -> None:
  """Removes a folder with all in it.

  Args:
    folder: need not exist.
    markers: files in it that say that it is whole; in a bucket they go first.
  """
  if not is_bucket(folder):
    if folder.exists():
      shutil.rmtree(folder)
    return
  for name in markers:
    (folder / name).unlink(missing_ok=True)
  names = [str(folder / name) for name in objects(folder)]
  if names:
    with _as_os_errors(folder):
      _gcs().rm(names)


def move(folder: Path, target: Path, markers: Sequence[str] = ()) -> None:
  """Moves a folder, which in a bucket means to copy and remove it.

  Args:
    folder: of files.
    target: not there yet, on the same file system or bucket.
    markers: as for `remove`.

  Raises:
    OSError: it cannot be read or written.
  """
  if not is_bucket(folder):
    folder.rename(target)
    return
  _each(objects(folder), lambda name: copy(folder / name, target / name))
  remove(folder, markers)


def upload(folder: pathlib.Path, target: Path, marker: str = '') -> None:
  """Copies a folder into a bucket, the file that says it is whole last.

  What is there already and the same is left alone, so that a copy that broke
  off goes on.

  Args:
    folder: on a file system.
    target: in a bucket.
    marker: name of that file; '' for none.

  Raises:
    OSError: a file cannot be read or written.
  """
  there = objects(target)

  def put(name: str) -> None:
    """Copies one file, if its like is not there."""
    found, path = there.get(name), folder / name
    same = found and found['bytes'] == size(path)
    if not same or found['digest'] != file_crc32c(path):
      copy(path, target / name)

  _each([name for name in tree(folder) if name != marker], put)
  if marker and (folder / marker).exists():
    copy(folder / marker, target / marker)


@contextlib.contextmanager
def staged(folder: AnyPath) -> Iterator[pathlib.Path]:
  """A folder for what only writes to file systems.

  Yields:
    The folder itself, made; for one in a bucket a temporary one, of which all
    is copied there at the end.
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
  """Some bytes of an object.

  Raises:
    OSError: it cannot be read, or has fewer bytes.
  """
  with _as_os_errors(path):
    data = _gcs().cat_file(str(path), start=offset, end=offset + nbytes)
  if len(data) != nbytes:
    raise OSError(f'{path} ends {nbytes - len(data)} bytes too early')
  return data


def objects(folder: Path) -> dict[str, dict[str, Any]]:
  """The objects below a folder of a bucket.

  Returns:
    Name from the folder on -> `bytes` and `digest`, the CRC32C that the store
    has computed of what it received, hexadecimal.
  """
  with _as_os_errors(folder):
    found = _gcs().find(str(folder), detail=True)
  start = len(str(folder).removeprefix(SCHEME).rstrip('/')) + 1
  return {
    name[start:]: _described(info)
    for name, info in found.items()
    if len(name) > start
  }


def matching(pattern: str) -> dict[str, dict[str, Any]]:
  """The objects of a bucket that match a glob; `**` is any depth of folders.

  Args:
    pattern: begins with gs://BUCKET/.

  Returns:
    Address -> as `objects`; in the order of the addresses.

  Raises:
    UserError: the bucket cannot be reached.
    OSError: it cannot be listed, or `**` is but a part of a name.
  """
  at(pattern)
  with _as_os_errors(pattern):
    found = _gcs().glob(pattern, detail=True)
  return {
    SCHEME + name: _described(info)
    for name, info in sorted(found.items())
    if info['type'] == 'file'
  }


def _described(info: dict[str, Any]) -> dict[str, Any]:
  """Of what gcsfs says of an object, what `objects` returns."""
  digest = base64.b64decode(info['crc32c']).hex()
  return {'bytes': int(info['size']), 'digest': digest}


def open_to_read(path: AnyPath) -> BinaryIO:
  """Opens a file; one of a bucket is read in blocks, so line by line too.

  Raises:
    OSError: it is not there.
  """
  file = at(path).open('rb')
  return io.BufferedReader(file, _BLOCK) if is_bucket(path) else file


def file_crc32c(path: Path) -> str:
  """CRC32C of a file, hexadecimal.

  Raises:
    UserError: the module that computes it is not installed.
  """
  if importlib.util.find_spec('google_crc32c') is None:
    raise errors.UserError(
      f'{path} was sealed in a bucket, by CRC32C; checking that needs'
      f' {INSTALL}.'
    )
  import google_crc32c

  checksum = google_crc32c.Checksum()
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      checksum.update(block)
  return checksum.digest().hex()


def key_value_store(folder: Path) -> Any:
  """A folder of a bucket by TensorStore, where writes may be conditional.

  Raises:
    ValueError: it cannot be opened.
  """
  import tensorstore

  bucket, _, name = str(folder).removeprefix(SCHEME).partition('/')
  return tensorstore.KvStore.open(
    {'driver': 'gcs', 'bucket': bucket, 'path': name.rstrip('/') + '/'}
  ).result()


def _each(names, function) -> None:
  """Calls the function with every name, some at once."""
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(function, names))


@functools.cache
def _connect() -> None:
  """Has etils reach buckets through gcsfs, and see them as they are."""
  if importlib.util.find_spec('gcsfs') is None:
    raise errors.UserError(
      f'{SCHEME} paths need gcsfs, which is not installed: {INSTALL}.'
    )
  # etils takes TensorFlow where it is installed, and remembers that it is.
  os.environ['EPATH_USE_TF'] = 'false'
  epath.gpath._is_tf_installed.cache_clear()
  from fsspec import config

  # Other hosts write too: a list that was remembered would hide it.
  for name in ('gs', 'gcs'):
    config.conf.setdefault(name, {})['use_listings_cache'] = False


@functools.cache
def _gcs() -> Any:
  """The file system that etils uses too."""
  import fsspec

  _connect()
  return fsspec.filesystem('gcs', finalize_on_close=True)


@functools.cache
def _reach(bucket: str) -> None:
  """Asks something of a bucket, once.

  Raises:
    UserError: there is no answer.
  """
  try:
    with _as_os_errors(epath.Path(SCHEME + bucket)):
      _gcs().exists(f'{SCHEME}{bucket}/.encdec_adapt')
  except OSError as error:
    raise errors.UserError(
      f'the bucket {SCHEME}{bucket} cannot be reached ({error}). Log in with'
      ' `gcloud auth application-default login`, or give the machine a service'
      ' account that may read and write there, and check the name.'
    ) from error


@contextlib.contextmanager
def _as_os_errors(path: AnyPath) -> Iterator[None]:
  """What gcsfs and its parts raise, each of its own kind, as OSError."""
  try:
    yield
  except (OSError, errors.UserError):
    raise
  except Exception as error:
    raise OSError(f'{path}: {type(error).__name__}: {error}') from error
