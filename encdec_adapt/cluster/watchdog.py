"""Ends a job that hangs, with what is needed to see why.

A collective that not everybody joined, a file system that does not answer:
the process waits in C++ and no exception comes. A thread looks at the time
since the last sign of life; when it is a multiple of the median step, it
writes the stacks of all threads, and the last step and meeting of every
process, to `hang/`, and ends the process with `app.HANG`, which launchers
restart on. So it does, at once, when another process of the job is gone.

Every process leaves its sign of life in `heartbeat/`, for people and for the
other processes' reports.
"""

import collections
from collections.abc import Callable
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import threading
import time

from encdec_adapt.cli import app
from encdec_adapt.cluster import distributed
from encdec_adapt.files import atomic
from encdec_adapt.files import paths as paths_lib

HEARTBEATS = 'heartbeat'
REPORTS = 'hang'
_EVERY = 5.0  # Seconds between heartbeats on disk,
_EVERY_IN_BUCKET = 30.0  # and in a bucket, where each is paid for.
_KNOWN = 5  # Steps after which the median says what is usual.
_PATIENCE = 30.0  # Seconds for a report to get to a bucket.


class Watchdog:
  """Context manager around a loop that calls `beat`."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    process: int,
    processes: int,
    *,
    factor: float,
    least: float,
    least_step: float,
    clock: Callable[[], float] = time.monotonic,
    end: Callable[[int], None] = os._exit,
  ):
    """Nothing is watched yet.

    Args:
      folder: the work directory.
      process: number of this one.
      processes: how many there are.
      factor: times the median step after which a step hangs; 0 watches
        nothing, but heartbeats are written.
      least: seconds below which nothing else than a step hangs, nor one of
        the first few: compiling, evaluating, saving and writing a profile
        must end in them.
      least_step: seconds below which no step hangs.
      clock: seconds.
      end: ends the process with a status.
    """
    self._folder = paths_lib.at(folder)
    self._process, self._processes = process, processes
    in_bucket = paths_lib.is_bucket(folder)
    self._every = _EVERY_IN_BUCKET if in_bucket else _EVERY
    self._factor, self._least = factor, least
    self._least_step = least_step
    self._clock, self._end = clock, end
    self._steps = collections.deque[float](maxlen=50)  # Seconds each.
    self._last = (0, 'start', clock())
    self._written = float('-inf')
    self._writing = threading.Thread()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> 'Watchdog':
    self._last = (*self._last[:2], self._clock())
    # For good: the last save, after the loop, needs the others too.
    distributed.when_lost(self._end_without)
    if self._factor:
      self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._stop.set()
    if self._factor:
      self._thread.join()

  def beat(self, step: int, doing: str = 'step') -> None:
    """A sign of life.

    Args:
      step: that begins, or that `doing` belongs to.
      doing: what begins: 'step', 'compile', 'evaluate', 'save', 'profile'.
    """
    now = self._clock()
    before, was, since = self._last
    if was == 'step' and step == before + 1:
      self._steps.append(now - since)
    self._last = (step, doing, now)
    if now - self._written >= self._every and not self._writing.is_alive():
      self._written = now
      self._writing = threading.Thread(
        target=self._write_heartbeat, args=(step, doing), daemon=True
      )
      self._writing.start()

  def _write_heartbeat(self, step: int, doing: str) -> None:
    """In a thread: a step waits neither for a disk nor for a bucket."""
    try:
      atomic.write_json(
        self._folder / HEARTBEATS / f'{self._process}.json',
        {
          'step': step,
          'doing': doing,
          'meeting': distributed.last_meeting(),
          'unix_time': time.time(),
        },
      )
    except OSError as error:
      print(f'Warning: no heartbeat of step {step}: {error}', file=sys.stderr)

  @property
  def limit(self) -> float:
    """Seconds without a sign of life that are a hang."""
    return self._limit(self._last[1])

  def _limit(self, doing: str) -> float:
    if doing != 'step' or len(self._steps) < _KNOWN:
      return self._least
    return max(self._least_step, self._factor * statistics.median(self._steps))

  def hangs(self) -> bool:
    """Whether there has been no sign of life for too long."""
    _, doing, since = self._last  # Another thread's beat replaces all three.
    return self._clock() - since > self._limit(doing)

  def _watch(self) -> None:
    while not self._stop.wait(min(1.0, self._least / 10)):
      if self.hangs():
        step, doing, since = self._last
        self._end_with(
          f'process {self._process} hangs: {doing} at step {step} has taken'
          f' {self._clock() - since:.0f} s; the limit is {self.limit:.0f} s.'
        )
        return

  def _end_without(self, lost: str) -> None:
    """Ends this process because another one is gone."""
    step, doing, _ = self._last
    self._end_with(
      f'{lost}; process {self._process}, in {doing} at step {step}, ends too.'
    )

  def _end_with(self, reason: str) -> None:
    """Reports and ends, even where the folder gives no answer either."""
    head = [
      reason,
      f'last meeting of this process: {distributed.last_meeting()}',
    ]
    print('\n'.join(head), file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as file:
      faulthandler.dump_traceback(file, all_threads=True)
      file.seek(0)
      stacks = file.read().decode()
    said: list[str] = []
    thread = threading.Thread(
      target=self._write_report, args=(head, stacks, said), daemon=True
    )
    thread.start()
    thread.join(_PATIENCE)
    if not said:
      print(f'{self._folder} takes no report\n{stacks}', file=sys.stderr)
    self._end(app.HANG)

  def _write_report(
    self, head: list[str], stacks: str, said: list[str]
  ) -> None:
    """Writes a report, and says where; adds to `said` what it has said."""
    if self._writing.is_alive():
      self._writing.join()
    try:
      others = heartbeats(self._folder, self._processes)
    except (OSError, ValueError) as error:
      others = [f'the signs of life of the others cannot be read: {error}']
    path = self._folder / REPORTS / f'{self._process}.txt'
    paths_lib.write(path, '\n'.join([*head, *others, '', stacks]).encode())
    others.append(f'stacks of all threads: {path}')
    print('\n'.join(others), file=sys.stderr, flush=True)
    said += others


def heartbeats(folder: str | os.PathLike[str], processes: int) -> list[str]:
  """A line for every process that has left a sign of life.

  Args:
    folder: the work directory.
    processes: of the job; there may be signs of more, of an earlier start.

  Raises:
    OSError: the folder cannot be read.
    ValueError: what lies there is no sign of life.
  """
  lines = []
  paths = (paths_lib.at(folder) / HEARTBEATS).glob('*.json')
  for path in sorted(paths, key=lambda p: int(p.stem)):
    if int(path.stem) >= processes:
      continue
    beat = json.loads(path.read_text())
    ago = time.time() - beat['unix_time']
    lines.append(
      f'process {path.stem}: {beat["doing"]} at step {beat["step"]},'
      f' {ago:.0f} s ago; last meeting: {beat["meeting"]}'
    )
  return lines
