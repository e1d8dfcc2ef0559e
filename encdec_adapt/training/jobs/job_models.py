"""Models on disk that a job reads: its sources, references and reward models.

Opening reads configs and headers, checks them before any long work, and plans
how every weight is filled; `read` then reads the weights. The evaluation and
the commands are above this module.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import init_section, recipes, weight_plan
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.inference import rewards
from encdec_adapt.models import (
  architecture,
  base_model,
  execution,
  model_config,
  parameters,
)
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.stored import (
  carried_state,
  frozen_base,
  model_on_disk,
  pretrained_files,
  source_vocabularies,
)
from encdec_adapt.telemetry import compute_cost
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe
from encdec_adapt.training.sections import rollout_options


@dataclasses.dataclass(frozen=True)
class Sources:
  """The models that a job's parameters come from.

  Attributes:
    init: section `init` of the configuration.
    compute: section `compute`.
    placement: the trained model and its mesh.
    models: the opened sources, the encoder's first; a single entry if both
      stacks come from it, none for random parameters.
    coverage: how every weight is filled by an adaptation; None for other
      modes.
    base: the frozen base of a job that trains adapters; None for other jobs.
  """

  init: init_section.InitConfig
  compute: execution.ComputeConfig
  placement: state_lib.Placement
  models: tuple[model_on_disk.StoredModel, ...]
  coverage: coverage_lib.Coverage | None
  base: frozen_base.FrozenBase | None = None

  @property
  def pretrained_folders(self) -> pretrained_files.Folders:
    """Folders of the sources' files that an export carries along."""
    if not self.models:
      return {}
    encoder, decoder = self.models[0].path, self.models[-1].path
    if not self.placement.model.architecture.encodes_prompt:
      # The source may be a pair, which has the files of both stacks.
      files = pretrained_files.folders(encoder)
      folder = files.get(self._stack, files.get('decoder'))
      return {'decoder': folder} if folder else {}
    if self.init.mode == 'checkpoint':
      return pretrained_files.folders(encoder)
    return pretrained_files.folders_of_pair(encoder, decoder)

  @property
  def _stack(self) -> str:
    target = self.placement.model.config
    return model_config.source_stack(target, self.models[0].model)

  def costs(
    self, references: Iterable['OpenedModel'], log: Callable[[str], None]
  ) -> dict[str, Any]:
    """Returns the costs of the sources and of reference models.

    Args:
      references: the reference models.
      log: prints a line on process 0.
    """
    ancestors = [*self.models, *(x.source for x in references)]
    costs = compute_cost.read_sources({x.name: x.path for x in ancestors})
    for name in costs['not_counted']:
      log(f'the cost of {name} is unknown: the summary leaves it out')
    return costs

  def check_positions(self, lengths: framing.Lengths) -> None:
    """Checks that a model that samples has positions for prompt and completion.

    Args:
      lengths: most tokens of them.

    Raises:
      UserError: its source has fewer.
    """
    kind = self.placement.model.architecture
    for source in self.models:
      _check_positions(source, kind, lengths, 'source')

  def check_files(self, choice: vocabulary_pair.Choice) -> None:
    """Checks the sources' tokenizers and the files that an export carries.

    Args:
      choice: the vocabularies of the job.

    Raises:
      UserError: a source was trained with another vocabulary, or a file is
        damaged.
    """
    pretrained_files.check(self.pretrained_folders)
    if self.models:
      sources = {'encoder': self.models[0], 'decoder': self.models[-1]}
      # Source and vocabulary are a key, so that a source of both stacks is
      # checked, and noted, once. Reversed: the first stack names it in errors.
      sides = list(self.placement.model.config.stacks)
      if len(sides) == 1:
        sides = [self._stack]
      pairs = {
        (sources[side].path, choice.path(side)): side
        for side in reversed(sides)
      }
      for side in pairs.values():
        _check_vocabulary(sources[side], choice, side)

  def read(self, seed: int) -> base_model.Params:
    """Reads or draws the parameters; no device holds more than its shards.

    Args:
      seed: seed of the random parameters.
    """
    rng, target = jax.random.key(seed), self.placement.model.config
    if self.init.mode == 'random':
      return self.placement.place(lambda rng: parameters.init(target, rng), rng)
    if self.init.mode == 'checkpoint':
      source = model_on_disk.view_for(self.models[0], target)
      if source is self.models[0]:
        return source.read(self.placement)
      arrays = source.arrays()
      return state_lib.unflatten(
        model_on_disk.read_or_draw(arrays, self.placement, rng)
      )
    mesh, rules = self.placement.mesh, self.placement.rules
    # Sharded over the job's mesh as models of their kind, so that no device
    # holds a whole source while the target is made of them.
    params = [
      source.read(setup.place_model(source.model, self.compute, mesh, rules))
      for source in self.models
    ]

    def fill(rng, *params):
      configs = (source.model for source in self.models)
      pairs = zip(configs, params, strict=True)
      return recipes.fill(target, self.coverage, *pairs, rng=rng)

    return self.placement.place(fill, rng, *params)

  def check_optimizer(self, phases: phases_lib.Phases) -> None:
    """Checks that the optimizer state can be carried over, if requested.

    See `carried_state`.
    """
    if self.init.optimizer == 'source':
      carried_state.check(*self._carried, phases)

  @property
  def _carried(self) -> tuple[Any, ...]:
    """The source of the optimizer's state, on the mesh, and the coverage."""
    source, placement = self.models[0], self.placement
    mesh, rules = placement.mesh, placement.rules
    placed = setup.place_model(source.model, self.compute, mesh, rules)
    return source, placed, self.coverage

  def start(self, phases: phases_lib.Phases, seed: int) -> state_lib.TrainState:
    """Makes the state before the first step.

    Args:
      phases: the phases of the job.
      seed: seed of random parameters and of dropout's masks.
    """
    if self.base:
      return phases.create(self.base.start(self.models[0], seed), seed)
    state = {}
    if self.init.optimizer == 'source':
      state = carried_state.read(*self._carried, phases)
    return phases.create(self.read(seed), seed, **state)


