"""Progress lines of training jobs, transfers and evaluations.

This module must not import models: callers pass FLOPs and peaks.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import time
from typing import Any, TypeVar

from encdec_adapt.files import disk

# Called with the numbers of finished and of all examples.
Report = Callable[[int, int], Any]
T = TypeVar('T')


class Progress:
  """Measures rates over recent steps and formats the progress line.

  Model FLOPs per step come from `models/forward_flops.py`; "of peak" is model
  FLOPs utilization (MFU), without rematerialization.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    flops_per_step: float | None = None,
    peak: float | None = None,
    window: int = 20,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts without rates.

    Args:
      total_steps: number of steps of the job.
      flops_per_step: model FLOPs of one step over all devices.
      peak: total peak FLOP/s of all devices.
      window: number of steps to measure rates over.
      clock: returns seconds.
    """
    self._total = total_steps
    self._flops, self._peak = flops_per_step, peak
    self._clock = clock
    # (step, seconds, tokens): the end of each step of the window.
    self._marks = collections.deque[tuple[int, float, int]]([], window + 1)

  def update(self, step: int, tokens: int) -> None:
    """Records the end of a step with `tokens` tokens; `step` counts from 1."""
    total = tokens + (self._marks[-1][2] if self._marks else 0)
    self._marks.append((step, self._clock(), total))

  def restart(self) -> None:
    """Excludes all previous steps, and the time of the next step.

    The time of a step with compilation is not representative: the device may
    run it while the host still returns from the compiler.
    """
    self._marks.clear()

  def pause(self) -> None:
    """Excludes the time since the last update (evaluation, a save)."""
    pause = self._clock() - self._marks[-1][1]
    # Shift the marks, to keep their distances as without the pause.
    for index, (step, seconds, tokens) in enumerate(self._marks):
      self._marks[index] = (step, seconds + pause, tokens)

  def rates(self) -> dict[str, float]:
    """Returns `tokens_per_second`, and `mfu` if FLOPs and peak are known.

    Empty until two steps have ended since the last `restart`.
    """
    if len(self._marks) < 2:
      return {}
    rates = {'tokens_per_second': self._rate(2)}
    if self._flops and self._peak:
      rates['mfu'] = self._rate(0) * self._flops / self._peak
    return rates

  def line(self, *metrics: str) -> str:
    """Formats `step 40/200  loss 3.1416  12,345 tok/s ...`.

    Args:
      *metrics: names and values of metrics of the last step.
    """
    step, width = self._marks[-1][0], len(str(self._total))
    rates = self.rates()
    parts = [
      f'step {step:>{width}}/{self._total}',
      *metrics,
    ]
    if rates:
      parts.append(f'{rates["tokens_per_second"]:,.0f} tok/s')
    if 'mfu' in rates:
      parts.append(f'{rates["mfu"]:.0%} of peak')
    if rate := self._rate(0):
      parts.append(f'{format_seconds((self._total - step) / rate)} left')
    return '  '.join(parts)

  def _rate(self, column: int) -> float:
    first, last = self._marks[0], self._marks[-1]
    seconds = last[1] - first[1]
    return (last[column] - first[column]) / seconds if seconds > 0 else 0.0


class TimeLeft:
  """Estimates the remaining time of units with similar durations.

  Time and units count from the end of the first units, which include startup
  and compilation.
  """

  def __init__(
    self, at_once: int = 1, *, clock: Callable[[], float] = time.monotonic
  ):
    """Starts without an estimate.

    Args:
      at_once: number of concurrent units.
      clock: returns seconds.
    """
    self._at_once, self._clock = at_once, clock
    self._first: tuple[int, float] | None = None

  def __call__(self, count: int, total: int) -> str:
    """Returns the rate and the remaining time; '' if unknown or at the end.

    Args:
      count: number of finished units.
      total: number of all units.
    """
    now = self._clock()
    if self._first is None and count >= self._at_once:
      self._first = count, now
    # Concurrent units end together, so the rate is per round.
    first, start = self._first or (count, now)
    if count == total or count - first < self._at_once or now <= start:
      return ''
    rate = (count - first) / (now - start)
    return f'  {rate:.3g}/s  {format_seconds((total - count) / rate)} left'


class _TimedProgress:
  def __init__(
    self,
    activity: str,
    *,
    every: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      activity: the activity, such as 'reading', or a task.
      every: seconds between two lines.
      clock: returns seconds.
    """
    self._activity, self._every, self._clock = activity, every, clock
    self._start = self._last = clock()


class ByteProgress(_TimedProgress):
  """Prints the progress of a transfer every few seconds, and its total.

  Called by readers and writers with the transferred and the total bytes.
  """

  def __call__(self, count: int, total: int) -> None:
    """Prints a line every few seconds, and once all bytes are transferred."""
    now = self._clock()
    seconds = now - self._start
    rate = f'{disk.format_bytes(round(count / seconds))}/s' if seconds else ''
    if count == total:
      duration = f'in {format_seconds(seconds)}'
      parts = [f'{disk.format_bytes(total)} {duration}', rate]
    elif now - self._last >= self._every and count:
      remaining = format_seconds(seconds * (total - count) / count)
      size = f'{disk.format_bytes(count)} of {disk.format_bytes(total)}'
      parts = [size, rate, f'{remaining} left']
    else:
      return
    self._last = now
    print(f'{self._activity}: ' + '  '.join(filter(None, parts)))


class CountProgress(_TimedProgress):
  """Prints the progress of a list of examples every few seconds."""

  def __init__(self, activity: str, **options: Any):
    """Starts the clock; for the arguments, see `_TimedProgress`."""
    super().__init__(activity, **options)
    self._left = TimeLeft(clock=self._clock)

  def __call__(self, count: int, total: int) -> None:
    """Prints a line every few seconds.

    Args:
      count: number of finished examples.
      total: number of all examples.
    """
    left = self._left(count, total)
    now = self._clock()
    if not count or now - self._last < self._every:
      return
    self._last = now
    line = f'{self._activity}: {count:,} of {total:,} examples{left}'
    print(line, flush=True)


def format_seconds(seconds: float) -> str:
  """Formats a duration: `2h05m`, `3m07s`, `12s`."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}h{minutes:02}m'
  return f'{minutes}m{seconds:02}s' if minutes else f'{seconds}s'


def counted(items: Sequence[T], verb: str) -> Iterator[T]:
  """Yields items, and prints the number of each before it.

  From the second item on, the line shows the mean time per finished item.

  Args:
    items: the slow work items.
    verb: what is done to an item, such as 'compiling'.
  """
  start, each = time.monotonic(), ''
  for i, item in enumerate(items):
    if i:
      each = f', about {format_seconds((time.monotonic() - start) / i)} each'
    print(f'{verb} {i + 1}/{len(items)}{each}', flush=True)
    yield item
