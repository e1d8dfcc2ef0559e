"""Stops a job after too many consecutive non-finite gradients.

The step itself skips such updates (`training.step`); after too many in a row,
the guard stops the job and writes the record rows of their batches to a file.
Imports only `base` and `files`.
"""

from collections import deque

import jax
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths


class NonFiniteGuard:
  """Counts skipped updates and stops the job.

  Attributes:
    limit: number of consecutive skipped updates that stops the job.
  """

  def __init__(self, workdir: str, limit: int):
    self.limit = limit
    # One file per process: processes read different rows of a batch.
    self._path = paths.join(workdir, f'nonfinite-{jax.process_index()}.json')
    self._rows: deque[dict] = deque(maxlen=limit)

  def check(self, step: int, skipped_in_row: int, rows: np.ndarray) -> None:
    """Checks a step; call it for every step.

    Args:
      step: number of the step.
      skipped_in_row: consecutive skipped updates up to this step.
      rows: this process's record rows in the batch of the step.

    Raises:
      DivergedError: `limit` consecutive updates were not finite.
    """
    # A single bad batch is tolerated: only an unbroken series points at the
    # parameters or the learning rate.
    if not skipped_in_row:
      self._rows.clear()
      return
    # JSON has no NumPy integers.
    self._rows.append({'step': step, 'rows': np.asarray(rows).tolist()})
    if skipped_in_row >= self.limit:
      atomic.write_json(self._path, list(self._rows))
      raise errors.DivergedError(
        f'the last {skipped_in_row} updates were not finite, up to step'
        f' {step}; the job stops (config.train.max_skipped). The rows of'
        f' their batches are in {self._path}. Lower'
        ' config.optimizer.learning_rate or clip harder, and start again'
        ' from the last checkpoint.'
      )