def open_sources(
  init: init_section.InitConfig,
  compute: execution.ComputeConfig,
  placement: state_lib.Placement,
) -> Sources:
  """Opens the sources of a job and plans how every weight is filled.

  Reads configs and headers only. With init.mode 'checkpoint', prints how the
  model's settings differ from its source's.

  Args:
    init: section `init` of the configuration.
    compute: section `compute`.
    placement: the trained model and its mesh.

  Raises:
    UserError: a source is neither a Hugging Face folder nor a run with an
      undamaged checkpoint, or the model cannot start from it.
  """
  target = placement.model.config
  folders = filter(None, (init.encoder, init.decoder))
  models = tuple(_open(folder, target) for folder in folders)
  report = base = None
  if init.mode == 'checkpoint':
    view = model_on_disk.view_for(models[0], target)
    _check_same_model(view, placement)
    if placement.adapters:
      base = frozen_base.open_base(models[0], placement)
  elif init.mode != 'random':
    if placement.model.architecture.encodes_prompt:
      for source in models:
        model_on_disk.require_decoder_only(source)
    # 'embeddings' is the baseline of an adaptation: the same pair, in which
    # only the tables are those of the sources.
    fresh = init.mode == 'embeddings'
    report = weight_plan.make_plan(
      target,
      *(source.model for source in models),
      cross_attention=init.cross_attention,
      post_norm_gain=init.post_norm_gain,
      fresh=weight_plan.all_but_embeddings(target) if fresh else (),
    )
    report = model_on_disk.with_outside(report, models[0], models[-1])
  return Sources(init, compute, placement, models, report, base)


