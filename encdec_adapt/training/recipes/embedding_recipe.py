"""Embeddings: text vectors trained with in-batch comparisons."""

import dataclasses
from typing import ClassVar

from encdec_adapt.base import errors
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import heads, model_config
from encdec_adapt.training.losses import infonce
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import query_metrics
from encdec_adapt.training.recipes import recipe

# Fields of `embed:` sources with a loss weight of the same name.
_FIELDS = ('scores', 'vectors')


@dataclasses.dataclass(frozen=True)
class Embeddings(recipe.Recipe):
  """Trains an embedding model on queries, positives and negatives."""

  losses: ClassVar[type[loss_lib.Loss]] = infonce.InfoNce

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Embeddings':
    """Makes the recipe; see `recipe.Recipe.of`."""
    loss = sections.make_loss()
    _check(sections, loss)
    model = with_temperature(sections.model, loss)
    stacks = architectures.CAUSAL_DECODER, architectures.ENCODER
    accepts = tuple(heads.Embedding().architecture(x) for x in stacks)
    path = sections.teacher.checkpoint
    start = path == sections.init.encoder != ''
    teacher = recipe.FrozenModel(path, accepts, model, is_start=start)
    return cls(
      loss,
      query_metrics.Queries(loss),
      model,
      recipe.rows_of(sections, logits=0, compared=True),
      {name: teacher for name in loss.references},
    )


def with_temperature(
  model: model_config.ModelConfig, loss: infonce.InfoNce
) -> model_config.ModelConfig:
  """Returns the model with a temperature parameter, if it is learnt."""
  if not loss.learn_temperature:
    return model
  head = dataclasses.replace(model.decoder.head, temperature=loss.temperature)
  return model_config.with_head(model, head)


def _check(sections: recipe.Sections, loss: infonce.InfoNce) -> None:
  """Checks that rows have texts and the fields of the loss.

  Raises:
    UserError: rows have no texts, vector sizes differ from the model's, or a
      batch has one row.
  """
  objectives, train = sections.objectives, sections.train
  if any(objective.rows.content != 'texts' for objective in objectives):
    raise errors.UserError(
      f"{sections.chosen}, which has no texts to embed; choose 'embed'."
    )
  decoder = sections.model.decoder
  size, *_ = decoder.head.sizes(decoder.width)
  vectors = {x.options.get('vectors', 0) for x in objectives}
  if loss.vectors and vectors != {size}:
    raise errors.UserError(
      f'{sections.chosen} has vectors={max(vectors)}; to be learnt they must'
      f" have the {size} numbers of the model's, by its projections"
      ' (config.model.head).'
    )
  for key in ('batch_size', 'eval_batch_size'):
    if getattr(train, key) < 2:
      raise errors.UserError(
        f'config.train.{key} is 1 and {loss_lib.KIND} is {loss.name!r}, which'
        ' compares the rows of a batch with each other; set it to at least 2.'
      )
  read = {name: getattr(loss, name) > 0 for name in _FIELDS}
  sections.data.check_fields(read, loss.name)
