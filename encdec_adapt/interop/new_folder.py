"""Folders that appear whole or not at all."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import secrets
import shutil

from encdec_adapt.runtime import disk, errors, files

# What renaming a folder onto one that was filled meanwhile fails with.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Makes a folder under another name and renames it when all went well.

  Whatever the body raises, the draft is removed and `path` is as it was. Only
  a killed process leaves its draft, `.NAME.XXXXXXXX.partial`, beside `path`.

  Args:
    path: not there yet, or an empty folder. Folders above it are made.

  Yields:
    The draft, on the same file system as `path`; all that is in it at the end
    is synced to the disk and belongs to the new folder.

  Raises:
    UserError: `path` is taken, a mount point or a bucket's address, or the
      folder above it cannot be written.
  """
  if '://' in str(path):
    raise errors.UserError(
      f'{path} is a bucket address; give a path on a local or mounted file'
      ' system.'
    )
  path = pathlib.Path(path).resolve()
  require_free(path)
  disk.require_writable(path.parent)
  draft = path.with_name(f'.{path.name}.{secrets.token_hex(4)}.partial')
  try:
    try:
      draft.mkdir()
    except OSError as error:
      raise disk.cannot_write(draft, error) from error
    yield draft
    try:
      _sync(draft)
      os.rename(draft, path)
      files.sync(path.parent)
    except OSError as error:
      if error.errno in _TAKEN:
        require_free(path)
      raise disk.cannot_write(path, error) from error
  finally:
    shutil.rmtree(draft, ignore_errors=True)


def require_free(path: str | os.PathLike[str]) -> None:
  """Refuses a place where something is already; an empty folder is nothing.

  Args:
    path: where a folder is to be made.

  Raises:
    UserError: it is a file, a folder with something in it, a mount point, or
      cannot be looked into.
  """
  path = pathlib.Path(path)
  try:
    if not path.exists():
      return
    if path.is_dir() and not any(path.iterdir()):
      if os.path.ismount(path):
        raise errors.UserError(
          f'{path} is a mount point, which a finished folder cannot replace.'
          ' Give a folder inside it.'
        )
      return
  except OSError as error:
    raise disk.cannot_write(path, error) from error
  raise errors.UserError(
    f'{path} exists already, and nothing is overwritten. Give another folder,'
    ' or remove this one.'
  )


def _sync(folder: pathlib.Path) -> None:
  """Sees to it that everything in a folder is on the disk."""
  for path in sorted(folder.rglob('*')):
    files.sync(path)
  files.sync(folder)
