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
  """

  keep: int
  keep_every: int

  def retired(self, steps: Sequence[int]) -> list[int]:
    """Returns which of these steps, in ascending order, are deleted."""
    return [s for s in steps[: -self.keep] if not self._is_for_ever(s)]

  def most(self, existing: Sequence[int], saves: Iterable[int]) -> int:
    """Returns the most steps that exist at a time, the one being written too.

    Args:
      existing: steps that exist, ascending.
      saves: steps that the job saves, ascending; those that are not above
        the existing ones are behind it.
    """
    newest, for_ever = collections.deque(existing), 0
    most = len(newest)
    for step in saves:
      if not newest or step > newest[-1]:
        newest.append(step)
        most = max(most, for_ever + len(newest))
        while len(newest) > self.keep:
          for_ever += self._is_for_ever(newest.popleft())
    return most

  def _is_for_ever(self, step: int) -> bool:
    return bool(self.keep_every) and step % self.keep_every == 0
