"""Folders that appear whole or not at all."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import tempfile

from encdec_adapt.runtime import disk, errors, storage

# Models of ours and of others have it; without it a folder in a bucket is
# none, so it comes last.
MARKER = 'config.json'
# What renaming a folder onto one that was filled meanwhile fails with.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Makes a folder in another place and puts it where it belongs at the end.

  Whatever the body raises, the draft is removed, with the folders above that
  were made for it, and `path` is as it was. Only a killed process leaves its
  draft, `.NAME.XXXXXXXX.partial`, beside `path`.

  For a bucket the draft lies among temporary files ($TMPDIR), and is copied
  with checksums, `MARKER` last.

  Args:
    path: not there yet, or an empty folder. Folders above it are made.

  Yields:
    The draft, on a file system, that of `path` if it is on one; all that is
    in it at the end belongs to the new folder.

  Raises:
    UserError: `path` is taken or a mount point, or the folder above it cannot
      be written.
  """
  path = storage.absolute(path)
  require_free(path)
  above, made = path.parent, []
  if storage.is_bucket(path):
    above = pathlib.Path(tempfile.gettempdir())
  else:
    made = [one for one in path.parents if not one.exists()]
  draft = above / f'.{path.name}.{secrets.token_hex(4)}.partial'
  try:
    disk.require_writable(path.parent)
    try:
      draft.mkdir()
    except OSError as error:
      raise disk.cannot_write(draft, error) from error
    yield draft
    try:
      _commit(draft, path)
    except OSError as error:
      if error.errno in _TAKEN:
        require_free(path)
      raise disk.cannot_write(path, error) from error
  finally:
    shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):  # Something is in it: the new folder.
      for folder in made:
        folder.rmdir()


def _commit(draft: pathlib.Path, path: storage.Path) -> None:
  """Puts the draft in its place, where it was free."""
  if storage.is_bucket(path):
    storage.upload(draft, path, MARKER)
    return
  for below in sorted(draft.rglob('*')):
    storage.sync(below)
  storage.sync(draft)
  os.rename(draft, path)
  storage.sync(path.parent)


def require_free(path: str | os.PathLike[str]) -> None:
  """Refuses a place where something is already; an empty folder is nothing.

  Args:
    path: where a folder is to be made.

  Raises:
    UserError: it is a file, a folder with something in it, a mount point, or
      cannot be looked into.
  """
  path = storage.at(path)
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
