"""Which checkpoints stay, and how many there are at a time."""

import collections
from collections.abc import Iterable, Sequence
import dataclasses

from encdec_adapt.cli import errors


@dataclasses.dataclass(frozen=True)
class Retention:
  """What is kept of sealed steps.

  Attributes:
    keep: the newest so many; at least 1.
    keep_every: multiples of this step are kept for ever; None for none.
  """

  keep: int
  keep_every: int | None

  def __post_init__(self):
    """Raises `UserError` where a number is out of range."""
    if self.keep < 1:
      raise errors.UserError(
        f'keep is {self.keep}; keep at least 1 checkpoint.'
      )
    if self.keep_every is not None and self.keep_every < 1:
      raise errors.UserError(
        f'keep_every is {self.keep_every}; give a number of steps, or None.'
      )

  def retired(self, steps: Sequence[int]) -> list[int]:
    """Of sealed steps, ascending, those that are not kept."""
    return [s for s in steps[: -self.keep] if not self._is_for_ever(s)]

  def most(self, there: Sequence[int], saves: Iterable[int]) -> int:
    """The most steps that there are at a time, the one being written too.

    Args:
      there: steps that there are, ascending.
      saves: steps that are going to be saved, ascending; those that are not
        above `there` have been.
    """
    newest, for_ever = collections.deque(there), 0
    most = len(newest)
    for step in saves:
      if not newest or step > newest[-1]:
        newest.append(step)
        most = max(most, for_ever + len(newest))
        while len(newest) > self.keep:
          for_ever += self._is_for_ever(newest.popleft())
    return most

  def _is_for_ever(self, step: int) -> bool:
    return self.keep_every is not None and step % self.keep_every == 0
