"""Time spent by a job: by part of a step, and goodput over all starts.

`TimeSplit` splits the seconds between two records of metrics. `Starts` writes a
line for every start of a job to `starts.jsonl`: its time, its step, and the
steps lost before it. Goodput is the fraction of the time since the first start
spent in kept steps. This module must not import training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import os
import time
from typing import Any

from encdec_adapt.files import append_log, paths

STARTS = 'starts.jsonl'
_PREFIX = 'seconds/'
# data: waiting for rows; sample and reward: completions of policies; dispatch:
# placing the batch and dispatching the step; compile: the same for a first
# step; device: waiting for results; evaluate; save.
PARTS = ('data', 'sample', 'reward', 'dispatch', 'compile', 'device')
PARTS += ('evaluate', 'save')


class TimeSplit:
  """Adds up seconds by part of the training loop."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    """Starts with no time spent.

    Args:
      clock: returns seconds.
    """
    self._clock = clock
    self._began = clock()
    self._spent = dict.fromkeys(PARTS, 0.0)

  @contextlib.contextmanager
  def spent(self, on: str) -> Iterator[None]:
    """Adds the time in this context to a part in `PARTS`."""
    began = self._clock()
    try:
      yield
    finally:
      self._spent[on] += self._clock() - began

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last call, in total and by part.

    The remainder of the total is overhead of the loop.
    """
    now = self._clock()
    taken = {_PREFIX + name: value for name, value in self._spent.items()}
    taken[_PREFIX + 'total'] = now - self._began
    self._began = now
    self._spent = dict.fromkeys(PARTS, 0.0)
    return taken


class Starts:
  """The starts of a job, with the current start."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    step: int,
    lost: Sequence[Mapping[str, Any]] = (),
    clock: Callable[[], float] = time.time,
    **fields: Any,
  ):
    """Records this start.

    Args:
      folder: work directory.
      step: the step to resume from.
      lost: 'time' records of later steps, to be recomputed.
      clock: returns Unix seconds.
      **fields: settings that may differ between starts.
    """
    self._clock = clock
    log = append_log.Log(paths.at(folder) / STARTS)
    start = {
      **fields,
      'unix_time': clock(),
      'step': step,
      'lost_steps': len(lost),
      'lost_seconds': sum(r.get(_PREFIX + 'total', 0.0) for r in lost),
    }
    self._starts = [*(record for record, _ in log.lines if record), start]
    # Rewrite instead of append: a kill may have left an incomplete line.
    log.keep(self._starts)
    log.close()

  def goodput(self, seconds: float) -> dict[str, float]:
    """Returns the fraction of time spent in kept steps.

    Args:
      seconds: time in kept steps, over all starts.

    Returns:
      `goodput` in [0, 1], `starts`, `lost_steps`, `lost_seconds`.
    """
    # Avoid 0 for a job shorter than the clock's resolution.
    wall = max(self._clock() - self._starts[0]['unix_time'], 1e-9)
    return {
      'goodput': min(1.0, seconds / wall),
      'starts': len(self._starts),
      'lost_steps': sum(s['lost_steps'] for s in self._starts),
      'lost_seconds': sum(s['lost_seconds'] for s in self._starts),
    }
