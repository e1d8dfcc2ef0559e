"""Ends a hanging job, with a report of the stacks of its threads.

If a process misses a collective or a file system does not answer, the process
waits in C++ without an exception. A thread compares the time since the last
heartbeat with a multiple of the median step. Beyond this limit, it reports the
stacks of all threads, the step and the last barrier on standard error and in
`hang/PROCESS.txt`, and ends the process with `exit_status.HANG`, which makes
launchers restart. Never calls jax, which may hang.
"""

import collections
import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time

from encdec_adapt.base import exit_status
from encdec_adapt.cluster import distributed
from encdec_adapt.files import paths

REPORTS = 'hang'
# Parts of every step, each with a limit.
_PARTS = ('step', 'sample', 'reward')
_FACTOR = 20  # A part hangs after this many times its median.
# Compiling, evaluating, saving, writing a profile and the first steps may take
# this multiple of the minimum step limit.
_OTHER = 12
_FIRST_STEPS = 5  # Too few for a meaningful median.
_REPORT_SECONDS = 30.0  # The file system of the report may hang, too.


class Watchdog:
  """Context manager around a loop that calls `beat`."""

  def __init__(
    self, folder: str | os.PathLike[str], process: int, seconds: float
  ):
    """Stores the limits; the context starts the watch.

    Args:
      folder: work directory for the reports.
      process: 0-based index of this process.
      seconds: minimum time limit of a step; 0 disables the watchdog.
    """
    self._folder = paths.at(folder)
    self._process, self._seconds = process, seconds
    # Seconds of recent parts.
    self._parts = {p: collections.deque[float](maxlen=50) for p in _PARTS}
    self._last = (0, 'start', time.monotonic())
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> 'Watchdog':
    self._last = (*self._last[:2], time.monotonic())
    if self._seconds:
      self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._stop.set()
    if self._seconds:
      self._thread.join()

  def beat(self, step: int, doing: str = 'step') -> None:
    """Records a heartbeat of the loop.

    Args:
      step: the current step.
      doing: the activity that begins: 'step', 'sample' or 'reward' (with
        separate limits), or 'compile', 'evaluate', 'save' or 'profile'.
    """
    now = time.monotonic()
    last_step, last_doing, since = self._last
    # Compiling, evaluating and saving take longer, and would raise the median.
    follows = step == last_step + (last_doing == 'step')
    if last_doing in _PARTS and follows:
      self._parts[last_doing].append(now - since)
    # A single assignment, as the thread reads all three.
    self._last = (step, doing, now)

  @property
  def limit(self) -> float:
    """Seconds without a heartbeat that count as a hang."""
    times = self._parts.get(self._last[1], ())
    if len(times) < _FIRST_STEPS:
      return _OTHER * self._seconds
    return max(self._seconds, _FACTOR * statistics.median(times))

  def hangs(self) -> bool:
    """Returns whether the last heartbeat is older than the limit."""
    return time.monotonic() - self._last[2] > self.limit

  def _watch(self) -> None:
    while not self._stop.wait(min(1.0, self._seconds / 10)):
      if self.hangs():
        step, doing, since = self._last
        head = (
          f'process {self._process} hangs: {doing} at step {step} has taken'
          f' {time.monotonic() - since:.0f} s; the limit is {self.limit:.0f}'
          f' s.\nlast barrier of this process: {distributed.last_barrier()}\n'
        )
        # The folder may hang too, and stderr may be closed or full.
        report = threading.Thread(
          target=self._report, args=(head,), daemon=True
        )
        report.start()
        report.join(_REPORT_SECONDS)
        os._exit(exit_status.HANG)
        return

  def _report(self, head: str) -> None:
    with tempfile.TemporaryFile() as file:
      faulthandler.dump_traceback(file, all_threads=True)
      file.seek(0)
      stacks = file.read()
    path = self._folder / REPORTS / f'{self._process}.txt'
    try:
      print(f'{head}{stacks.decode()}{path}', file=sys.stderr, flush=True)
    finally:
      paths.write(path, head.encode() + stacks)
