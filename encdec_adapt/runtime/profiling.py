"""Profiler traces of some steps, for TensorBoard and Perfetto, on request.

Asked for in the configuration (a first step and a number of them), or of a
job that is running, by SIGUSR1: then the next steps are traced.
"""

from collections.abc import Callable
import contextlib
import os
import signal
import types

import jax

from encdec_adapt.runtime import storage

FOLDER = 'profile'
ON_SIGNAL = 3  # Steps traced after SIGUSR1.


class Profiler:
  """Context manager around a loop that calls `before` and `after` each step.

  Must be entered in the main thread (Python's rule for signal handlers).
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    first: int,
    steps: int,
    *,
    writing: Callable[[int], None] = lambda step: None,
  ):
    """Traces nothing yet.

    Args:
      workdir: gets the folder `profile`.
      first: step that is traced first, from 0.
      steps: how many; 0 for none.
      writing: is told the step whose trace is about to be written, which to a
        bucket takes longer than a step.
    """
    self._folder = storage.join(workdir, FOLDER)
    self._staged: contextlib.ExitStack | None = None
    self._first, self._steps = first, steps
    self._writing = writing
    self._asked = False
    self._since = first  # Step that the last trace began with.
    self._until: int | None = None  # Traced before this step.
    self._handler = None

  def __enter__(self) -> 'Profiler':
    self._handler = signal.signal(signal.SIGUSR1, self._ask)
    return self

  def __exit__(self, *exception) -> None:
    self._stop()
    signal.signal(signal.SIGUSR1, self._handler or signal.SIG_DFL)

  def before(self, step: int) -> None:
    """Starts a trace where one is asked for; `step` is about to begin."""
    if self._until is not None:
      return
    steps = self._steps if step == self._first else 0
    if self._asked:
      self._asked, steps = False, max(steps, ON_SIGNAL)
    if steps:
      self._staged = contextlib.ExitStack()
      place = self._staged.enter_context(storage.staged(self._folder))
      jax.profiler.start_trace(str(place))
      self._since, self._until = step, step + steps

  def after(self, step: int, result: object) -> dict[str, str | int]:
    """Ends the trace when its last step, `step`, has made `result`.

    Returns:
      For the metrics, where a trace has ended: its `folder`, `first` and
      `last` step; otherwise nothing.
    """
    if self._until is None or step + 1 < self._until:
      return {}
    jax.block_until_ready(result)
    self._writing(step)
    self._stop()
    print(f'profile up to step {step}: {self._folder} (tensorboard, perfetto)')
    return {'folder': self._folder, 'first': self._since, 'last': step}

  def _stop(self) -> None:
    if self._until is not None:
      jax.profiler.stop_trace()
      self._staged.close()
      self._until = None

  def _ask(self, number: int, frame: types.FrameType | None) -> None:
    self._asked = True
