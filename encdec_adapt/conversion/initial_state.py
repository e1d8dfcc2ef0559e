"""Models on disk that a training job starts from: its sources and its teacher.

Opening reads configs and headers, checks them before any long work, and plans
how every weight is filled; `read` then reads the weights.
"""

import dataclasses

import jax

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import init_section, recipes, weight_plan
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.conversion import model_on_disk, pretrained_files
from encdec_adapt.models import (
  architecture,
  base_model,
  execution,
  model_config,
  parameters,
)
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import losses, setup, teacher_section
from encdec_adapt.training import state as state_lib


@dataclasses.dataclass(frozen=True)
class Sources:
  """The models that a job's parameters come from.

  Attributes:
    init: section `init` of the configuration.
    compute: section `compute`.
    where: the trained model and its mesh.
    models: the opened sources, the encoder's first; one where both stacks
      come from the same, none for random parameters.
    coverage: how every weight is filled by an adaptation; None for other
      modes.
  """

  init: init_section.InitConfig
  compute: execution.ComputeConfig
  where: state_lib.Placement
  models: tuple[model_on_disk.StoredModel, ...]
  coverage: coverage_lib.Coverage | None

  @property
  def kept_folders(self) -> pretrained_files.Folders:
    """Folders of the sources' files that an export carries along."""
    if not self.models:
      return {}
    encoder, decoder = self.models[0].path, self.models[-1].path
    if self.init.mode == 'checkpoint':
      return pretrained_files.folders(encoder)
    return pretrained_files.folders_of_pair(encoder, decoder)

  def check_files(self, choice: vocabulary_pair.Choice) -> None:
    """Checks the sources' tokenizers and the files that an export carries.

    Args:
      choice: the vocabularies of the job.

    Raises:
      UserError: a source was trained with another vocabulary, or a file is
        damaged.
    """
    pretrained_files.check(self.kept_folders)
    if self.models:
      of_side = {'encoder': self.models[0], 'decoder': self.models[-1]}
      pairs = {
        (of_side[side].path, choice.path(side)): side
        for side in reversed(self.where.model.config.stacks)
      }
      for side in pairs.values():
        _check_vocabulary(of_side[side], choice, side)

  def read(self, seed: int) -> base_model.Params:
    """Reads or draws the parameters; no device holds more than its shards.

    Args:
      seed: seed of the random parameters.
    """
    rng, target = jax.random.key(seed), self.where.model.config
    if self.init.mode == 'random':
      return self.where.place(lambda rng: parameters.init(target, rng), rng)
    if self.init.mode == 'checkpoint' and not target.decoder.classes:
      return self.models[0].read(self.where)
    mesh, rules = self.where.mesh, self.where.rules
    read = [
      source.read(setup.place_model(source.model, self.compute, mesh, rules))
      for source in self.models
    ]

    if target.decoder.classes:

      def classify(rng, params):
        """Makes a classifier of the source's first stack, with a new head."""
        first = self.models[0].prompt_side
        table = {'embedder': params['decoder']['embedder']}  # A shared one.
        head = parameters.init_one(target, rng, 'decoder/head/table')
        return {'decoder': {**table, **params[first], 'head': {'table': head}}}

      return self.where.place(classify, rng, *read)

    def fill(rng, *params):
      """Makes the target's parameters from those of its sources."""
      configs = (source.model for source in self.models)
      pairs = zip(configs, params, strict=True)
      return recipes.fill(target, self.coverage, *pairs, rng=rng)

    return self.where.place(fill, rng, *read)


def open_sources(
  init: init_section.InitConfig,
  compute: execution.ComputeConfig,
  where: state_lib.Placement,
) -> Sources:
  """Opens the sources of a job and plans how every weight is filled.

  Reads configs and headers only. With init.mode 'checkpoint', prints how the
  model's settings differ from its source's.

  Args:
    init: section `init` of the configuration.
    compute: section `compute`.
    where: the trained model and its mesh.

  Raises:
    UserError: a source is neither a Hugging Face folder nor a run with an
      undamaged checkpoint, or the model cannot start from it.
  """
  target = where.model.config
  folders = [folder for folder in (init.encoder, init.decoder) if folder]
  models = tuple(_open(folder, target) for folder in folders)
  report = None
  if init.mode == 'checkpoint':
    _check_same_model(_without_head(models[0], target), where)
  elif init.mode != 'random':
    for source in models:
      model_on_disk.require_decoder_only(source)
    fresh = init.mode == 'embeddings'
    report = weight_plan.make_plan(
      target,
      *(source.model for source in models),
      cross_attention=init.cross_attention,
      post_norm_gain=init.post_norm_gain,
      fresh=weight_plan.all_but_embeddings(target) if fresh else (),
    )
    report = model_on_disk.with_outside(report, models[0], models[-1])
  return Sources(init, compute, where, models, report)


