"""Stored models of a job: its sources, references and reward models.

Opening reads configs and headers, checks them before any long work, and plans
the initialisation of every weight; `read` then reads the weights. Imports no
evaluation or command.
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
  """Source models of a job's parameters.

  Attributes:
    init: section `init` of the configuration.
    compute: section `compute`.
    placement: the trained model and its mesh.
    models: the opened sources, the encoder's first; one entry if both stacks
      share it, none for random parameters.
    coverage: origin of every weight of an adaptation; None for other modes.
    base: frozen base of adapters; None without adapters.
  """

  init: init_section.InitConfig
  compute: execution.ComputeConfig
  placement: state_lib.Placement
  models: tuple[model_on_disk.StoredModel, ...]
  coverage: coverage_lib.Coverage | None
  base: frozen_base.FrozenBase | None = None

  @property
  def pretrained_folders(self) -> pretrained_files.Folders:
    """Source folders with the files that an export copies."""
    if not self.models:
      return {}
    encoder, decoder = self.models[0].path, self.models[-1].path
    if not self.placement.model.architecture.encodes_prompt:
      # The source may be a pair with files for both stacks.
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
    """Returns the compute cost of the sources and the reference models.

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
    """Checks the context length of a sampled model.

    Args:
      lengths: largest numbers of tokens of a prompt and a completion.

    Raises:
      UserError: a source has fewer positions.
    """
    kind = self.placement.model.architecture
    for source in self.models:
      _check_positions(source, kind, lengths, 'source')

  def check_files(self, choice: vocabulary_pair.Choice) -> None:
    """Checks the sources' tokenizers and the files that an export copies.

    Args:
      choice: the vocabularies of the job.

    Raises:
      UserError: a source was trained with another vocabulary, or a file is
        damaged.
    """
    pretrained_files.check(self.pretrained_folders)
    if self.models:
      sources = {'encoder': self.models[0], 'decoder': self.models[-1]}
      # Keyed by source and vocabulary, so that a shared source is checked and
      # reported once. Reversed, so that errors name the first stack.
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
    """Reads or initialises the parameters, sharded from the start.

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
    # Sources are sharded over the job's mesh, so that no device ever holds a
    # whole source.
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
    """Source of the optimizer state, its placement, and the coverage."""
    source, placement = self.models[0], self.placement
    mesh, rules = placement.mesh, placement.rules
    placed = setup.place_model(source.model, self.compute, mesh, rules)
    return source, placed, self.coverage

  def start(self, phases: phases_lib.Phases, seed: int) -> state_lib.TrainState:
    """Creates the initial train state.

    Args:
      phases: the phases of the job.
      seed: seed of random parameters and dropout masks.
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
  """Opens the sources of a job and plans the initialisation of every weight.

  Reads configs and headers only. With init.mode 'checkpoint', prints the
  settings that differ between the model and its source.

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
    # 'embeddings' is a baseline: the same pair with only the sources' tables.
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
  """An opened frozen model.

  Attributes:
    source: the opened model.
    placement: the model on the job's mesh.
  """

  source: model_on_disk.StoredModel
  placement: state_lib.Placement

  def read(self) -> base_model.Params:
    """Reads the parameters."""
    return self.source.read(self.placement)

  def digest(self, params: base_model.Params) -> str:
    """Returns a digest of the parameters returned by `read`.

    It is independent of the mesh, since integer sums are exact in any order,
    and of the files, which may differ in time stamps between hosts.
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
  """Reads the parameters of references; returns them and their digests.

  Args:
    references: the references by name.
    frozen: frozen base of adapters. It shares its arrays with references that
      are the base, or adapters over it.
    base: parameters of the base, as returned by `FrozenBase.read`.
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
  """Returns whether a reference can share the arrays of the frozen base.

  Model and dtype (`config.teacher.dtype`) must be equal.

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
  """Opens the frozen models of a recipe, by name.

  Args:
    frozen: frozen models of the recipe.
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
    frozen_model: the model as declared by the recipe.
    model: shape of the trained model.
    choice: the vocabularies of the job.
    lengths: tokens of a row.

  Raises:
    UserError: the recipe does not accept its architecture, its vocabulary
      differs, it has too few positions, or a teacher of uncorrupted text has
      sentinels that also encode text (bytes).
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
  """Opens a reward model for the trained model's completions.

  `inference.rewards.score` takes its parameters (`OpenedModel.read`).

  Args:
    path: a run or a folder.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: largest numbers of tokens of a prompt (with BOS) and a completion.

  Raises:
    UserError: it is not a reward model, or it has another vocabulary or too few
      positions.
  """
  model = placement.model.config
  source = _open(path, model)
  rewards.require_reward_model(source.model, path)
  # The decoder of a pair also reads BOS.
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
  # Kernels need lengths that are multiples of their block size.
  return dataclasses.replace(compute, attention='chunked', remat='none')


def _check_reads(
  source: model_on_disk.StoredModel,
  model: model_config.ModelConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
  title: str,
) -> None:
  """Checks the vocabularies and context length of a frozen model.

  Raises:
    UserError: the vocabularies differ, or rows exceed its context length.
  """
  for side, stack in source.model.stacks.items():
    # A stack missing in the trained model is compared with its decoder.
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
    dtype: dtype of its parameters; '' for the compute dtype.
    placement: the trained model and its mesh.
    compute: section `compute` of the configuration.
  """
  placed = setup.place_model(model, compute, placement.mesh, placement.rules)
  # Only trained parameters need float32, for small updates.
  return dataclasses.replace(placed, dtype=dtype or compute.dtype)


def _open(
  path: str, target: model_config.ModelConfig
) -> model_on_disk.StoredModel:
  multiple = target.decoder.vocab_multiple
  return model_on_disk.open_model(path, vocab_multiple=multiple)


def _check_same_model(
  source: model_on_disk.StoredModel, placement: state_lib.Placement
) -> None:
  """Checks that a checkpoint fits the model; prints settings that differ.

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
  # Settings without parameters, e.g. a window, may differ on purpose.
  if differences and distributed.is_lead():
    print('differs from its source: ' + '; '.join(differences))


def _check_vocabulary(
  source: model_on_disk.StoredModel, choice: vocabulary_pair.Choice, side: str
) -> None:
  """Checks that a source or teacher was trained with the job's vocabulary.

  `side` is its stack, 'encoder' or 'decoder'.

  Raises:
    UserError: the token ids encode different text.
  """
  path = choice.path(side)
  if source.vocabularies is not None:
    source_vocabularies.require_same_tokens(source, side, path, 'this job')
  elif distributed.is_lead():
    print(
      f'note: {source.path} has no tokenizer, so its ids are assumed to mean'
      f' what they mean in {path}.'
    )
