"""Preferences: losses on log-probabilities of two answers."""

import dataclasses
from typing import ClassVar

from encdec_adapt.models import architecture as architectures
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.losses import preference
from encdec_adapt.training.metrics import comparison_metrics
from encdec_adapt.training.recipes import recipe


@dataclasses.dataclass(frozen=True)
class Preferences(recipe.Recipe):
  """Trains a model on pairs of answers, with any loss of `preference`."""

  losses: ClassVar[type[loss_lib.Loss]] = preference.Preference
  allows_dropout: ClassVar[bool] = False

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Preferences':
    """Makes the recipe; see `recipe.Recipe.of`."""
    recipe.require_comparisons(sections)
    loss = sections.make_loss()
    return cls(
      loss,
      comparison_metrics.Likelihoods(loss),
      sections.model,
      recipe.rows_of(sections),
      {name: reference(sections) for name in loss.references},
    )


def reference(sections: recipe.Sections) -> recipe.FrozenModel:
  """Returns the reference model, by default the initial model."""
  path = sections.start()
  return recipe.FrozenModel(
    path,
    architectures.GENERATING,
    sections.model,
    is_start=path in ('', sections.init.encoder),
  )
