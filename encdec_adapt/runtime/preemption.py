"""Asks a job to stop when the machine is about to be taken away.

Launchers and clouds announce that with SIGTERM and kill the process some
30 seconds later. The handler only sets a flag: the training loop looks at
it between steps, saves, and exits with `app.RESTART`.
"""

from collections.abc import Sequence
import signal
import types


class StopSignal:
  """Context manager that turns signals into a flag.

  Must be entered in the main thread (Python's rule for signal handlers). The
  handlers that were there before are put back on exit.
  """

  def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)):
    """Names the signals; nothing is installed yet."""
    self._signals = tuple(signals)
    self._before: dict[signal.Signals, object] = {}
    self._received: signal.Signals | None = None

  def __enter__(self) -> 'StopSignal':
    for number in self._signals:
      self._before[number] = signal.signal(number, self._receive)
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._before.items():
      # None: installed from C, and Python cannot put it back.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    self._before.clear()

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    self._received = signal.Signals(number)

  def requested(self) -> bool:
    """Whether a signal has come since the handlers were installed."""
    return self._received is not None
