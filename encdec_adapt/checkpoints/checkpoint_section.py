"""The configuration section `checkpoint`: save interval and retention."""

import collections
from collections.abc import Iterable, Sequence
import dataclasses

from encdec_adapt.base import intervals, keys


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Keys of `config.checkpoint`."""

  every: float = keys.key(
    100.0,
    "Steps between checkpoints, or below 1 a share of the job's steps; the last"
    ' step is always saved.',
    above=0,
    interval=True,
  )
  keep: int = keys.key(2, 'Newest checkpoints that are kept.', at_least=1)
  keep_every: int = keys.key(
    0,
    'Checkpoints of multiples of this step are kept too; 0: none.',
    at_least=0,
  )
  keep_best: bool = keys.key(
    False,
    'Keep the checkpoint with the lowest held-out loss (of preferences, the'
    ' highest accuracy; of policies, the highest greedy reward) too, the'
    ' earliest of several: every save is'
    ' evaluated first, but that of a preempted job, which is never the best.'
    ' Commands that read the work directory read the best; a job resumes from'
    ' the newest.',
  )

  def __post_init__(self):
    keys.check(self, 'config.checkpoint.')

  def interval(self, steps: int) -> int:
    """Returns the save interval of a job with the given number of steps."""
    return intervals.steps(self.every, steps)

  def retired(self, steps: Sequence[int], best: int | None) -> list[int]:
    """Returns the steps to delete, in ascending order.

    Args:
      steps: existing steps, ascending.
      best: step with the lowest held-out loss, if it is kept.
    """
    return [
      step
      for step in steps[: -self.keep]
      if step != best and not self._is_permanent(step)
    ]

  def peak_count(self, existing: Sequence[int], saves: Iterable[int]) -> int:
    """Returns the maximum number of steps on disk at any time.

    Args:
      existing: existing steps, ascending.
      saves: steps at which the job saves, ascending; steps up to the newest
        existing step are ignored.

    Returns:
      The count, including the step being written.
    """
    newest, permanent, old_best = collections.deque(existing), 0, False
    peak = len(newest)
    for step in saves:
      if not newest or step > newest[-1]:
        newest.append(step)
        # Counted before deletion: steps are deleted only once the new step is
        # complete, so a kill never leaves fewer than `keep`.
        peak = max(peak, permanent + old_best + len(newest))
        while len(newest) > self.keep:
          is_permanent = self._is_permanent(newest.popleft())
          permanent += is_permanent
          # Losses are unknown in advance: any step to be deleted may be the
          # best, and at most one best step is kept.
          old_best |= self.keep_best and not is_permanent
    return peak

  def _is_permanent(self, step: int) -> bool:
    return bool(self.keep_every) and step % self.keep_every == 0