@dataclasses.dataclass(frozen=True)
class OpenedModel:
  """A frozen model that a loss reads.

  Attributes:
    source: the opened model.
    placement: the model on the mesh of the job.
  """

  source: model_on_disk.StoredModel
  placement: state_lib.Placement

  def read(self) -> base_model.Params:
    """Reads the parameters."""
    return self.source.read(self.placement)

  def digest(self, params: base_model.Params) -> str:
    """Returns a digest of the parameters that `read` returned.

    It does not depend on files, which another host may have copied at another
    time, nor on the mesh: sums of integers are exact in any order.
    """

    def total(leaf: jax.Array) -> jax.Array:
      kind = f'uint{8 * leaf.dtype.itemsize}'
      bits = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
      return jnp.sum(bits * bits + bits, dtype=jnp.uint32)

    everywhere = placement_lib.replicated(self.placement.mesh)
    sums = jax.jit(
      lambda params: jax.tree.map(total, params), out_shardings=everywhere
    )(params)
    leaves = jax.tree_util.tree_leaves_with_path(sums)
    text = {placement_lib.path_string(path): int(x) for path, x in leaves}
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def read_frozen(
  references: Mapping[str, OpenedModel],
  frozen: frozen_base.FrozenBase | None = None,
  base: base_model.Params | None = None,
) -> tuple[dict[str, base_model.Params], dict[str, str]]:
  """Reads the parameters of references; returns them, and their digests.

  Args:
    references: the references by name.
    frozen: the base of a job that trains adapters. A reference that is the
      base, or adapters over it, is made of the same arrays.
    base: parameters of that base, as `FrozenBase.read` returns them.
  """

  def read(reference: OpenedModel) -> base_model.Params:
    shares = frozen and shares_base(reference.placement, frozen.placement)
    if shares and frozen.shares(reference.source):
      start = frozen.start(reference.source)
      return frozen.placement.attach(base, start)
    return reference.read()

  params = {name: read(r) for name, r in references.items()}
  digests = {name: r.digest(params[name]) for name, r in references.items()}
  return params, digests


def shares_base(
  reference: state_lib.Placement, placement: state_lib.Placement
) -> bool:
  """Returns whether a reference can be made of a job's frozen base.

  It cannot if it is another model, or of another `config.teacher.dtype`.

  Args:
    reference: placement of the reference.
    placement: placement of the trained model, with its adapters.
  """
  dtype = jnp.dtype(placement.model.compute.dtype)
  same = reference.model == placement.model
  return same and jnp.dtype(reference.dtype) == dtype


