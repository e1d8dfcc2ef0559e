"""Distillation: a teacher's distribution, online, stored, or on own samples."""

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
from encdec_adapt.training.losses import loss
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.recipes import language_model_recipe, recipe
from encdec_adapt.training.sections import rollout_options


@dataclasses.dataclass(frozen=True)
class Rows(recipe.Rows):
  """Rows with the teacher's stored probabilities, if it is stored."""

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
  """Trains a student on the distribution of a teacher."""

  losses: ClassVar[type[loss.Loss]] = distillation_loss.Distillation
  sections: ClassVar[tuple[str, ...]] = ('rollouts',)

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
    made = sections.make_loss(
      is_stored=bool(stored), reads_windows=hides_spans and not stored
    )
    language_model_recipe.check_targets(sections, made)
    _check_teacher(sections, made)
    fields = dict(language_model_recipe.on_inputs(sections, made))
    if made.reads_windows:
      _check_windows(sections, made)
      fields['frame'] = framing.with_windows
    lengths, sampling = sections.data.train.lengths, None
    if made.on_policy:
      sampling = _sampling(sections, made)
      longest = max(lengths.decoder, sampling.tokens)
      lengths = dataclasses.replace(lengths, decoder=longest)
      logits = lengths.teacher if made.on_inputs else longest
      fields |= {'lengths': lengths, 'logits': logits}
    axes = sections.objectives[0].rows.axes | framing.STORED_AXES
    base = recipe.rows_of(sections, axes=axes, stored_teacher=stored, **fields)
    frozen = {} if stored else {loss.TEACHER: _teacher(sections, made)}
    return cls(
      made,
      token_metrics.TargetTokens(made.chunk),
      sections.model,
      Rows(**{x.name: getattr(base, x.name) for x in dataclasses.fields(base)}),
      frozen,
      sampling,
    )


def _teacher(
  sections: recipe.Sections, made: distillation_loss.Distillation
) -> recipe.FrozenModel:
  accepts = architectures.GENERATING
  # The others read the inputs, or later text, before they predict.
  if made.on_inputs or made.reads_windows:
    accepts = (architectures.CAUSAL_DECODER,)
  return recipe.FrozenModel(
    sections.teacher.checkpoint,
    accepts,
    # The usual teacher of an adapted pair is the decoder that it began as.
    model_config.without_cross_attention(sections.model.decoder),
    is_start=sections.teacher.checkpoint == sections.init.encoder != '',
    reads_windows=made.reads_windows,
  )


def _check_teacher(
  sections: recipe.Sections, made: distillation_loss.Distillation
) -> None:
  objectives = sections.objectives
  if not all(x.maker.teacher_reads and not x.masks_inputs for x in objectives):
    raise errors.UserError(
      f'{sections.chosen}; a teacher predicts the targets of prefix_lm, pairs,'
      ' chat and span corruption (ul2) only, without masks.'
    )
  # The options of the loss that a stored teacher serves are the defaults.
  standard = distillation_loss.Distillation()
  names = 'temperature', 'divergence', 'beta', 'on_policy', 'on_inputs'
  changed = [x for x in names if getattr(made, x) != getattr(standard, x)]
  if made.is_stored and changed:
    raise errors.UserError(
      f'config.teacher.checkpoint is {sections.teacher.checkpoint!r}, with'
      ' probabilities of the targets of its records at temperature 1, and'
      f' {loss.SECTION}distill has another {", ".join(changed)}; leave it out,'
      ' or name a model.'
    )


def _check_windows(
  sections: recipe.Sections, made: distillation_loss.Distillation
) -> None:
  is_text = all(x.maker.documents == 'text' for x in sections.objectives)
  reverse = made.divergence == 'reverse'
  if reverse or made.on_policy or made.on_inputs or not is_text:
    raise errors.UserError(
      f'{sections.chosen}: the teacher reads the text before spans were hidden,'
      f' and divergence is {made.divergence}, on_policy {made.on_policy:g} and'
      f' config.loss.on_inputs {made.on_inputs}; set divergence to forward or'
      ' js, leave out on_policy and on_inputs, and mix it with objectives of'
      ' texts only.'
    )


def _sampling(
  sections: recipe.Sections, made: distillation_loss.Distillation
) -> recipe.Sampling:
  """Returns the sampling of a completion for a share of the rows."""
  if made.share < 1:
    raise errors.UserError(
      f'{loss.SECTION}distill.share is {made.share} and on_policy'
      f' {made.on_policy}: cross-entropy to its own samples teaches a student'
      ' nothing; leave share at 1.'
    )
  options = sections.train.rollouts
  for name in ('samples', 'cut', 'max_kl'):
    value = getattr(options, name)
    if value != getattr(rollout_options.Rollouts(), name):
      raise errors.UserError(
        f'{rollout_options.LABEL}.{name} is {value!r}, which {loss.KIND}'
        f' {made.name!r} does not read: a row has a single completion, which'
        ' counts as it is; leave it out.'
      )
  return recipe.Sampling(
    1,
    options.tokens or sections.data.decoder_length,
    options.temperature,
    options.top_k,
    options.top_p,
    made.on_policy,
  )
