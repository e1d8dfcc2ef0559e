"""Source models of a job's parameters.

Opening reads configs and headers, checks them before any long work, and plans
the initialisation of every weight; `Sources.read` then reads the weights.
"""

import dataclasses
from typing import Any

import jax

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import array_plans, init_section, weight_plan
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.models import (
  base_model,
  execution,
  model_config,
  parameters,
)
from encdec_adapt.stored import (
  carried_state,
  frozen_base,
  model_on_disk,
  pretrained_files,
)
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job_models


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

  def check(
    self, settings: config_lib.Settings, phases: phases_lib.Phases
  ) -> None:
    """Checks tokenizers, files for exports, positions and optimizer state.

    Args:
      settings: the validated configuration.
      phases: the phases of the job.

    Raises:
      UserError: a source was trained with another vocabulary, a file is
        damaged, a source of a sampled model has too few positions, or the
        optimizer state cannot be carried over (`carried_state`).
    """
    pretrained_files.check(self.pretrained_folders)
    if self.models:
      self._check_vocabularies(settings.data.vocabularies)
    if settings.recipe.sampling:
      kind, lengths = settings.model.architecture, settings.recipe.rows.lengths
      for source in self.models:
        job_models.check_positions(source, kind, lengths, 'source')
    if self.init.optimizer == 'source':
      carried_state.check(*self._carried, phases)

  def _check_vocabularies(self, choice: vocabulary_pair.Choice) -> None:
    sources = {'encoder': self.models[0], 'decoder': self.models[-1]}
    # Keyed by source and vocabulary, so that a shared source is checked and
    # reported once. Reversed, so that errors name the first stack.
    sides = list(self.placement.model.config.stacks)
    if len(sides) == 1:
      sides = [self._stack]
    pairs = {}
    for side in reversed(sides):
      theirs = sources[side].vocabularies
      theirs = theirs and theirs.path(side)
      pairs[sources[side].path, theirs, choice.path(side)] = side
    for side in pairs.values():
      job_models.check_vocabulary(sources[side], choice, side)

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
      return array_plans.fill(target, self.coverage, *pairs, rng=rng)

    return self.placement.place(fill, rng, *params)

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
  models = tuple(job_models.open_source(folder, target) for folder in folders)
  report = base = None
  if init.mode == 'checkpoint':
    view = model_on_disk.view_for(models[0], target)
    _check_same_model(view, placement)
    if placement.adapters:
      base = frozen_base.open_base(models[0], placement)
  elif init.mode != 'random':
    if placement.model.architecture.encodes_prompt:
      model_on_disk.require_sources(models[0], models[-1])
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
  if differences:
    distributed.log('differs from its source: ' + '; '.join(differences))
