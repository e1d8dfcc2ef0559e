"""Classification: cross-entropy to the labels of the data."""

import dataclasses

from encdec_adapt.models import heads, model_config
from encdec_adapt.objectives import labelled
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import recipe


@dataclasses.dataclass(frozen=True)
class Classification(recipe.Recipe):
  """Trains a classifier: every labelled token is a target."""

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Classification':
    """Makes the recipe; the head gets the labels of the data."""
    objective, model = sections.objectives[0], sections.model
    # `config.check_kind` rejects other models.
    if model.architecture.name in heads.Labels.models:
      labels = len(objective.options['labels'])
      if issubclass(objective.maker, labelled.Tag):  # Labels of words.
        model = model_config.with_head(model, heads.Labels(labels))
      else:
        model = model_config.classifier(model, labels)
    loss = sections.make_loss()
    metrics = token_metrics.TargetTokens(loss)
    return cls(loss, metrics, model, recipe.rows_of(sections))
