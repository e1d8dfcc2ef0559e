"""Distillation from an online or stored teacher, or on student samples."""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from encdec_adapt.base import errors
from encdec_adapt.data.records import stored_teacher
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import distillation as distillation_loss
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import language_model_recipe, recipe
from encdec_adapt.training.sections import rollout_options


@dataclasses.dataclass(frozen=True)
class Rows(recipe.Rows):
  """Rows with the probabilities of a stored teacher, if any."""

  def padding(
    self, ids: special_ids.Framing, *, teacher: bool
  ) -> framing.Batch:
    batch = super().padding(ids, teacher=teacher)
    if self.stored_teacher:
      spec, _ = stored_teacher.read_manifest(self.stored_teacher)
      length = self.lengths.decoder
      batch |= stored_teacher.filler(1, length, spec.tokens)
    return batch


@dataclasses.dataclass(frozen=True)
class Distillation(recipe.Recipe):
  """Trains a student on a teacher's distribution."""

  losses: ClassVar[type[loss_lib.Loss]] = distillation_loss.Distillation

  @classmethod
  def reads_prompts(cls, options: Mapping[str, Any]) -> bool:
    """Returns whether some targets are samples of the student."""
    return options['on_policy'] > 0

  @classmethod
  def of(cls, sections: recipe.Sections) -> 'Distillation':
    """Makes the recipe; see `recipe.Recipe.of`."""
    stored = sections.teacher.stored
    hides_spans = any(
      x.maker.teacher_reads == 'text' for x in sections.objectives
    )
    loss = sections.make_loss(
      is_stored=bool(stored), reads_windows=hides_spans and not stored
    )
    language_model_recipe.check_targets(sections, loss)
    _check_teacher(sections, loss)
    fields = dict(language_model_recipe.on_inputs(sections, loss))
    if loss.reads_windows:
      _check_windows(sections, loss)
      fields['transform'] = framing.with_windows
    lengths, sampling = sections.data.train.lengths, None
    if loss.on_policy:
      sampling = _sampling(sections, loss)
      longest = max(lengths.decoder, sampling.tokens)
      lengths = dataclasses.replace(lengths, decoder=longest)
      logits = lengths.teacher if loss.on_inputs else longest
      fields |= {'lengths': lengths, 'logits': logits}
    axes = sections.objectives[0].rows.axes | framing.STORED_AXES
    rows = recipe.rows_of(
      sections, Rows, axes=axes, stored_teacher=stored, **fields
    )
    frozen = {} if stored else {loss_lib.TEACHER: _teacher(sections, loss)}
    return cls(
      loss,
      token_metrics.TargetTokens(loss),
      sections.model,
      rows,
      frozen,
      sampling,
    )


def _teacher(
  sections: recipe.Sections, loss: distillation_loss.Distillation
) -> recipe.FrozenModel:
  accepts = architectures.GENERATING
  # Other architectures read the inputs, or later text, before they predict.
  if loss.on_inputs or loss.reads_windows:
    accepts = (architectures.CAUSAL_DECODER,)
  return recipe.FrozenModel(
    sections.teacher.checkpoint,
    accepts,
    # The usual teacher of an adapted pair is its source decoder.
    model_config.without_cross_attention(sections.model.decoder),
    is_start=sections.teacher.checkpoint == sections.init.encoder != '',
    reads_windows=loss.reads_windows,
  )


def _check_teacher(
  sections: recipe.Sections, loss: distillation_loss.Distillation
) -> None:
  objectives = sections.objectives
  if not all(x.maker.teacher_reads and not x.masks_inputs for x in objectives):
    raise errors.UserError(
      f'{sections.chosen}; a teacher predicts the targets of prefix_lm, pairs,'
      ' chat and span corruption (ul2) only, without masks.'
    )
  # A stored teacher supports only the default options of the loss.
  standard = distillation_loss.Distillation()
  names = 'temperature', 'divergence', 'beta', 'on_policy', 'on_inputs'
  changed = [x for x in names if getattr(loss, x) != getattr(standard, x)]
  if loss.is_stored and changed:
    raise errors.UserError(
      f'config.teacher.checkpoint is {sections.teacher.checkpoint!r}, with'
      ' probabilities of the targets of its records at temperature 1, and'
      f' config.loss has another {", ".join(changed)}; leave it at its default,'
      ' or name a model.'
    )


def _check_windows(
  sections: recipe.Sections, loss: distillation_loss.Distillation
) -> None:
  is_text = all(x.maker.documents == 'text' for x in sections.objectives)
  reverse = loss.divergence == 'reverse'
  if reverse or loss.on_policy or loss.on_inputs or not is_text:
    raise errors.UserError(
      f'{sections.chosen}: the teacher reads the text before spans were hidden,'
      f' and divergence is {loss.divergence}, on_policy {loss.on_policy:g} and'
      f' config.loss.on_inputs {loss.on_inputs}; set divergence to forward or'
      ' js, leave out on_policy and on_inputs, and mix it with objectives of'
      ' texts only.'
    )


def _sampling(
  sections: recipe.Sections, loss: distillation_loss.Distillation
) -> recipe.Sampling:
  """Returns sampling of one completion for a fraction of the rows."""
  if loss.share < 1:
    raise errors.UserError(
      f'{loss_lib.SECTION}distill.share is {loss.share} and on_policy'
      f' {loss.on_policy}: cross-entropy to its own samples teaches a student'
      ' nothing; leave share at 1.'
    )
  options = sections.train.rollouts
  for name in ('samples', 'cut', 'max_kl'):
    value = getattr(options, name)
    if value != getattr(rollout_options.Rollouts(), name):
      raise errors.UserError(
        f'{rollout_options.LABEL}.{name} is {value!r}, which {loss_lib.KIND}'
        f' {loss.name!r} does not read: a row has a single completion, which'
        ' counts as it is; leave it out.'
      )
  return recipe.Sampling(
    1,
    options.tokens or sections.data.decoder_length,
    options.temperature,
    options.top_k,
    options.top_p,
    loss.on_policy,
  )
