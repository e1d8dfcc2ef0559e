"""Profiler traces of some steps, for TensorBoard and Perfetto.

The configuration sets the first step and the number of steps; SIGUSR1 makes a
running job trace the next `ON_SIGNAL` steps. If a trace cannot be written, the
job prints a warning and continues. This module must not import training.
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

_request = threading.Event()  # A signal goes to the whole process.


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """Makes SIGUSR1 request a trace in this context.

  Must be entered in the main thread (Python's rule for signal handlers).
  """
  previous = signal.signal(signal.SIGUSR1, lambda *_: _request.set())
  try:
    yield
  finally:
    # None is a handler not set from Python.
    signal.signal(signal.SIGUSR1, previous or signal.SIG_DFL)
    _request.clear()


class Profiler(contextlib.AbstractContextManager):
  """Context manager to trace steps of a loop."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    process: int | None,
    first: int,
    steps: int,
    *,
    writing: Callable[[int], None] = lambda step: None,
  ):
    """Stores the steps to trace.

    Args:
      workdir: parent of the folder `profile`.
      process: index of this process, for a subfolder, as jax names traces only
        by machine; None for a single-process job.
      first: 0-based first step to trace.
      steps: number of steps to trace; 0 for none.
      writing: called with the step before writing its trace, which may take
        longer than a step.
    """
    self._folder = paths.join(workdir, FOLDER)
    if process is not None:
      self._folder = paths.join(self._folder, f'process_{process}')
    self._staged: contextlib.ExitStack | None = None
    self._first, self._steps = first, steps
    self._writing = writing
    self._until: int | None = None  # The trace ends before this step.

  def __exit__(self, *exception) -> None:
    if self._until is not None:
      self._stop()

  def begin_step(self, step: int) -> None:
    """Starts a trace if `step` or a signal requests it."""
    if self._until is not None:
      return
    steps = self._steps if step == self._first else 0
    if _request.is_set():
      _request.clear()
      steps = max(steps, ON_SIGNAL)
    if steps:
      self._start(step, steps)

  def end_step(self, step: int, result: object) -> None:
    """Ends the trace if `step` is its last step.

    Args:
      step: the step that was dispatched.
      result: results of the step.
    """
    if self._until is None or step + 1 < self._until:
      return
    # Dispatch is asynchronous: the trace must cover the execution of the step.
    jax.block_until_ready(result)
    self._writing(step)
    if self._stop():
      print(
        f'profile up to step {step}: {self._folder} (tensorboard, perfetto)'
      )

  def _start(self, step: int, steps: int) -> None:
    with self._warned(), contextlib.ExitStack() as staged:
      folder = staged.enter_context(paths.staged(self._folder))
      jax.profiler.start_trace(str(folder))
      # The staged folder is uploaded when the trace ends.
      self._staged, self._until = staged.pop_all(), step + steps

  def _stop(self) -> bool:
    # Reset before the write, so that a failure leaves no open trace.
    self._until = None
    with self._warned():
      with self._staged:
        jax.profiler.stop_trace()
      return True
    return False

  @contextlib.contextmanager
  def _warned(self) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      print(
        f'Warning: no profile in {self._folder}:'
        f' {type(error).__name__}: {error}',
        file=sys.stderr,
        flush=True,
      )
