"""Which checkpoints are kept, and how many exist at a time."""

import collections
from collections.abc import Iterable, Sequence
import dataclasses


@dataclasses.dataclass(frozen=True)
class Retention:
  """The rule by which old checkpoints are deleted.

  Attributes:
    keep: number of newest checkpoints that are kept, at least 1.
    keep_every: steps divisible by this are never deleted; 0 for none.
    keep_best: whether the step with the lowest held-out loss is kept too.
  """

  keep: int
  keep_every: int
  keep_best: bool = False

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
