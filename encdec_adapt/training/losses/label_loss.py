"""The loss of classifiers: their heads have a row for each label."""

import dataclasses
from typing import ClassVar

from encdec_adapt.models import model_config
from encdec_adapt.training.losses import cross_entropy


@dataclasses.dataclass(frozen=True)
class LabelLoss(cross_entropy.CrossEntropy):
  """Cross-entropy to labels: every labelled token is a target."""

  name: ClassVar[str] = 'label_loss'

  def is_chosen(self, model: model_config.ModelConfig) -> bool:
    """Returns whether the model is a classifier."""
    return model.decoder.classes > 0
