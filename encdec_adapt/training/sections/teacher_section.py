"""The configuration section `teacher`: the frozen model of a loss."""

import dataclasses

from encdec_adapt.base import keys


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Keys of `config.teacher`."""

  checkpoint: str = keys.key(
    '',
    'The teacher, or the reference of preferences: a run, RUN@STEP, a Hugging'
    " Face folder or hf://ORG/NAME; '' for none, or for a reference the model"
    ' that training starts from (config.init.mode=checkpoint). stored:FOLDER'
    ' names what `materialize --teacher` has stored.',
  )
  dtype: str = keys.key(
    '',
    "Dtype in which its parameters are held: 'float32', 'bfloat16', or '' for"
    ' config.compute.dtype.',
    one_of=('', 'float32', 'bfloat16'),
  )

  def __post_init__(self):
    keys.check(self, 'config.teacher.')

  @property
  def stored(self) -> str:
    """Folder of a stored teacher; '' for a model or no teacher."""
    prefix = 'stored:'
    is_stored = self.checkpoint.startswith(prefix)
    return self.checkpoint.removeprefix(prefix) if is_stored else ''
