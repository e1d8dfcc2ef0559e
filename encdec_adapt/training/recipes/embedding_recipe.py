"""Embeddings: vectors of texts, compared within a batch."""

import dataclasses
from typing import ClassVar

from encdec_adapt.base import errors
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import heads, model_config
from encdec_adapt.training.losses import infonce, loss
from encdec_adapt.training.metrics import query_metrics
from encdec_adapt.training.recipes import recipe

# Fields of `embed:` sources that have a weight of their name.
_FIELDS = ('scores', 'vectors')


@dataclasses.dataclass(frozen=True)
class Embeddings(recipe.Recipe):
  """Trains an embedding model on queries, positives and negatives."""

  losses: ClassVar[type[loss.Loss]] = infonce.InfoNce

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Embeddings':
    """Makes the recipe; see `recipe.Recipe.of`."""
    made = sections.make_loss()
    _check(sections, made)
    model = with_temperature(sections.model, made)
    stacks = architectures.CAUSAL_DECODER, architectures.ENCODER
    accepts = tuple(heads.Embedding().architecture(x) for x in stacks)
    path = sections.teacher.checkpoint
    start = path == sections.init.encoder != ''
    teacher = recipe.FrozenModel(path, accepts, model, is_start=start)
    return cls(
      made,
      query_metrics.Queries(made),
      model,
      recipe.rows_of(sections, logits=0, compared=True),
      {name: teacher for name in made.references},
    )


def with_temperature(
  model: model_config.ModelConfig, made: infonce.InfoNce
) -> model_config.ModelConfig:
  """Returns the model with a temperature among its parameters, if learnt."""
  if not made.learn_temperature:
    return model
  head = dataclasses.replace(model.decoder.head, temperature=made.temperature)
  return model_config.with_head(model, head)


def _check(sections: recipe.Sections, made: infonce.InfoNce) -> None:
  """Checks that rows have texts to embed, and the fields that are learnt.

  Raises:
    UserError: they have not, or vectors of another size than the model's; or a
      batch has a single row.
  """
  objectives, train = sections.objectives, sections.train
  if any(objective.rows.content != 'texts' for objective in objectives):
    raise errors.UserError(
      f"{sections.chosen}, which has no texts to embed; choose 'embed'."
    )
  decoder = sections.model.decoder
  size, *_ = decoder.head.sizes(decoder.width)
  vectors = {x.options.get('vectors', 0) for x in objectives}
  if made.vectors and vectors != {size}:
    raise errors.UserError(
      f'{sections.chosen} has vectors={max(vectors)}; to be learnt they must'
      f" have the {size} numbers of the model's, by its projections"
      ' (config.model.head).'
    )
  for key in ('batch_size', 'eval_batch_size'):
    if getattr(train, key) < 2:
      raise errors.UserError(
        f'config.train.{key} is 1 and {loss.KIND} is {made.name!r}, which'
        ' compares the rows of a batch with each other; set it to at least 2.'
      )
  read = {name: getattr(made, name) > 0 for name in _FIELDS}
  sections.data.check_fields(read, made.name)
