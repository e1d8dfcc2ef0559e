"""Stops a job at a preemption or Ctrl-C.

Launchers and clouds announce a preemption with SIGTERM and kill the process
some 30 seconds later. The training loop checks between steps, saves, and exits
with `exit_status.RESTART`.

Often only some processes get the signal, but all must save the same step. jax's
handler, installed by `distributed.initialize`, forwards the notice, and the
processes agree on a step that none has begun. No checkpoints are saved here.
Ctrl-C is treated as SIGTERM, and a second Ctrl-C ends the process immediately.
"""

import signal
import types

import jax
from jax.experimental import multihost_utils


class StopSignal:
  """Context manager that turns SIGTERM and Ctrl-C into a step to stop after.

  Must be entered in the main thread (Python's rule for signal handlers); the
  previous handlers are restored on exit.
  """

  def __init__(self):
    """Installs nothing yet."""
    self._previous: object = None
    self._interrupt: object = None
    self._received = False

  def __enter__(self) -> 'StopSignal':
    if jax.process_count() == 1:
      self._previous = signal.signal(signal.SIGTERM, self._receive)
    self._interrupt = signal.signal(signal.SIGINT, self._terminate)
    return self

  def __exit__(self, *exception) -> None:
    signal.signal(signal.SIGINT, self._interrupt)
    if jax.process_count() == 1:
      # None: installed from C, which Python cannot restore.
      signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    self._received = True

  def _terminate(self, number: int, frame: types.FrameType | None) -> None:
    # Restore first, so that the next Ctrl-C ends the process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print('interrupted: saves after this step; again to stop at once')
    signal.raise_signal(signal.SIGTERM)

  def reached(self, step: int) -> bool:
    """Returns whether to stop after this step.

    Args:
      step: the step just completed. Must be called by every process after every
        step.

    Returns:
      For a single process, whether the signal was received; otherwise, whether
      this is the agreed step after any process received it.
    """
    if jax.process_count() == 1:
      return self._received
    return multihost_utils.reached_preemption_sync_point(step)
