"""The progress lines of a training job, and of a long transfer of bytes."""

import collections
from collections.abc import Callable
import time

from encdec_adapt.files import disk


class Progress:
  """Measures the rate over recent steps and writes the line.

  Model FLOPs per step come from `models/model_flops.py`; "of peak" is model
  FLOPs utilisation, without what rematerialisation adds.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    first_step: int = 0,
    flops_per_step: float | None = None,
    peak: float | None = None,
    window: int = 20,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock at `first_step` steps done.

    Args:
      total_steps: steps when the job is done.
      first_step: steps done already.
      flops_per_step: model FLOPs of one step over all devices.
      peak: FLOP/s of all devices together.
      window: over how many steps the rate is taken.
      clock: seconds.
    """
    self._total = total_steps
    self._flops, self._peak = flops_per_step, peak
    self._clock = clock
    # (step, seconds, tokens since the start)
    self._marks = collections.deque([(first_step, clock(), 0)], window + 1)

  def update(self, step: int, tokens: int) -> None:
    """Records that `step` steps are done, the last with `tokens` tokens."""
    total = self._marks[-1][2] + tokens
    self._marks.append((step, self._clock(), total))

  def pause(self) -> None:
    """Leaves the time since the last update out (evaluation, a save)."""
    step, seconds, _ = self._marks[-1]
    away = self._clock() - seconds
    for index, (mark, at, tokens) in enumerate(self._marks):
      self._marks[index] = (mark, at + away, tokens)

  @property
  def steps_per_second(self) -> float:
    """Over the recent steps; 0 before there are any."""
    return self._rate(0)

  @property
  def tokens_per_second(self) -> float:
    """Over the recent steps; 0 before there are any."""
    return self._rate(2)

  @property
  def utilisation(self) -> float | None:
    """Share of the peak, or None where FLOPs or peak are not known."""
    if not self._flops or not self._peak:
      return None
    return self.steps_per_second * self._flops / self._peak

  def rates(self) -> dict[str, float]:
    """For the metrics: `tokens_per_second`, and `mfu` where it is known."""
    known = {} if self.utilisation is None else {'mfu': self.utilisation}
    return {'tokens_per_second': self.tokens_per_second, **known}

  @property
  def seconds_left(self) -> float | None:
    """At the recent rate; None before there is one."""
    rate = self.steps_per_second
    return (self._total - self._marks[-1][0]) / rate if rate else None

  def line(self, loss: float, **more: float) -> str:
    """Writes `step 40/200  loss 3.1416  12,345 tok/s ...`.

    Args:
      loss: of the last step.
      **more: further values to show after the loss.
    """
    width = len(str(self._total))
    parts = [
      f'step {self._marks[-1][0]:>{width}}/{self._total}',
      f'loss {loss:.4f}',
      *(f'{name} {value:.4g}' for name, value in more.items()),
      f'{self.tokens_per_second:,.0f} tok/s',
    ]
    if self.utilisation is not None:
      parts.append(f'{self.utilisation:.0%} of peak')
    left = self.seconds_left
    parts.append('' if left is None else f'{format_seconds(left)} left')
    return '  '.join(part for part in parts if part)

  def _rate(self, column: int) -> float:
    first, last = self._marks[0], self._marks[-1]
    seconds = last[1] - first[1]
    return (last[column] - first[column]) / seconds if seconds > 0 else 0.0


class ByteProgress:
  """Prints how far a transfer is, every few seconds, and how it went.

  Called with the bytes done and those in all, as readers and writers report
  them. A transfer that is over at once prints one line.
  """

  def __init__(
    self,
    what: str,
    *,
    every: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
  ):
    """Starts the clock.

    Args:
      what: is being done, such as 'reading'.
      every: seconds between two lines.
      clock: seconds.
      say: takes a line.
    """
    self._what, self._every = what, every
    self._clock, self._say = clock, say
    self._start = self._last = clock()

  def __call__(self, done: int, total: int) -> None:
    """Reports; the call with all bytes done is the last."""
    now = self._clock()
    seconds = now - self._start
    rate = f'{disk.format_bytes(round(done / seconds))}/s' if seconds else ''
    if done == total:
      took = f'in {format_seconds(seconds)}'
      parts = [f'{self._what}: {disk.format_bytes(total)} {took}', rate]
    elif now - self._last >= self._every and done:
      left = format_seconds(seconds * (total - done) / done)
      of = f'{disk.format_bytes(done)} of {disk.format_bytes(total)}'
      parts = [f'{self._what}: {of}', rate, f'{left} left']
    else:
      return
    self._last = now
    self._say('  '.join(part for part in parts if part))


def format_seconds(seconds: float) -> str:
  """Writes a duration for people: `2h05m`, `3m07s`, `12s`."""
  whole = round(seconds)
  hours, minutes = whole // 3600, whole % 3600 // 60
  if hours:
    return f'{hours}h{minutes:02}m'
  return f'{minutes}m{whole % 60:02}s' if minutes else f'{whole}s'
