"""Atomic creation of folders: complete or absent."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import tempfile

from encdec_adapt.base import errors
from encdec_adapt.files import disk, paths

# Present in every model folder, and written last in a bucket: a folder without
# it is incomplete.
MARKER = 'config.json'
# Marks an unfinished upload to a bucket until `MARKER` is written. Later
# commands may replace such a folder.
UNFINISHED = '.unfinished'
# Errors of a rename to a target that another process has filled meanwhile.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Makes a folder under a temporary name and moves it to `path` at the end.

  If the body raises, the draft is removed and `path` is unchanged. Only a
  killed process leaves its draft, `.NAME.XXXXXXXX.partial`, next to `path`.

  For a bucket, the draft is a local folder under $TMPDIR, uploaded with
  checksums at the end, `MARKER` last. The body may upload large files to `path`
  itself and remove them from the draft.

  Args:
    path: absent or empty folder; missing parents are made.

  Yields:
    The draft, a local folder.

  Raises:
    UserError: `path` is taken or a mount point, or cannot be written.
  """
  path = paths.absolute(path)
  require_free(path)
  is_bucket = paths.is_bucket(path)
  above = pathlib.Path(tempfile.gettempdir()) if is_bucket else path.parent
  # Innermost first, the order of removal after an error.
  parents = [] if is_bucket else [p for p in path.parents if not p.exists()]
  draft = above / f'.{path.name}.{secrets.token_hex(4)}.partial'
  is_complete = False
  try:
    disk.require_writable(path.parent)
    with _write_errors(path):
      # Marked before the body, which may upload to `path`, so that later
      # commands may replace the folder if this process is killed.
      if is_bucket:
        paths.remove(path)  # An unfinished upload.
        paths.write(path / UNFINISHED, b'')
      draft.mkdir()
    yield draft
    with _write_errors(path):
      _commit(draft, path)
    is_complete = True
  finally:
    shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):
      if is_bucket and not is_complete:
        paths.remove(path)
      for folder in parents:  # Fails, as intended, if the folder was made.
        folder.rmdir()


@contextlib.contextmanager
def _write_errors(path: paths.Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    if error.errno in _TAKEN:
      require_free(path)
    raise disk.cannot_write(path, error) from error


def _commit(draft: pathlib.Path, path: paths.Path) -> None:
  if paths.is_bucket(path):
    paths.upload(draft, path, MARKER)
    (path / UNFINISHED).unlink()
    return
  # Syncs contents before the rename: a power cut leaves no partial folder.
  for entry in sorted(draft.rglob('*')):
    paths.sync(entry)
  paths.sync(draft)
  os.rename(draft, path)
  paths.sync(path.parent)


def require_free(path: str | os.PathLike[str]) -> None:
  """Raises an error if something is already at a path.

  Empty folders and unfinished uploads to buckets count as free.

  Args:
    path: folder to be made.

  Raises:
    UserError: `path` is a file, a non-empty folder, a mount point, or cannot be
      read.
  """
  path = paths.at(path)
  with disk.writing(path):
    if not path.exists() or _is_unfinished(path):
      return
    if path.is_dir() and not any(path.iterdir()):
      # A rename onto it would fail, but only at the end.
      if os.path.ismount(path):
        raise errors.UserError(
          f'{path} is a mount point, which a finished folder cannot replace.'
          ' Give a folder inside it.'
        )
      return
  raise errors.UserError(
    f'{path} exists already, and nothing is overwritten. Give another folder,'
    ' or remove this one.'
  )


def _is_unfinished(path: paths.Path) -> bool:
  return (path / UNFINISHED).exists() and not (path / MARKER).exists()
