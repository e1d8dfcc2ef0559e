"""Time spent by a job: by part of a step, and goodput over all its starts.

`TimeSplit` divides the seconds between two records of metrics. `Starts` keeps a
line for every start of a job in `starts.jsonl`: its time, its step, and the
steps lost before it. From them follows the goodput, the share of the time
since the first start that went into steps that were kept. This module must not
import training.
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
# placing the batch and dispatching the step, or compile, the first time;
# device: waiting for results; evaluate; save.
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
    """Counts the time inside this context as spent on a part of `PARTS`."""
    began = self._clock()
    try:
      yield
    finally:
      self._spent[on] += self._clock() - began

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last call, in total and by part.

    The rest of the total is overhead of the loop.
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
  ):
    """Records this start.

    Args:
      folder: work directory.
      step: step that this start resumes from.
      lost: 'time' records of later steps, which are computed again.
      clock: returns Unix seconds.
    """
    self._clock = clock
    log = append_log.Log(paths.at(folder) / STARTS)
    start = {
      'unix_time': clock(),
      'step': step,
      'lost_steps': len(lost),
      'lost_seconds': sum(r.get(_PREFIX + 'total', 0.0) for r in lost),
    }
    self._starts = [*(record for record, _ in log.lines if record), start]
    # A rewrite, not an append: a kill may have left half a line at the end.
    log.keep(self._starts)
    log.close()

  def goodput(self, seconds: float) -> dict[str, float]:
    """Returns the share of time that went into steps that were kept.

    Args:
      seconds: time in those steps, over all starts.

    Returns:
      `goodput` in [0, 1], `starts`, `lost_steps`, `lost_seconds`.
    """
    # Not 0 in a job that ends within the clock's resolution.
    wall = max(self._clock() - self._starts[0]['unix_time'], 1e-9)
    return {
      'goodput': min(1.0, seconds / wall),
      'starts': len(self._starts),
      'lost_steps': sum(s['lost_steps'] for s in self._starts),
      'lost_seconds': sum(s['lost_seconds'] for s in self._starts),
    }
