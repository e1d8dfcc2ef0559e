"""Folders that appear whole or not at all."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import secrets
import shutil
import tempfile

from encdec_adapt.cli import errors
from encdec_adapt.files import disk, paths

# Models of ours and of others have it; without it a folder in a bucket is
# none, so it comes last.
MARKER = 'config.json'
# In a bucket, from the first copy until `MARKER` is there: such a folder is
# an upload of ours that broke off, and no one else's.
UNFINISHED = '.unfinished'
# What renaming a folder onto one that was filled meanwhile fails with.
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Makes a folder in another place and puts it where it belongs at the end.

  Whatever the body raises, the draft is removed, with the folders above that
  were made for it, and `path` is as it was. Only a killed process leaves its
  draft, `.NAME.XXXXXXXX.partial`, beside `path`.

  For a bucket the draft lies among temporary files ($TMPDIR), and is copied
  with checksums, `MARKER` last. Where copying fails, the draft is kept and
  named; what is there then is no folder, and the next one may replace it.

  Args:
    path: not there yet, or an empty folder. Folders above it are made.

  Yields:
    The draft, on a file system, that of `path` if it is on one; all that is
    in it at the end belongs to the new folder.

  Raises:
    UserError: `path` is taken or a mount point, the folder above it cannot
      be written, or the draft was not copied.
  """
  path = paths.absolute(path)
  require_free(path)
  above, made = path.parent, []
  if paths.is_bucket(path):
    above = pathlib.Path(tempfile.gettempdir())
  else:
    made = [one for one in path.parents if not one.exists()]
  draft = above / f'.{path.name}.{secrets.token_hex(4)}.partial'
  is_kept = False
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
      if not paths.is_bucket(path) or not draft.exists():
        raise disk.cannot_write(path, error) from error
      is_kept = True
      raise errors.UserError(
        f'{path} was not written ({error}). The finished folder is kept as'
        f' {draft}: copy what is in it there, {MARKER} last, or remove it and'
        ' give the command again.'
      ) from error
  finally:
    if not is_kept:
      shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):  # Something is in it: the new folder.
      for folder in made:
        folder.rmdir()


def _commit(draft: pathlib.Path, path: paths.Path) -> None:
  """Puts the draft in its place, where it was free."""
  if paths.is_bucket(path):
    paths.write(path / UNFINISHED, b'This upload goes on, or broke off.\n')
    # What an earlier one has left.
    own = {*paths.tree(draft), UNFINISHED}
    for name in paths.objects(path).keys() - own:
      (path / name).unlink()
    paths.upload(draft, path, MARKER)
    (path / UNFINISHED).unlink()
    return
  for below in sorted(draft.rglob('*')):
    paths.sync(below)
  paths.sync(draft)
  os.rename(draft, path)
  paths.sync(path.parent)


def require_free(path: str | os.PathLike[str]) -> None:
  """Refuses a place where something is already.

  An empty folder is nothing, and neither is what an upload that broke off has
  left in a bucket.

  Args:
    path: where a folder is to be made.

  Raises:
    UserError: it is a file, a folder with something in it, a mount point, or
      cannot be looked into.
  """
  path = paths.at(path)
  try:
    if not path.exists() or _broke_off(path):
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


def _broke_off(path: paths.Path) -> bool:
  """Whether it is in a bucket, and all there is of an upload of ours."""
  return (
    paths.is_bucket(path)
    and (path / UNFINISHED).exists()
    and not (path / MARKER).exists()
  )
