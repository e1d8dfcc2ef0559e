"""What stops a job whose updates are not finite.

The step itself skips such an update (`training.step`); here the job gives up
after too many in a row and leaves behind which rows they were.
"""

from collections import deque

import jax
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths

FILE = 'nonfinite-{process}.json'


class NonFiniteGuard:
  """Counts skipped updates and stops the job.

  Attributes:
    limit: skipped updates in a row that end the job.
  """

  def __init__(self, workdir: str, limit: int):
    self.limit = limit
    name = FILE.format(process=jax.process_index())
    self._path = paths.join(workdir, name)
    self._rows: deque[dict] = deque(maxlen=limit)

  def check(self, step: int, skipped_in_row: int, rows: np.ndarray) -> None:
    """Call with every step's count and the record rows of its batch.

    Raises:
      UserError: `limit` updates in a row were not finite.
    """
    if not skipped_in_row:
      self._rows.clear()
      return
    self._rows.append({'step': step, 'rows': np.asarray(rows).tolist()})
    if skipped_in_row >= self.limit:
      atomic.write_json(self._path, list(self._rows))
      raise errors.UserError(
        f'the last {skipped_in_row} updates were not finite, up to step'
        f' {step}; the job stops (config.train.max_skipped). The rows of'
        f' their batches are in {self._path}. Lower'
        ' config.optimizer.learning_rate or clip harder, and start again'
        ' from the last checkpoint.'
      )
