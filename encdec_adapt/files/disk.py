"""Checks of writable folders and free disk space before a job starts.

This module must not import jobs: callers pass sizes and names of their data.
"""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import re
import shutil
import socket

from encdec_adapt.base import errors
from encdec_adapt.files import paths

# Size of the probe file; an empty file can be created even on a full disk.
_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_writable(folder: paths.AnyPath) -> paths.Path:
  """Creates a folder if missing, and checks it with a probe file.

  Args:
    folder: local folder or bucket address.

  Returns:
    The folder's path.

  Raises:
    UserError: the folder cannot be created or written.
  """
  folder = paths.at(folder)
  # Processes of a job probe a shared folder concurrently.
  name = f'.probe-{socket.gethostname()}-{os.getpid()}'
  with writing(folder):
    paths.write(folder / name, bytes(_PROBE_BYTES))
    (folder / name).unlink()
  return folder


def require_output(output: str) -> None:
  """Checks that the file of --output can be written; creates its folder.

  Args:
    output: local path or bucket address of the file.

  Raises:
    UserError: it is a folder, or its folder cannot be created or written.
  """
  path = paths.at(output)
  if path.is_dir():
    raise errors.UserError(
      f'--output={output} cannot be written (it is a folder); name a file in a'
      ' folder of yours.'
    )
  require_writable(path.parent)


@contextlib.contextmanager
def writing(path: paths.AnyPath) -> Iterator[None]:
  """Converts an `OSError` in this context to `cannot_write` of the path.

  Raises:
    UserError: the path cannot be written.
  """
  try:
    yield
  except OSError as error:
    raise cannot_write(path, error) from error


def full_disk(error: object) -> OSError | None:
  """Returns the `OSError` of a full disk behind an error, or None.

  Args:
    error: an `OSError`, or an error of TensorStore with the errno in its text.
  """
  match = re.search(r"(?:\[Errno |os_error_code=')(\d+)", str(error))
  number = int(match[1]) if match else 0
  return OSError(number, os.strerror(number)) if number in _FULL else None


def cannot_write(path: paths.AnyPath, error: OSError) -> errors.UserError:
  """Returns the user error for an `OSError` from writing `path`."""
  # A temporary error of a bucket (see `paths`): launchers restart the job.
  if isinstance(error, ConnectionError):
    return errors.AbsentError(f'{path} cannot be written now ({error}).')
  if error.errno in _FULL:
    problem, remedy = 'is full', 'Free space there, or choose another folder'
  else:
    problem = 'cannot be written'
    remedy = 'Choose a folder that this user may write'
  reason = error.strerror or error
  return errors.UserError(f'{path} {problem} ({reason}). {remedy}.')


def require_space(
  folder: paths.AnyPath, nbytes: int, *, label: str, remedy: str = ''
) -> None:
  """Checks that a disk has the free space for a job.

  Args:
    folder: folder to write to, possibly missing; buckets always pass.
    nbytes: number of bytes to be written.
    label: name of the data, for the message.
    remedy: additional remedy at the end of the message.

  Raises:
    UserError: fewer than `nbytes` are free for this user.
  """
  if paths.is_bucket(folder):
    return
  # A missing folder will be on its parents' file system.
  existing = pathlib.Path(folder).absolute()
  while not existing.exists():
    existing = existing.parent
  free = shutil.disk_usage(existing).free
  if free < nbytes:
    raise errors.UserError(
      f'{folder} has {format_bytes(free)} free, but {label} need'
      f' {format_bytes(nbytes)}. Free space there, or choose another'
      f' folder{remedy}.'
    )


def format_bytes(nbytes: float) -> str:
  """Formats a number of bytes, such as `1.5 GiB`."""
  if nbytes < 1024:
    return f'{nbytes:.0f} bytes'
  # 2**10 (1 KiB) is the first number of 11 bits.
  power = min((int(nbytes).bit_length() - 1) // 10, 5)
  return f'{nbytes / 1024**power:.1f} {"KMGTP"[power - 1]}iB'
