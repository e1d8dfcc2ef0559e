"""The configuration section `checkpoint`: when to save and what to keep."""

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
