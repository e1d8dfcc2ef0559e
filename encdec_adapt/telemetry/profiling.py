"""Profiler traces of some steps, for TensorBoard and Perfetto, on request.

Asked for in the configuration (a first step and a number of them), or of a
job that is running, by SIGUSR1: then the next steps are traced. A trace that
cannot be written is warned of: no job ends for it.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import sys
import threading

import jax

from encdec_adapt.files import paths

FOLDER = 'profile'
ON_SIGNAL = 3  # Steps traced after SIGUSR1.

_asked = threading.Event()  # A signal is the whole process's.


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """SIGUSR1 asks for a trace here, and ends nothing before or after a loop.

  Must be entered in the main thread (Python's rule for signal handlers).
  """
  before = signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
  try:
    yield
  finally:
    signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)
    _asked.clear()


class Profiler:
  """Context manager around a loop that calls `before` and `after` each step."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    process: int | None,
    first: int,
    steps: int,
    *,
    writing: Callable[[int], None] = lambda step: None,
  ):
    """Traces nothing yet.

    Args:
      workdir: gets the folder `profile`.
      process: number of this one of several, each of which has a folder in
        there: what jax calls a trace tells only machines apart.
      first: step that is traced first, from 0.
      steps: how many; 0 for none.
      writing: is told the step whose trace is about to be written, which to a
        bucket takes longer than a step.
    """
    self._folder = paths.join(workdir, FOLDER)
    if process is not None:
      self._folder = paths.join(self._folder, f'process_{process}')
    self._staged: contextlib.ExitStack | None = None
    self._first, self._steps = first, steps
    self._writing = writing
    self._since = first  # Step that the last trace began with.
    self._until: int | None = None  # Traced before this step.

  def __enter__(self) -> 'Profiler':
    return self

  def __exit__(self, *exception) -> None:
    if self._until is not None:
      self._stop()

  def before(self, step: int) -> None:
    """Starts a trace where one is asked for; `step` is about to begin."""
    if self._until is not None:
      return
    steps = self._steps if step == self._first else 0
    if _asked.is_set():
      _asked.clear()
      steps = max(steps, ON_SIGNAL)
    if steps:
      self._start(step, steps)

  def after(self, step: int, result: object) -> dict[str, str | int]:
    """Ends the trace when its last step, `step`, has made `result`.

    Returns:
      For the metrics, where a trace has been written: its `folder`, `first`
      and `last` step; otherwise nothing.
    """
    if self._until is None or step + 1 < self._until:
      return {}
    jax.block_until_ready(result)
    self._writing(step)
    if not self._stop():
      return {}
    print(f'profile up to step {step}: {self._folder} (tensorboard, perfetto)')
    return {'folder': self._folder, 'first': self._since, 'last': step}

  def _start(self, step: int, steps: int) -> None:
    """Traces so many steps from this one."""
    staged = contextlib.ExitStack()
    try:
      place = staged.enter_context(paths.staged(self._folder))
      jax.profiler.start_trace(str(place))
    except Exception as error:
      self._warn(error)
      return
    self._staged = staged
    self._since, self._until = step, step + steps

  def _stop(self) -> bool:
    """Writes the trace; whether it could be."""
    self._until = None
    try:
      with self._staged:
        jax.profiler.stop_trace()
    except Exception as error:
      self._warn(error)
      return False
    return True

  def _warn(self, error: Exception) -> None:
    print(
      f'Warning: no profile in {self._folder}: {type(error).__name__}: {error}',
      file=sys.stderr,
      flush=True,
    )
