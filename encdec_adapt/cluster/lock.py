"""Lock of a work directory: one job at a time, released when its owner dies.

On a file system it is an flock on a file. The kernel drops it when the last
copy of the descriptor is closed, so that a restart after SIGKILL does not
wait. Started programs do not inherit the descriptor (O_CLOEXEC) and forked
children close it, so that an orphaned worker cannot keep the directory locked.

In a bucket it is an object, created and renewed every `BEAT` seconds by
conditional writes of TensorStore. A lock that has not changed for `STALE`
seconds, by the clock of the process that waits, belongs to a dead job and is
taken over; if its owner was a process of this very machine, that process is
looked up instead, so that a restart after SIGKILL does not wait. An owner that
could not renew its lock for so long that another job may have taken it ends
itself.
"""

from collections.abc import Callable, Mapping
import contextlib
import datetime
import fcntl
import json
import math
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any
import weakref

from encdec_adapt.cli import app, errors
from encdec_adapt.files import disk, paths

FILE = 'job.lock'
BEAT = 10.0  # Seconds between two renewals.
STALE = 6 * BEAT
_POLL = 1.0  # Seconds between two reads of another job's lock.
_UNKNOWN = {'pid': '?', 'host': '?', 'started': '?', 'machine': None}

_held: 'weakref.WeakSet[FileLock]' = weakref.WeakSet()


def hold(folder: str | os.PathLike[str]) -> 'FileLock | BucketLock':
  """Returns the lock of a work directory, a context manager.

  Args:
    folder: local folder or bucket address; made when the lock is taken.
  """
  return (BucketLock if paths.is_bucket(folder) else FileLock)(folder)


class FileLock:
  """Context manager that holds a local work directory for this process.

  The lock file stays when the lock is released: removing it would let two
  jobs lock two files of the same name.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Stores the folder; nothing is locked yet.

    Args:
      folder: made if it does not exist, when the lock is taken.
    """
    self.folder = pathlib.Path(folder)
    self._descriptor: int | None = None

  def __enter__(self) -> 'FileLock':
    """Takes the lock without waiting.

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
      os.ftruncate(descriptor, 0)
      os.pwrite(descriptor, json.dumps(_describe_self()).encode() + b'\n', 0)
    except OSError as error:
      os.close(descriptor)
      if isinstance(error, BlockingIOError):
        raise _in_use(self.folder, _parse(path.read_bytes())) from None
      raise disk.cannot_write(path, error) from error
    self._descriptor = descriptor
    _held.add(self)
    return self

  def __exit__(self, *exception) -> None:
    self.release()

  def release(self) -> None:
    """Releases the lock; does nothing if it is not held."""
    if self._descriptor is not None:
      os.close(self._descriptor)
      self._descriptor = None
      _held.discard(self)


def _release_in_child() -> None:
  for lock in list(_held):
    lock.release()


os.register_at_fork(after_in_child=_release_in_child)


class BucketLock:
  """Context manager that holds a folder of a bucket for this process."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    beat: float = BEAT,
    stale: float = STALE,
    end: Callable[[int], None] = os._exit,
  ):
    """Stores the folder; nothing is locked yet.

    Args:
      folder: bucket address.
      beat: seconds between renewals.
      stale: seconds without renewal after which a lock is taken over.
      end: ends a process that has lost its lock, with a status.
    """
    self.folder = paths.at(folder)
    self._beat, self._stale, self._end = beat, stale, end
    self._owner: dict[str, Any] = {}
    self._generation: bytes | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._keep, daemon=True)

  def __enter__(self) -> 'BucketLock':
    """Takes the lock; waits only to see whether another job is alive.

    Raises:
      UserError: another job holds it (its process, host and start are
        named), or the folder cannot be written.
    """
    disk.require_writable(self.folder)
    self._owner = _describe_self()
    try:
      self._store = paths.key_value_store(self.folder)
      while not self._write(self._wait_until_free()):
        pass
    except (ValueError, TimeoutError) as error:  # TensorStore's.
      raise disk.cannot_write(
        self.folder / FILE, OSError(str(error))
      ) from error
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._stop.set()
    self._thread.join()
    # Where this fails, the next job finds that this process is gone.
    with contextlib.suppress(ValueError, TimeoutError):
      self._store.write(FILE, None, if_equal=self._generation).result(
        self._beat
      )

  def _wait_until_free(self) -> bytes:
    """Returns the generation to replace: that of no lock or a dead job's."""
    seen, since = None, math.inf
    while True:
      found = self._store.read(FILE).result()
      if found.state == 'missing':
        return found.stamp.generation
      owner = _parse(found.value)
      if seen not in (None, found.stamp.generation):
        raise _in_use(self.folder, owner)
      if time.monotonic() - since > self._stale or _is_gone(owner):
        print(f'took over the lock of {_name(owner)}', file=sys.stderr)
        return found.stamp.generation
      if seen is None:
        seen, since = found.stamp.generation, time.monotonic()
        print(
          f'{self.folder} was locked by {_name(owner)}; watching for up to'
          f' {self._stale:.0f} s whether it is alive',
          file=sys.stderr,
          flush=True,
        )
      time.sleep(min(_POLL, self._beat))

  def _write(self, generation: bytes) -> bool:
    """Writes the lock; returns False where another job was faster."""
    # The time is for people only.
    body = json.dumps({**self._owner, 'heartbeat': time.time()}).encode()
    made = self._store.write(FILE, body, if_equal=generation).result(self._beat)
    if made.generation:
      self._generation = made.generation
    return bool(made.generation)

  def _keep(self) -> None:
    """Renews the lock until it is released or lost; a thread."""
    last = time.monotonic()
    while not self._stop.wait(self._beat):
      try:
        if not self._write(self._generation) and not self._find_own():
          self._lose('another job has taken it', app.USER_ERROR)
          return
        last = time.monotonic()
      except (ValueError, TimeoutError) as error:
        # Waiting and trying take up to two more beats, in which no other job
        # may have taken the lock yet.
        if time.monotonic() - last > self._stale - 3 * self._beat:
          self._lose(f'it could not be renewed ({error})', app.HANG)
          return

  def _find_own(self) -> bool:
    """Returns whether a write succeeded whose answer was lost."""
    found = self._store.read(FILE).result(self._beat)
    if found.state == 'missing':
      return False
    if self._owner.items() <= _parse(found.value).items():
      self._generation = found.stamp.generation
      return True
    return False

  def _lose(self, why: str, status: int) -> None:
    print(
      f'Error: the lock of {self.folder} is lost: {why}. This job ends at'
      ' once; what it has saved is whole.',
      file=sys.stderr,
      flush=True,
    )
    self._end(status)


