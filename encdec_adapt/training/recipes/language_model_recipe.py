"""Language modelling: cross-entropy to the targets of an objective."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import cross_entropy
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import classifier_recipe, recipe


@dataclasses.dataclass(frozen=True)
class LanguageModelling(recipe.Recipe):
  """Trains a language model on any objective with a single target."""

  losses: ClassVar[type[loss_lib.Loss]] = cross_entropy.CrossEntropy

  @classmethod
  def of(cls, sections: recipe.Sections) -> recipe.Recipe:
    """Makes the recipe; a classification recipe for objectives with labels."""
    if 'labels' in sections.objectives[0].options:
      return classifier_recipe.Classification.of(sections)
    loss = sections.make_loss()
    check_targets(sections, loss)
    metrics = token_metrics.TargetTokens(loss)
    rows = recipe.rows_of(sections, **on_inputs(sections, loss))
    return cls(loss, metrics, sections.model, rows)


def check_targets(
  sections: recipe.Sections, loss: cross_entropy.CrossEntropy
) -> None:
  """Checks that rows have single targets, and that `on_inputs` is possible.

  Raises:
    UserError: rows have several answers or texts; or `on_inputs` is set, but
      the model does not predict inputs, or inputs have masks.
  """
  objectives = sections.objectives
  if any(x.rows.answers > 1 or x.rows.content == 'texts' for x in objectives):
    raise errors.UserError(
      f'{sections.chosen}, whose rows have several answers or texts; choose a'
      ' loss that compares them (config.loss.kind), or another objective.'
    )
  # All objectives of a mixture have the same fields.
  architecture = sections.model.architecture
  content = objectives[0].rows.content
  predicts_inputs = architecture.predicts_inputs and content == 'pair'
  if loss.on_inputs and not predicts_inputs:
    raise errors.UserError(
      'config.loss.on_inputs is set with config.model.kind'
      f' {architecture.name} and objective'
      f' {" | ".join(map(str, objectives))!r}; only a causal decoder'
      ' (decoder_only) can predict the inputs of examples: others read them'
      ' before.'
    )
  if loss.on_inputs and any(x.masks_inputs for x in objectives):
    raise errors.UserError(
      'config.loss.on_inputs is set with objective'
      f' {" | ".join(map(str, objectives))!r}, of which inputs are masks that'
      ' the model would learn to predict; leave out on_inputs, or the masks.'
    )


def on_inputs(
  sections: recipe.Sections, loss: cross_entropy.CrossEntropy
) -> Mapping[str, Any]:
  """Returns overrides of `Rows` for `on_inputs`; {} without it."""
  if not loss.on_inputs:
    return {}
  logits = sections.data.train.lengths.teacher
  return {'transform': _with_targets_of_inputs, 'logits': logits}


def _with_targets_of_inputs(
  rows: framing.Batch, ids: special_ids.SideIds
) -> framing.Batch:
  return framing.on_all_tokens(rows, ids.pad)
