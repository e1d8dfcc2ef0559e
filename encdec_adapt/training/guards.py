"""Stops a job after too many consecutive non-finite gradients.

The step itself skips such an update (`training.step`); after too many in a row
the guard ends the job and writes a file with the record rows of their batches.
Imports `base` and `files` only.
"""

from collections import deque

import jax
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths


class NonFiniteGuard:
  """Counts skipped updates and stops the job.

  Attributes:
    limit: number of skipped updates in a row that ends the job.
  """

  def __init__(self, workdir: str, limit: int):
    self.limit = limit
    # Processes read different rows of a batch, so each has its file.
    self._path = paths.join(workdir, f'nonfinite-{jax.process_index()}.json')
    self._rows: deque[dict] = deque(maxlen=limit)

  def check(self, step: int, skipped_in_row: int, rows: np.ndarray) -> None:
    """Checks a step; call it for every step.

    Args:
      step: number of the step.
      skipped_in_row: skipped updates in a row up to this step.
      rows: record rows of this process in its batch.

    Raises:
      DivergedError: `limit` updates in a row were not finite.
    """
    # A single bad batch is skipped and forgotten: only an unbroken series shows
    # that the parameters or the learning rate are the cause.
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
