"""The lock of a work directory: one job at a time, and it dies with its owner.

On a file system it is an flock on a file: the kernel drops it when the last
copy of the descriptor is closed, so a restart after SIGKILL neither waits nor
asks. Started programs do not inherit the descriptor (O_CLOEXEC) and forked
children close it, so that an orphaned worker cannot keep the directory
locked. In a bucket it is an object: `bucket_lock`.
"""

import fcntl
import json
import os
import pathlib
import weakref

from encdec_adapt.cluster import bucket_lock
from encdec_adapt.files import disk, paths

FILE = bucket_lock.FILE

_held: 'weakref.WeakSet[WorkdirLock]' = weakref.WeakSet()


def hold(
  folder: str | os.PathLike[str],
) -> 'WorkdirLock | bucket_lock.BucketLock':
  """The lock of a work directory, wherever it is; a context manager.

  Args:
    folder: made if it does not exist, when the lock is taken.
  """
  if paths.is_bucket(folder):
    return bucket_lock.BucketLock(folder)
  return WorkdirLock(folder)


class WorkdirLock:
  """Context manager that holds a work directory for this process.

  The lock file stays when the lock is released: removing it would let two
  jobs lock two files of the same name.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Names the directory; nothing is locked yet.

    Args:
      folder: made if it does not exist, when the lock is taken.
    """
    self.folder = pathlib.Path(folder)
    self._descriptor: int | None = None

  def __enter__(self) -> 'WorkdirLock':
    self.acquire()
    return self

  def __exit__(self, *exception) -> None:
    self.release()

  def acquire(self) -> None:
    """Takes the lock, without waiting.

    Raises:
      UserError: another job holds it (its process, host and start are
        named), or the directory cannot be written.
    """
    disk.require_writable(self.folder)
    path = self.folder / FILE
    try:
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
      raise disk.cannot_write(path, error) from error
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      _write_owner(descriptor)
    except BlockingIOError:
      os.close(descriptor)
      raise bucket_lock.in_use(self.folder, _describe_owner(path)) from None
    except OSError as error:
      os.close(descriptor)
      raise disk.cannot_write(path, error) from error
    self._descriptor = descriptor
    _held.add(self)

  def release(self) -> None:
    """Gives the lock up; nothing happens if it is not held."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None
      _held.discard(self)


def _write_owner(descriptor: int) -> None:
  owner = bucket_lock.describe_this_process()
  os.ftruncate(descriptor, 0)
  os.pwrite(descriptor, json.dumps(owner).encode() + b'\n', 0)


def _describe_owner(path: pathlib.Path) -> str:
  try:
    return bucket_lock.describe(json.loads(path.read_bytes()))
  except (OSError, ValueError, KeyError, TypeError):
    # Between its taking the lock and its writing who it is.
    return 'one that has only just started'


def _close_in_child() -> None:
  for lock in list(_held):
    lock.release()


os.register_at_fork(after_in_child=_close_in_child)
