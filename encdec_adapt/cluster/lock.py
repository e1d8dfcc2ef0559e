"""Exclusive lock of a work directory, released when its owner dies.

On a file system, the lock is an flock on a file. The kernel releases it when
the last copy of the descriptor is closed, so that a restart after SIGKILL does
not wait. Subprocesses do not inherit the descriptor (Python's default), so that
an orphan cannot keep the directory locked.

In a bucket, the lock is an object, created and renewed every `BEAT` seconds
with TensorStore's conditional writes. A lock unchanged for `STALE` seconds, by
the clock of the waiting process, belongs to a dead job and is taken over. An
owner that fails to renew its lock until another job may have taken it ends
itself.

Uses `files` for paths and stores; must not know the guarded files.
"""

from collections.abc import Iterator
import contextlib
import datetime
import fcntl
import json
import os
import socket
import sys
import threading
import time
from typing import Any
import uuid

from encdec_adapt.base import errors, exit_status
from encdec_adapt.files import disk, paths

FILE = 'job.lock'
BEAT = 10.0  # Seconds between two renewals.
STALE = 6 * BEAT  # Seconds without renewal until a lock is taken over.
_POLL = 1.0  # Seconds between two reads of another job's lock.
_UNKNOWN = {'pid': '?', 'host': '?', 'started': '?'}


class InUseError(errors.UserError):
  """Another job holds the lock."""


def hold(
  folder: str | os.PathLike[str],
) -> contextlib.AbstractContextManager[Any]:
  """Returns the lock of a work directory, a context manager.

  Args:
    folder: local folder or bucket address; created when the lock is taken.

  Raises:
    InUseError: on entering, another job holds the lock; names its process, host
      and start.
    UserError: the folder cannot be written.
  """
  return (BucketLock if paths.is_bucket(folder) else _hold_folder)(folder)


@contextlib.contextmanager
def _hold_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
  """Locks a local folder without waiting; see `hold`.

  The lock file is never removed: otherwise two jobs could lock two files with
  the same name.
  """
  path = disk.require_writable(folder) / FILE
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(open(path, 'ab', buffering=0))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      file.truncate(0)
      file.write(json.dumps(_describe_self()).encode() + b'\n')
    except BlockingIOError:
      raise _in_use(path.parent, path.read_bytes()) from None
    except OSError as error:
      raise disk.cannot_write(path, error) from error
    yield


class BucketLock:
  """Context manager that holds a folder of a bucket for this process."""

  def __init__(self, folder: str | os.PathLike[str]):
    """Stores the folder, a bucket address; nothing is locked yet."""
    self.folder = paths.at(folder)
    self._owner = _describe_self()
    self._generation: bytes | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._keep, daemon=True)

  def __enter__(self) -> None:
    """Takes the lock; waits only to check whether another job is alive."""
    disk.require_writable(self.folder)
    try:
      self._store = paths.key_value_store(self.folder)
      while not self._write(self._wait_until_free()):
        pass
    except errors.UserError:
      raise
    except (ValueError, TimeoutError) as error:  # TensorStore's.
      raise disk.cannot_write(
        self.folder / FILE, OSError(str(error))
      ) from error
    self._thread.start()

  def __exit__(self, *exception) -> None:
    """Releases the lock."""
    self._stop.set()
    self._thread.join()
    # If this fails, the next job finds a stale lock.
    with contextlib.suppress(ValueError, TimeoutError):
      self._store.write(FILE, None, if_equal=self._generation).result(BEAT)

  def _wait_until_free(self) -> bytes:
    # Clocks differ between machines: only a change of the object shows that its
    # owner is alive, not its time.
    seen, since = None, 0.0
    while True:
      entry = self._store.read(FILE).result()
      generation = entry.stamp.generation
      if entry.state == 'missing':
        return generation
      if seen is None:
        seen, since = generation, time.monotonic()
        print(
          f'{self.folder} was locked by {_name(entry.value)}; watching for'
          f' {STALE:.0f} s whether it is alive',
          file=sys.stderr,
          flush=True,
        )
      elif seen != generation:
        raise _in_use(self.folder, entry.value)
      elif time.monotonic() - since > STALE:
        print(f'took over the lock of {_name(entry.value)}', file=sys.stderr)
        return generation
      time.sleep(min(_POLL, BEAT))

  def _write(self, generation: bytes) -> bool:
    body = json.dumps({**self._owner, 'heartbeat': time.time()}).encode()
    stamp = self._store.write(FILE, body, if_equal=generation).result(BEAT)
    self._generation = stamp.generation or self._generation
    return bool(stamp.generation)

  def _keep(self) -> None:
    last = time.monotonic()
    while not self._stop.wait(BEAT):
      try:
        if not self._write(self._generation) and not self._is_written():
          self._lose('another job has taken it', exit_status.USER_ERROR)
          return
        last = time.monotonic()
      except (ValueError, TimeoutError) as error:
        # Leave a margin of two beats for waiting and retrying, so that no other
        # job has taken the lock yet.
        if time.monotonic() - last > STALE - 3 * BEAT:
          self._lose(f'it could not be renewed ({error})', exit_status.HANG)
          return

  def _is_written(self) -> bool:
    """Returns whether this job's write succeeded, but its answer was lost.

    A retry of such a write fails, as the generation has already changed.
    """
    entry = self._store.read(FILE).result(BEAT)
    if _parse(entry.value).get('id') != self._owner['id']:
      return False
    self._generation = entry.stamp.generation
    return True

  def _lose(self, why: str, status: int) -> None:
    print(
      f'Error: the lock of {self.folder} is lost: {why}. This job ends at'
      ' once; its checkpoints are complete.',
      file=sys.stderr,
      flush=True,
    )
    os._exit(status)


def _in_use(folder: paths.Path, content: bytes) -> InUseError:
  return InUseError(
    f'The work directory {folder} is in use by another job: {_name(content)}.'
    ' Wait for it, stop it, or give another --workdir.'
  )


def _describe_self() -> dict[str, Any]:
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'started': datetime.datetime.now().astimezone().isoformat(' ', 'seconds'),
    'id': uuid.uuid4().hex,
  }


def _name(content: bytes) -> str:
  owner = _parse(content)
  return (
    f'process {owner["pid"]} on {owner["host"]}, started {owner["started"]}'
  )


def _parse(content: bytes) -> dict[str, Any]:
  with contextlib.suppress(ValueError, TypeError):
    return _UNKNOWN | json.loads(content)
  return _UNKNOWN
