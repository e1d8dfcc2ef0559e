"""Reward models: a scalar head, trained on preferences."""

import dataclasses
from typing import ClassVar

from encdec_adapt.models import model_config
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.losses import reward
from encdec_adapt.training.metrics import comparison_metrics
from encdec_adapt.training.recipes import recipe


@dataclasses.dataclass(frozen=True)
class RewardModel(recipe.Recipe):
  """Trains a model with a scalar head."""

  losses: ClassVar[type[loss_lib.Loss]] = reward.Reward
  allows_dropout: ClassVar[bool] = False

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'RewardModel':
    """Makes the recipe; see `recipe.Recipe.of`."""
    recipe.require_comparisons(sections)
    loss = sections.make_loss()
    return cls(
      loss,
      comparison_metrics.Comparisons(loss),
      model_config.reward_model(sections.model),
      recipe.rows_of(sections),
    )
