"""The lock of a work directory in a bucket: an object with a heartbeat.

It is put on the condition that there is none, by TensorStore, and put anew,
on the condition that it is still this one, every `BEAT` seconds. One that has
not changed for `STALE` seconds is of a dead job and is taken over: that is
measured by the clock of who waits, so that no two clocks need agree. Where
the owner was on this very machine, its process is looked for instead, and a
restart after SIGKILL does not wait.

An owner that could not renew its lock for so long that another may have taken
it ends: what it would write would not be its own any more.
"""

from collections.abc import Callable, Mapping
import contextlib
import datetime
import json
import math
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any

from encdec_adapt.cli import app, errors
from encdec_adapt.files import disk, paths

FILE = 'job.lock'
BEAT = 10.0  # Seconds.
STALE = 6 * BEAT
_LOOK = 1.0  # Seconds between two looks at another's lock.


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
    """Names the folder; nothing is locked yet.

    Args:
      folder: in a bucket.
      beat: seconds between heartbeats.
      stale: seconds without one after which a lock is taken over.
      end: ends a process that has lost its lock, with a status.
    """
    self.folder = paths.at(folder)
    self._beat, self._stale, self._end = beat, stale, end
    self._owner: dict[str, Any] = {}
    self._generation: bytes | None = None
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> 'BucketLock':
    self.acquire()
    return self

  def __exit__(self, *exception) -> None:
    self.release()

  def acquire(self) -> None:
    """Takes the lock; waits only to see whether a job is alive.

    Raises:
      UserError: another job holds it (its process, host and start are
        named), or the folder cannot be written.
    """
    disk.require_writable(self.folder)
    self._owner = describe_this_process()
    try:
      self._store = paths.key_value_store(self.folder)
      while not self._take(self._wait_until_free()):
        pass
    except (ValueError, TimeoutError) as error:  # TensorStore's.
      raise disk.cannot_write(
        self.folder / FILE, OSError(str(error))
      ) from error
    self._stop.clear()
    self._thread = threading.Thread(target=self._keep, daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Gives the lock up; nothing happens if it is not held."""
    if self._generation is None:
      return
    self._stop.set()
    self._thread.join()
    # Where it fails, the next job finds that this process is gone.
    with contextlib.suppress(ValueError, TimeoutError):
      self._store.write(FILE, None, if_equal=self._generation).result(
        self._beat
      )
    self._generation = None

  def _wait_until_free(self) -> bytes:
    """The generation to be replaced, of no lock or of a dead job's."""
    seen, since = None, math.inf
    while True:
      found = self._store.read(FILE).result()
      if found.state == 'missing':
        return found.stamp.generation
      owner = _parse(found.value)
      if seen not in (None, found.stamp.generation):
        raise in_use(self.folder, describe(owner))
      if time.monotonic() - since > self._stale or _is_gone(owner):
        print(f'took over the lock of {describe(owner)}', file=sys.stderr)
        return found.stamp.generation
      if seen is None:
        seen, since = found.stamp.generation, time.monotonic()
        print(
          f'{self.folder} was locked by {describe(owner)}; looking for up to'
          f' {self._stale:.0f} s whether it is alive',
          file=sys.stderr,
          flush=True,
        )
      time.sleep(min(_LOOK, self._beat))

  def _take(self, generation: bytes) -> bool:
    """Puts the lock; False where somebody was quicker."""
    # The time is for people only.
    body = json.dumps({**self._owner, 'heartbeat': time.time()}).encode()
    made = self._store.write(FILE, body, if_equal=generation).result(self._beat)
    if made.generation:
      self._generation = made.generation
    return bool(made.generation)

  def _keep(self) -> None:
    """In a thread: heartbeats, until the lock is released or lost."""
    last = time.monotonic()
    while not self._stop.wait(self._beat):
      try:
        if not self._take(self._generation) and not self._find_own():
          self._lose('another job has taken it', app.USER_ERROR)
          return
        last = time.monotonic()
      except (ValueError, TimeoutError) as error:
        # Waiting and trying take up to two beats more; nobody may have taken
        # it by then.
        if time.monotonic() - last > self._stale - 3 * self._beat:
          self._lose(f'it could not be renewed ({error})', app.HANG)
          return

  def _find_own(self) -> bool:
    """Whether a write came about whose answer was lost."""
    found = self._store.read(FILE).result(self._beat)
    if found.state == 'missing':
      return False
    owner = _parse(found.value)
    if any(owner.get(key) != value for key, value in self._owner.items()):
      return False
    self._generation = found.stamp.generation
    return True

  def _lose(self, why: str, status: int) -> None:
    print(
      f'Error: the lock of {self.folder} is lost: {why}. This job ends at'
      ' once; what it has saved is whole.',
      file=sys.stderr,
      flush=True,
    )
    self._end(status)


def in_use(folder: paths.Path, owner: str) -> errors.UserError:
  """The error to raise where another job holds a folder."""
  return errors.UserError(
    f'The work directory {folder} is in use by another job: {owner}. Wait for'
    ' it, stop it, or give another --workdir.'
  )


def describe_this_process() -> dict[str, Any]:
  """What a lock says of its owner.

  `machine` and `born` tell this process from others of its number, on other
  machines, in other containers and at other times; None where Linux's /proc
  is not there.
  """
  return {
    'pid': os.getpid(),
    'host': socket.gethostname(),
    'started': datetime.datetime.now().astimezone().isoformat(' ', 'seconds'),
    'machine': _machine(),
    'born': _born(os.getpid()),
  }


def describe(owner: Mapping[str, Any]) -> str:
  """The owner of a lock, for people.

  Raises:
    KeyError: it does not say.
  """
  return (
    f'process {owner["pid"]} on {owner["host"]}, started {owner["started"]}'
  )


def _parse(content: bytes) -> dict[str, Any]:
  """What a lock says; a damaged one is of somebody unknown."""
  unknown = {'pid': '?', 'host': '?', 'started': '?', 'machine': None}
  with contextlib.suppress(ValueError, TypeError):
    return unknown | json.loads(content)
  return unknown


def _is_gone(owner: Mapping[str, Any]) -> bool:
  """Whether an owner was on this machine and is not there any more."""
  machine = _machine()
  if machine is None or owner['machine'] != machine:
    return False
  return _born(owner['pid']) != owner['born']


def _machine() -> str | None:
  """This start of this machine, and the container."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{socket.gethostname()} {boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return None


def _born(pid: int) -> str | None:
  """When a process began, in ticks since the machine did; None for none."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  # After the name in parentheses, which may hold anything: fields 3 to 52.
  fields = text.rpartition(')')[2].split()
  return None if fields[0] == 'Z' else fields[19]
