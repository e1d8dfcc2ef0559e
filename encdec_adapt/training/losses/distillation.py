"""Distillation from a teacher's distribution.

The teacher gives a model's whole distribution (Gemma 2 report, section 3; on
the student's samples and with other divergences GKD, arXiv:2306.13649), or a
few stored probabilities of each target (`data/records/stored_teacher.py`).

For span corruption (UL2), a causal teacher reads the uncorrupted text, and
predicts each target at its position in this text. Sentinels are not in the
text: their teacher distribution is one-hot (T5Gemma 2, arXiv:2512.14856:
one-hot at special tokens).
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from encdec_adapt.base import errors, keys
from encdec_adapt.data.records import stored_teacher
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import distillation_loss
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import cross_entropy, loss, rollout_options

_BETA = 0.5
_JS = 'js'


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of 'distill' in `config.loss.kind`."""

  divergence: str = keys.key(
    'forward', 'Divergence.', one_of=distillation_loss.DIVERGENCES
  )
  beta: float = keys.key(_BETA, "Teacher's weight.", above=0, below=1)
  on_policy: float = keys.key(
    0.0, 'Share of rows with sampled targets.', at_least=0, at_most=1
  )

  def __post_init__(self):
    keys.check(self, f'{loss.KIND}: ')
    if self.beta != _BETA and self.divergence != _JS:
      raise errors.UserError(
        f'{loss.KIND}: beta is {self.beta}, the weight of the teacher in'
        f' the mixture of divergence={_JS}, and the divergence is'
        f' {self.divergence}; leave it out.'
      )


