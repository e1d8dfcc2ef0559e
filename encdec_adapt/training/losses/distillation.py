"""Distillation from a teacher's distribution.

The teacher is a model (Gemma 2 report, section 3; on student samples and with
other divergences: GKD, arXiv:2306.13649), or the stored top probabilities of
each target (`data/records/stored_teacher.py`).

For span corruption (UL2), a causal teacher reads the uncorrupted text, and
predicts each target at its position in this text. Sentinels do not occur in
the text: their teacher distribution is one-hot (T5Gemma 2, arXiv:2512.14856:
one-hot at special tokens).
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from encdec_adapt.base import errors, keys
from encdec_adapt.objectives import framing
from encdec_adapt.ops import distillation_loss
from encdec_adapt.training.losses import cross_entropy, loss

_BETA = 0.5
_JS = 'js'


@dataclasses.dataclass(frozen=True)
class Distillation(cross_entropy.CrossEntropy):
  """Divergence from a teacher, mixed with cross-entropy to the data.

  Dropout applies to the student in both terms, but not to the teacher or to
  the sampling of completions.

  Attributes:
    is_stored: whether the teacher's probabilities are in the batch; else the
      teacher is a model.
    reads_windows: whether the teacher reads the uncorrupted text.
  """

  name: ClassVar[str] = 'distill'

  share: float = keys.key(
    1.0,
    "Share of the loss that is the divergence from the teacher's distribution"
    ' (Gemma 2 report, section 3: 1); the rest is cross-entropy to the data.',
    above=0,
    at_most=1,
  )
  temperature: float = keys.key(
    1.0, 'Temperature of both distributions.', above=0
  )
  divergence: str = keys.key(
    'forward',
    "'forward' (KL from teacher to student), 'reverse' or 'js', a generalised"
    ' Jensen-Shannon divergence.',
    one_of=distillation_loss.DIVERGENCES,
  )
  beta: float = keys.key(
    _BETA, "Weight of the teacher in the mixture of 'js'.", above=0, below=1
  )
  on_policy: float = keys.key(
    0.0,
    'Share of the rows whose targets are samples of the student'
    ' (config.train.rollouts).',
    at_least=0,
    at_most=1,
  )
  is_stored: bool = False
  reads_windows: bool = False

  def __post_init__(self):
    super().__post_init__()
    if self.beta != _BETA and self.divergence != _JS:
      raise errors.UserError(
        f'{loss.SECTION}distill.beta is {self.beta}, the weight of the teacher'
        f' in the mixture of divergence={_JS}, and the divergence is'
        f' {self.divergence}; leave it at {_BETA}.'
      )

  @property
  def references(self) -> tuple[str, ...]:
    """The teacher, unless its probabilities are stored."""
    return () if self.is_stored else (loss.TEACHER,)

  def teacher_batch(self, batch: loss.Batch) -> loss.Batch:
    """Returns the teacher's batch."""
    if not self.reads_windows:
      return batch
    names = 'tokens', 'segments', 'positions'
    row = {f'teacher_{name}': batch[f'window_{name}'] for name in names}
    # `sentinels` masks its output where the index is -1.
    index = jnp.maximum(batch['window_index'], 0)
    return {**batch, **row, 'teacher_index': index}

  def sentinels(self, batch: loss.Batch) -> Int[Array, 'B T'] | None:
    """Returns sentinel targets, -1 elsewhere; None without sentinels."""
    if not self.reads_windows:
      return None
    return jnp.where(batch['window_index'] < 0, batch['targets'], -1)

  def _teacher(
    self, frozen: loss.Readers, batch: loss.Batch
  ) -> distillation_loss.Distribution:
    if self.is_stored:
      return distillation_loss.StoredTeacher(
        batch[framing.STORED_IDS],
        batch[framing.STORED_PROBABILITIES],
        share=self.share,
      )
    # Pass the head, not logits: they are computed with the student's, chunked.
    outputs = frozen[loss.TEACHER](self.teacher_batch(batch))
    return distillation_loss.Teacher(
      outputs.hidden,
      outputs.table,
      self.sentinels(batch),
      softcap=outputs.config.final_softcap,
      share=self.share,
      temperature=self.temperature,
      divergence=self.divergence,
      beta=self.beta,
    )