@dataclasses.dataclass(frozen=True)
class Reference:
  """A frozen model that a loss reads.

  Attributes:
    source: the opened model.
    where: the model on the mesh of the job.
  """

  source: model_on_disk.StoredModel
  where: state_lib.Placement

  def read(self) -> base_model.Params:
    """Reads its parameters."""
    return self.source.read(self.where)


def open_references(
  loss: losses.loss.Loss,
  config: teacher_section.TeacherConfig,
  where: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
) -> dict[str, Reference]:
  """Opens the reference models of a loss by their names; most have none.

  Args:
    loss: the loss.
    config: section `teacher` of the configuration.
    where: the trained model and its mesh.
    compute: section `compute`.
    choice: the vocabularies of the job.

  Raises:
    UserError: see `open_reference`.
  """
  if not loss.references:
    return {}
  source = open_reference(loss, config, where.model.config, choice)
  placed = place_reference(source.model, config, where, compute)
  return dict.fromkeys(loss.references, Reference(source, placed))


def open_reference(
  loss: losses.loss.Loss,
  config: teacher_section.TeacherConfig,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
) -> model_on_disk.StoredModel:
  """Opens the model that `config.teacher` names.

  Raises:
    UserError: the loss does not accept its architecture, or it has another
      vocabulary.
  """
  source = _open(config.checkpoint, model)
  kind = source.model.architecture
  if kind not in loss.accepts:
    raise errors.UserError(
      f'config.teacher.checkpoint is {config.checkpoint!r}, a model of kind'
      f' {kind.name} with {source.model.decoder.outputs:,} outputs; the loss'
      f' {loss.name} reads models of kind {architecture.names(loss.accepts)}.'
    )
  for side, stack in source.model.stacks.items():
    size = model.stacks.get(side, model.decoder).vocab_size
    if stack.vocab_size != size:
      raise errors.UserError(
        f'the {side} of the teacher {source.path} has {stack.vocab_size} tokens'
        f' and that of the model {size}; both need one vocabulary.'
      )
    _check_vocabulary(source, choice, side)
  return source


def place_reference(
  model: model_config.ModelConfig,
  config: teacher_section.TeacherConfig,
  where: state_lib.Placement,
  compute: execution.ComputeConfig,
) -> state_lib.Placement:
  """Places a model on the mesh of the job, in the dtype it is held in."""
  placed = setup.place_model(model, compute, where.mesh, where.rules)
  return dataclasses.replace(placed, dtype=config.dtype or compute.dtype)


def _open(
  path: str, target: model_config.ModelConfig
) -> model_on_disk.StoredModel:
  """Opens a source or teacher, its tables padded as the model's own."""
  multiple = target.decoder.vocab_multiple
  return model_on_disk.open_model(path, vocab_multiple=multiple)


def _without_head(
  source: model_on_disk.StoredModel, target: model_config.ModelConfig
) -> model_on_disk.StoredModel:
  """Returns a classifier's source as the classifier that is made of it."""
  if not target.decoder.classes:
    return source
  prompt_stack = source.model.stacks[source.prompt_side]
  stack = dataclasses.replace(prompt_stack, classes=target.decoder.classes)
  model = model_config.DecoderOnlyConfig(stack)
  return dataclasses.replace(source, model=model)


def _check_same_model(
  source: model_on_disk.StoredModel, where: state_lib.Placement
) -> None:
  """Checks that a checkpoint fits the model that continues it.

  Prints settings in which the two differ.

  Raises:
    UserError: the shape of a parameter differs.
  """
  tables = where.model.table, parameters.parameter_table(source.model)
  own, theirs = ({p: i.shape for p, i in table.items()} for table in tables)
  found = model_config.differences(source.model, where.model.config)
  if own != theirs:
    raise errors.UserError(
      f'{source.path} is of another model than config.model:'
      f' {"; ".join(found) or "tables are padded differently"}. Set'
      ' config.model to that of the source.'
    )
  if found and distributed.is_lead():
    print('differs from its source: ' + '; '.join(found))


def _check_vocabulary(
  source: model_on_disk.StoredModel, choice: vocabulary_pair.Choice, side: str
) -> None:
  """Checks that a source or teacher was trained with the job's vocabulary.

  Args:
    source: the source of a stack or of the whole model.
    choice: the vocabularies of the job.
    side: the stack that is made from it, 'encoder' or 'decoder'.

  Raises:
    UserError: the token ids mean different text.
  """
  own = choice.path(side)
  if source.vocabularies is None:
    if distributed.is_lead():
      print(
        f'note: {source.path} has no tokenizer, so its ids are assumed to mean'
        f' what they mean in {own}.'
      )
    return
  model_on_disk.require_same_tokens(source, side, own, 'this job')