@dataclasses.dataclass(frozen=True)
class Distillation(cross_entropy.CrossEntropy):
  """Divergence from a teacher, mixed with cross-entropy to the data.

  Dropout is that of the student, in both terms; the teacher and the sampler of
  the student's completions have none.

  Attributes:
    stored: folder of the stored teacher, whose probabilities are in the batch;
      '' where the teacher is a model.
    reads_windows: whether the teacher reads the text that spans were cut out
      of.
  """

  name: ClassVar[str] = 'distillation'
  forms: ClassVar[Mapping[str, type]] = {'distill': Options}
  axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = framing.STORED_AXES

  distillation: float = keys.key(
    0.0,
    "Share of the loss that is the divergence from the teacher's distribution"
    ' (Gemma 2 report, section 3: 1); the rest is cross-entropy to the data. 0'
    " is 1 with config.loss.kind='distill'.",
    at_least=0,
    at_most=1,
  )
  temperature: float = keys.key(
    1.0, 'Temperature of both distributions in distillation.', above=0
  )
  stored: str = ''
  reads_windows: bool = False

  def __post_init__(self):
    super().__post_init__()
    self.options  # noqa: B018  Checks the string.

  @functools.cached_property
  def options(self) -> Options:
    """The options in `kind`."""
    if self.kind_name not in self.forms:
      return Options()
    options, more = self.kind_parts
    if more:
      raise more[0][0].error(
        'cannot be added to distill; config.loss.distillation below 1 gives the'
        ' rest to cross-entropy'
      )
    return options

  @property
  def samples(self) -> bool:
    """Whether some targets are samples of the student."""
    return self.options.on_policy > 0

  def sampled_rows(self, rows: int) -> int:
    """Returns the number of rows with sampled targets, rounded up."""
    return math.ceil(self.options.on_policy * rows)

  def row_shape(self, lengths, answers):
    if self.samples:
      longest = max(lengths.decoder, self.rollouts.tokens)
      lengths = dataclasses.replace(lengths, decoder=longest)
    return lengths, answers

  @property
  def references(self) -> tuple[str, ...]:
    """The teacher, unless its probabilities are stored."""
    return () if self.stored else ('teacher',)

  def is_chosen(self, model: model_config.ModelConfig) -> bool:
    """Returns whether `kind` names it, or the teacher has a share."""
    # Any model may learn from a teacher.
    return super().is_chosen(model) or self.distillation > 0

  def for_objectives(self, objectives: loss.Objectives) -> 'Distillation':
    """Returns the loss with the teacher's rows; see `loss.Loss`."""
    hidden = any(objective.maker.hides_spans for objective in objectives)
    return dataclasses.replace(self, reads_windows=hidden)

  def with_stored_teacher(self, folder: str) -> 'Distillation':
    """Returns the loss of stored probabilities; see `loss.Loss`."""
    # The options of the loss that such a teacher serves are the defaults.
    is_served = self.options == Options() and self.temperature == 1
    if not is_served or self.on_inputs:
      raise errors.UserError(
        f'config.teacher.checkpoint is the stored teacher {folder}, which has'
        ' probabilities of the targets of its records at temperature 1, and'
        f' {loss.KIND} is {self.kind!r} with config.loss.temperature='
        f'{self.temperature} and on_inputs={self.on_inputs}; set'
        ' divergence=forward and temperature 1, leave out on_policy and'
        ' on_inputs, or name a model.'
      )
    return dataclasses.replace(self, stored=folder, reads_windows=False)

  @property
  def accepts(self) -> tuple[architectures.Architecture, ...]:
    """Architectures that predict the student's targets."""
    # The others read the inputs, or later text, before they predict.
    if self.on_inputs or self.reads_windows:
      return (architectures.CAUSAL_DECODER,)
    return super().accepts

  def assumed_reference(
    self, model: model_config.ModelConfig
  ) -> model_config.ModelConfig:
    """Returns a decoder-only model of the decoder's shape."""
    # The usual teacher of an adapted pair is the decoder that it began as.
    return model_config.without_cross_attention(model.decoder)

  def check(
    self, model: model_config.ModelConfig, objectives: loss.Objectives
  ) -> None:
    """Checks that a teacher can predict the targets.

    Raises:
      UserError: it cannot.
    """
    super().check(model, objectives)
    if not all(x.maker.distills and not x.masks_inputs for x in objectives):
      raise errors.UserError(
        f'the loss is {self.name} with objective'
        f' {" | ".join(map(str, objectives))!r}; a teacher predicts the targets'
        ' of prefix_lm, pairs, chat and span corruption (ul2) only, without'
        ' masks.'
      )
    if any(objective.maker.hides_spans for objective in objectives):
      self._check_windows(objectives)
    if self.samples:
      self._check_samples()

  def _check_windows(self, objectives: loss.Objectives) -> None:
    is_text = all(objective.documents == 'text' for objective in objectives)
    reverse = self.options.divergence == 'reverse'
    if reverse or self.samples or self.on_inputs or not is_text:
      raise errors.UserError(
        f'config.data.objective is {" | ".join(map(str, objectives))!r}, of'
        ' which the teacher reads the text before spans were hidden, and'
        f' {loss.KIND} is {self.kind!r} with config.loss.on_inputs='
        f'{self.on_inputs}; set divergence=forward or js, leave out on_policy'
        ' and on_inputs, and mix it with objectives of texts only.'
      )

  def _check_samples(self) -> None:
    if 0 < self.distillation < 1:
      raise errors.UserError(
        f'config.loss.distillation is {self.distillation} and {loss.KIND}'
        f' {self.kind!r}: cross-entropy to its own samples teaches a student'
        ' nothing; leave it 0.'
      )
    for name in ('samples', 'cut', 'max_kl'):
      value = getattr(self.rollouts, name)
      if value != getattr(rollout_options.Rollouts(), name):
        raise errors.UserError(
          f'{rollout_options.LABEL}: {name} is {value!r}, which {loss.KIND}'
          f' {self.kind!r} does not read: a row has a single completion, which'
          ' counts as it is; leave it out.'
        )

  def pad_batch(self, maker, lengths, ids, *, teacher):
    lengths, _ = self.row_shape(lengths, 1)
    batch = super().pad_batch(maker, lengths, ids, teacher=teacher)
    if self.stored:
      spec, _ = stored_teacher.read_manifest(self.stored)
      batch |= stored_teacher.filler(1, lengths.decoder, spec.tokens)
    return batch

  def frame(self, rows: loss.Rows, ids: special_ids.SideIds) -> loss.Rows:
    """Adds the text that a teacher reads; see `loss.Loss`."""
    rows = super().frame(rows, ids)
    return framing.with_windows(rows, ids) if self.reads_windows else rows

  def reference_batch(self, batch: loss.Batch) -> loss.Batch:
    """Puts the text in the place of the teacher's row; see `loss.Loss`."""
    if not self.reads_windows:
      return batch
    names = 'tokens', 'segments', 'positions'
    row = {f'teacher_{name}': batch[f'window_{name}'] for name in names}
    # `sentinels` hides its output where it predicts nothing.
    index = jnp.maximum(batch['window_index'], 0)
    return {**batch, **row, 'teacher_index': index}

  def sentinels(self, batch: loss.Batch) -> Int[Array, 'B T'] | None:
    """Returns targets that no teacher predicts, -1 at others; None for none."""
    if not self.reads_windows:
      return None
    return jnp.where(batch['window_index'] < 0, batch['targets'], -1)

  def teacher(
    self, references: Mapping[str, loss.Outputs], batch: loss.Batch
  ) -> distillation_loss.Distribution:
    """Returns the teacher's distribution."""
    share = self.distillation or 1.0
    if self.stored:
      return distillation_loss.StoredTeacher(
        batch[framing.STORED_IDS],
        batch[framing.STORED_PROBABILITIES],
        share=share,
      )
    # The head is passed whole: its logits are made with the student's.
    outputs = references['teacher']
    return distillation_loss.Teacher(
      outputs.hidden,
      outputs.table,
      self.sentinels(batch),
      softcap=outputs.config.final_softcap,
      share=share,
      temperature=self.temperature,
      divergence=self.options.divergence,
      beta=self.options.beta,
    )
