"""Distillation from a teacher's whole distribution (Gemma 2 report, sec. 3)."""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import model_config
from encdec_adapt.ops import distillation_loss
from encdec_adapt.training.losses import cross_entropy, loss


@dataclasses.dataclass(frozen=True)
class Distillation(cross_entropy.CrossEntropy):
  """Cross-entropy to a teacher, mixed with cross-entropy to the data."""

  name: ClassVar[str] = 'distillation'
  references: ClassVar[tuple[str, ...]] = ('teacher',)

  distillation: float = keys.key(
    0.0,
    "Share of the loss that is cross-entropy to the teacher's full"
    ' distribution (Gemma 2 report, section 3: 1); the rest is cross-entropy'
    ' to the data.',
    at_least=0,
    at_most=1,
  )
  temperature: float = keys.key(
    1.0, 'Temperature of both distributions in distillation.', above=0
  )

  def is_chosen(self, model: model_config.ModelConfig) -> bool:
    """Returns whether the teacher has a share."""
    del model  # Any model may learn from a teacher.
    return self.distillation > 0

  @property
  def accepts(self) -> tuple[architectures.Architecture, ...]:
    """Architectures that predict the student's targets."""
    if self.on_inputs:  # The others read the inputs before they predict.
      return (architectures.CAUSAL_DECODER,)
    # An encoder predicts masked tokens, a classifier labels.
    return architectures.GENERATING

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
    if not all(objective.maker.distills for objective in objectives):
      raise errors.UserError(
        f'config.loss.distillation is {self.distillation} with objective'
        f' {" | ".join(map(str, objectives))!r}; a teacher predicts the targets'
        ' of prefix_lm only.'
      )

  def teacher(
    self, references: Mapping[str, loss.Outputs]
  ) -> distillation_loss.Teacher:
    """Returns the teacher's distribution."""
    # The head is passed whole: its logits are made with the student's.
    outputs = references['teacher']
    return distillation_loss.Teacher(
      outputs.hidden,
      outputs.table,
      softcap=outputs.config.final_softcap,
      share=self.distillation,
      temperature=self.temperature,
    )