def _in_use(folder: paths.Path, owner: Mapping[str, Any]) -> errors.UserError:
  return errors.UserError(
    f'The work directory {folder} is in use by another job: {_name(owner)}.'
    ' Wait for it, stop it, or give another --workdir.'
  )


def _describe_self() -> dict[str, Any]:
  """Returns the content of a lock.

  `machine` and `born` (start time) distinguish this process from others with
  the same process id: on other machines, in other containers, or earlier. None
  without Linux's /proc.
  """
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'started': datetime.datetime.now().astimezone().isoformat(' ', 'seconds'),
    'machine': _machine(),
    'born': _born(os.getpid()),
  }


def _name(owner: Mapping[str, Any]) -> str:
  return (
    f'process {owner["pid"]} on {owner["host"]}, started {owner["started"]}'
  )


def _parse(content: bytes) -> dict[str, Any]:
  """Reads the content of a lock; the owner of a damaged one is unknown."""
  with contextlib.suppress(ValueError, TypeError):
    return _UNKNOWN | json.loads(content)
  return _UNKNOWN


def _is_gone(owner: Mapping[str, Any]) -> bool:
  """Returns whether the owner was on this machine and has ended."""
  machine = _machine()
  if machine is None or owner['machine'] != machine:
    return False
  return _born(owner['pid']) != owner['born']


def _machine() -> str | None:
  """Identifies this boot of this machine, and the container."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{socket.gethostname()} {boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return None


def _born(pid: int) -> str | None:
  """Returns a process's start, in clock ticks since boot; None if it ended."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  # After the name in parentheses, which may hold anything: fields 3 to 52.
  fields = text.rpartition(')')[2].split()
  return None if fields[0] == 'Z' else fields[19]
