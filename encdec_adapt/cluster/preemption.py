"""Asks a job to stop when a machine is about to be taken away.

Launchers and clouds announce that with SIGTERM and kill the process some
30 seconds later. The training loop looks between steps, saves, and exits
with `app.RESTART`.

Of several processes often one alone is told, and all must save the same
step. JAX's own handler, installed by `distributed.initialize`, then passes
the notice on, and the processes agree on a step that none of them has begun.
"""

import signal
import types

import jax
from jax.experimental import multihost_utils


class StopSignal:
  """Context manager that turns SIGTERM into a step to stop after.

  Must be entered in the main thread (Python's rule for signal handlers). The
  handler that was there before is put back on exit.
  """

  def __init__(self):
    """Nothing is installed yet."""
    self._before: object = None
    self._received = False

  def __enter__(self) -> 'StopSignal':
    if jax.process_count() == 1:
      self._before = signal.signal(signal.SIGTERM, self._receive)
    return self

  def __exit__(self, *exception) -> None:
    if jax.process_count() == 1:
      # None: installed from C, and Python cannot put it back.
      before = signal.SIG_DFL if self._before is None else self._before
      signal.signal(signal.SIGTERM, before)

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    self._received = True

  def reached(self, step: int) -> bool:
    """Whether to stop after this step.

    Args:
      step: just taken. Every process asks after every step, once.

    Returns:
      With one process, whether the signal has come; with several, whether
      this is the step that they agreed on after it came to any of them.
    """
    if jax.process_count() == 1:
      return self._received
    return multihost_utils.reached_preemption_sync_point(step)
