"""The configuration section `checkpoint`: when to save and what to keep."""

import collections
from collections.abc import Iterable, Sequence
import dataclasses

from encdec_adapt.cli import keys


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Keys of `config.checkpoint`."""

  every: int = keys.key(
    100, 'Steps between checkpoints; the last step is always saved.', at_least=1
  )
  keep: int = keys.key(2, 'Newest checkpoints that are kept.', at_least=1)
  keep_every: int = keys.key(
    0,
    'Checkpoints of multiples of this step are kept too; 0: none.',
    at_least=0,
  )
  keep_best: bool = keys.key(
    False,
    'Keep the checkpoint with the lowest held-out loss too, the earliest of'
    ' several: every save is evaluated first, but that of a preempted job,'
    ' which is never the best. Commands that read the work directory read the'
    ' best; a job resumes from the newest.',
  )

  def __post_init__(self):
    keys.check(self, 'config.checkpoint.')

  def retired(self, steps: Sequence[int], best: int | None) -> list[int]:
    """Returns which of these steps, in ascending order, are deleted.

    Args:
      steps: steps that exist, ascending.
      best: the one with the lowest held-out loss, if it is kept.
    """
    return [
      step
      for step in steps[: -self.keep]
      if step != best and not self._is_for_ever(step)
    ]

  def most(self, existing: Sequence[int], saves: Iterable[int]) -> int:
    """Returns the most steps that exist at a time, the one being written too.

    Args:
      existing: steps that exist, ascending.
      saves: steps that the job saves, ascending; those that are not above
        the existing ones are behind it.
    """
    newest, for_ever, best_of_old = collections.deque(existing), 0, 0
    most = len(newest)
    for step in saves:
      if not newest or step > newest[-1]:
        newest.append(step)
        most = max(most, for_ever + best_of_old + len(newest))
        while len(newest) > self.keep:
          ends = self._is_for_ever(newest.popleft())
          for_ever += ends
          best_of_old |= self.keep_best and not ends
    return most

  def _is_for_ever(self, step: int) -> bool:
    return bool(self.keep_every) and step % self.keep_every == 0