def open_frozen(
  frozen: Mapping[str, recipe.FrozenModel],
  dtype: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> dict[str, OpenedModel]:
  """Opens the frozen models of a recipe by their names; most have none.

  Args:
    frozen: the models that the recipe declares.
    dtype: `config.teacher.dtype`.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: tokens of a row.

  Raises:
    UserError: see `open_frozen_model`.
  """
  sources = {
    name: open_frozen_model(
      frozen_model, placement.model.config, choice, lengths
    )
    for name, frozen_model in frozen.items()
  }
  return {
    name: OpenedModel(x, place_frozen_model(x.model, dtype, placement, compute))
    for name, x in sources.items()
  }


def open_frozen_model(
  frozen_model: recipe.FrozenModel,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> model_on_disk.StoredModel:
  """Opens a frozen model.

  Args:
    frozen_model: the model that the recipe declares.
    model: shape of the trained model.
    choice: the vocabularies of the job.
    lengths: tokens of a row.

  Raises:
    UserError: the recipe does not accept its architecture, or it has another
      vocabulary or fewer positions than rows have; or sentinels of a text that
      a teacher reads without them are bytes of it.
  """
  if frozen_model.reads_windows and vocabulary_pair.exists(choice.decoder):
    vocabulary = choice.open().decoder
    if {*vocabulary.sentinels} & {*vocabulary.text_ids.tolist()}:
      raise errors.UserError(
        'a teacher of span corruption reads the text without its sentinels, and'
        f' those of the vocabulary {choice.decoder} are bytes that text has,'
        ' too; distil prefix_lm or pairs (config.data.objective).'
      )
  source = _open(frozen_model.path, model)
  kind = source.model.architecture
  if kind not in frozen_model.accepts:
    raise errors.UserError(
      f'config.teacher.checkpoint is {frozen_model.path!r}, a model of kind'
      f' {kind.name} with {source.model.decoder.outputs:,} outputs; the loss'
      f' reads models of kind {architecture.names(frozen_model.accepts)}.'
    )
  _check_reads(source, model, choice, lengths, 'teacher')
  return source


def open_reward_model(
  path: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> OpenedModel:
  """Opens a reward model that scores the trained model's completions.

  Its parameters (`OpenedModel.read`) are for `inference.rewards.score`.

  Args:
    path: a run or a folder.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: most tokens of a prompt, BOS included, and of a completion.

  Raises:
    UserError: it is not a reward model, or it has another vocabulary or too few
      positions.
  """
  model = placement.model.config
  source = _open(path, model)
  rewards.require_reward_model(source.model, path)
  # The decoder of a pair reads BOS, too.
  decoder = lengths.decoder + source.model.architecture.encodes_prompt
  read = framing.Lengths(lengths.encoder, decoder)
  _check_reads(source, model, choice, read, 'reward model')
  placed = place_reward_model(source.model, placement, compute)
  return OpenedModel(source, placed)


def place_reward_model(
  model: model_config.ModelConfig,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
) -> state_lib.Placement:
  """Places a reward model on the mesh of the job."""
  return place_frozen_model(model, '', placement, scoring_compute(compute))


def scoring_compute(
  compute: execution.ComputeConfig,
) -> execution.ComputeConfig:
  """Returns the section `compute` of reward models."""
  # Kernels want lengths that are multiples of their blocks.
  return dataclasses.replace(compute, attention='chunked', remat='none')


def _check_reads(
  source: model_on_disk.StoredModel,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
  title: str,
) -> None:
  """Checks that a frozen model can read the rows of a job.

  Raises:
    UserError: the vocabularies differ, or rows are longer than its positions.
  """
  for side, stack in source.model.stacks.items():
    # A stack that the model lacks is compared with its only vocabulary.
    size = model.stacks.get(side, model.decoder).vocab_size
    if stack.vocab_size != size:
      raise errors.UserError(
        f'the {side} of the {title} {source.path} has {stack.vocab_size} tokens'
        f' and that of the model {size}; both need one vocabulary.'
      )
    _check_vocabulary(source, choice, side)
  _check_positions(source, source.model.architecture, lengths, title)


def _check_positions(source, kind, lengths, title) -> None:
  positions = kind.positions(lengths.encoder, lengths.decoder)
  for side, limit in pretrained_files.stack_positions(source).items():
    if positions.get(side, 0) > limit:
      raise errors.UserError(
        f'the {title} {source.path} has {limit} positions in its {side}'
        ' (max_position_embeddings of its config.json), and has to read'
        f' {positions[side]}: lower config.data.encoder_length'
        f' ({lengths.encoder}), decoder_length or tokens of'
        f' {rollout_options.LABEL}.tokens ({lengths.decoder}).'
      )


def place_frozen_model(
  model: model_config.ModelConfig,
  dtype: str,
  placement: state_lib.Placement,
  compute: execution.ComputeConfig,
) -> state_lib.Placement:
  """Places a frozen model on the mesh of the job.

  Args:
    model: its shape.
    dtype: dtype of its parameters; '' for that of `compute`.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
  """
  placed = setup.place_model(model, compute, placement.mesh, placement.rules)
  # No small updates are added to these parameters, as to those in training,
  # which are float32.
  return dataclasses.replace(placed, dtype=dtype or compute.dtype)


def _open(
  path: str, target: model_config.ModelConfig
) -> model_on_disk.StoredModel:
  multiple = target.decoder.vocab_multiple
  return model_on_disk.open_model(path, vocab_multiple=multiple)


def _check_same_model(
  source: model_on_disk.StoredModel, placement: state_lib.Placement
) -> None:
  """Checks that a checkpoint fits the model that continues it.

  Prints settings in which the two differ.

  Raises:
    UserError: a parameter's shape differs.
  """
  tables = placement.model.table, parameters.parameter_table(source.model)
  ours, theirs = ({p: i.shape for p, i in table.items()} for table in tables)
  differences = model_config.differences(source.model, placement.model.config)
  if ours != theirs:
    raise errors.UserError(
      f'{source.path} is of another model than config.model:'
      f' {"; ".join(differences) or "tables are padded differently"}. Set'
      ' config.model to that of the source.'
    )
  # Settings without parameters, such as a window, may be changed on purpose.
  if differences and distributed.is_lead():
    print('differs from its source: ' + '; '.join(differences))


def _check_vocabulary(
  source: model_on_disk.StoredModel, choice: vocabulary_pair.Choice, side: str
) -> None:
  """Checks that a source or teacher was trained with the job's vocabulary.

  `side` is the stack that it fills, 'encoder' or 'decoder'.

  Raises:
    UserError: the token ids mean different text.
  """
  path = choice.path(side)
  if source.vocabularies is not None:
    source_vocabularies.require_same_tokens(source, side, path, 'this job')
  elif distributed.is_lead():
    print(
      f'note: {source.path} has no tokenizer, so its ids are assumed to mean'
      f' what they mean in {path}.'
    )
