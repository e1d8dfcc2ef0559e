"""Abstract programs of a job, for compilation by a plan.

A teacher without a path has the shape that the loss assumes: the decoder's, for
distillation. This module must not read weights or data, and must not import
chips: it only knows a mesh.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.inference import decoding, rewards
from encdec_adapt.models import build, layers, model_config
from encdec_adapt.models import forward_flops as formula
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.objectives import framing
from encdec_adapt.ops import partition
from encdec_adapt.planner import program_shapes, reward_models
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import (
  rollouts,
  setup,
  step_estimate,
  workload,
)
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job_models
from encdec_adapt.training.jobs import resolved as resolved_lib
from encdec_adapt.training.recipes import recipe as recipe_lib


@dataclasses.dataclass(frozen=True)
class Job:
  """A program of a configuration, on a mesh.

  Attributes:
    name: 'train', 'eval', 'decode', or for policies 'sample' and 'reward'.
    mesh: mesh of devices or stand-ins; abstract if nothing is compiled.
    settings: the validated configuration.
    resolved: values derived from devices and steps.
    frozen: the job's frozen models, by name.
    examples: examples per row; GPU attention skips keys of other examples.
  """

  name: str
  mesh: Mesh | AbstractMesh
  settings: config_lib.Settings
  resolved: resolved_lib.Resolved
  frozen: Mapping[str, recipe_lib.FrozenModel]
  examples: int = 1

  @classmethod
  def of(
    cls,
    name: str,
    settings: config_lib.Settings,
    platform: str,
    mesh: Mesh | AbstractMesh,
    examples: int = 1,
    frozen: Mapping[str, recipe_lib.FrozenModel] | None = None,
  ) -> 'Job':
    """Creates a program of a configuration on a mesh.

    Args:
      name: name of the program.
      settings: the configuration.
      platform: 'cpu', 'gpu' or 'tpu'; CPU devices may stand in for GPUs.
      mesh: the mesh.
      examples: examples per row.
      frozen: the frozen models; defaults to the recipe's.

    Raises:
      UserError: the configuration has no such program.
    """
    recipe, compute = settings.recipe, settings.compute.on(platform)
    if name == 'reward':
      compute = job_models.scoring_compute(compute)
    steps = settings.train.steps
    resolved = resolved_lib.Resolved.of(settings, compute, steps)
    frozen = recipe.frozen if frozen is None else frozen
    job = cls(name, mesh, settings, resolved, frozen, examples)
    if name == 'sample' and not recipe.sampling:
      raise errors.UserError(
        f'--programs={name}: the loss {recipe.loss.name} samples no'
        ' completions; leave it out.'
      )
    if name == 'decode':
      job.model.architecture.require_generation(
        f'--programs={name}: the model', 'leave it out'
      )
    if name == 'reward' and not job.rewards.placed:
      raise errors.UserError(
        f'--programs={name}: config.train.rewards.models is'
        f' {settings.train.rewards.models!r}, or the loss {recipe.loss.name}'
        ' reads no rewards; name a checkpoint there, or leave out the program.'
      )
    return job

  def with_remat(self, policy: str) -> 'Job':
    """Returns the job with another remat policy."""
    compute = dataclasses.replace(self.resolved.compute, remat=policy)
    resolved = dataclasses.replace(self.resolved, compute=compute)
    return dataclasses.replace(self, resolved=resolved)

  @property
  def model(self) -> model_config.ModelConfig:
    """Config of the trained model."""
    return self.settings.model

  @property
  def recipe(self) -> recipe_lib.Recipe:
    """The kind of training."""
    return self.settings.recipe

  @property
  def trains(self) -> bool:
    """Whether the program updates parameters."""
    return self.name == 'train'

  @property
  def decodes(self) -> bool:
    """Whether the program is a decoding step."""
    return self.name in ('decode', 'sample')

  @functools.cached_property
  def program_rules(self) -> rules_lib.Rules:
    """Sharding rules of the program."""
    if self.name == 'sample':
      return rollouts.sampling_rules(self.placed_model)
    # The sequence axis divides neither the single token of a decoding step nor
    # a completion with BOS.
    if self.decodes or self.name == 'reward':
      return dataclasses.replace(self.settings.rules, length=())
    return self.settings.rules

  @property
  def rows(self) -> int:
    """Global batch size, in rows."""
    if self.name == 'sample':
      sampling = self.recipe.sampling
      rows = sampling.rows(self.settings.train.batch_size) * sampling.samples
      # Padded to a multiple of the shards, as in sampling.
      shards = self.settings.rules.on(self.mesh).size('batch')
      return -(-rows // shards) * shards
    if self.trains or self.name == 'reward':
      return self.settings.train.batch_size
    return self.settings.train.eval_batch_size

  @property
  def axes(self) -> placement.BatchAxes:
    """Logical axes of batch fields, see `placement.batch_axes`."""
    if self.trains:
      return self.recipe.rows.axes
    return self.settings.data.objectives[0].rows.axes

  @property
  def lengths(self) -> framing.Lengths:
    """Tokens per row; for decoding, positions of the decoder."""
    lengths = self.settings.data.train.lengths
    if self.trains:
      return self.recipe.rows.lengths
    if self.name == 'reward':
      # The decoder also reads BOS.
      return framing.Lengths(lengths.encoder, self.recipe.sampling.tokens + 1)
    if not self.decodes:
      return lengths
    sampled = self.name == 'sample'
    tokens = self.recipe.sampling.tokens if sampled else lengths.decoder
    positions = self.model.architecture.positions(lengths.encoder, tokens)
    return framing.Lengths(lengths.encoder, positions['decoder'])

  @property
  def answers(self) -> int:
    """Answers per row."""
    if self.trains or self.name == 'reward':
      return self.recipe.rows.answers
    return self.settings.data.objectives[0].rows.answers

  @property
  def models(self) -> tuple[model_config.ModelConfig, ...]:
    """Configs of the program's models: trained and references, or reward."""
    if self.name == 'reward':
      return (self.rewards.placed[self.rewards.largest].model.config,)
    return (self.model, *(self.references[name] for name in self.read_names))

  @property
  def read_names(self) -> tuple[str, ...]:
    """Names of the references read by the program."""
    if self.decodes:
      return ()
    recipe = self.recipe
    return (recipe.loss if self.trains else recipe.metrics).references

  @functools.cached_property
  def references(self) -> dict[str, model_config.ModelConfig]:
    """Configs of the job's frozen models, by name.

    Raises:
      UserError: the recipe cannot read the model of `config.teacher`.
    """
    # References read training rows, also while a job samples.
    read = self.settings.data.vocabularies, self.recipe.rows.lengths
    return {
      name: job_models.open_frozen_model(frozen_model, self.model, *read).model
      if frozen_model.path
      else frozen_model.assumed
      for name, frozen_model in self.frozen.items()
    }

  @functools.cached_property
  def rewards(self) -> reward_models.RewardModels:
    """The job's reward models.

    Raises:
      UserError: see `reward_models.place`.
    """
    if self.recipe.rewards is None:
      return reward_models.RewardModels({}, [])
    return reward_models.place(
      self.recipe.rewards.models,
      self.placed_model,
      self.resolved.compute,
      self.settings.data.vocabularies,
      self.recipe.rows.lengths,
    )

  @functools.cached_property
  def work(self) -> workload.Workload:
    """Workload of the program, for cost estimates."""
    work = workload.of_step(
      self.placed_model, self.recipe, self.settings.train, self.models[1:]
    )
    if self.trains:
      return work
    return dataclasses.replace(
      work,
      partition=self.program_rules.on(self.mesh),
      models=self.models,
      compute=self.resolved.compute,
      lengths=self.lengths,
      rows=self.rows,
      answers=self.answers,
      trains=False,
      decodes=self.decodes,
      parts=1,
      caches=False,
    )

  @property
  def reads_teacher_row(self) -> bool:
    """Whether batches include the teacher's fields."""
    return setup.reads_teacher_row(self.lengths, *self.models)

  @functools.cached_property
  def placed_model(self) -> state_lib.Placement:
    """The trained model and its mesh.

    Raises:
      UserError: a parameter does not divide over the mesh.
    """
    settings = self.settings
    return setup.place_model(
      self.model,
      self.resolved.compute,
      self.mesh,
      settings.rules,
      settings.adapters,
    )

  @functools.cached_property
  def placed_references(self) -> dict[str, state_lib.Placement]:
    """The frozen models on the mesh, by name."""
    return {
      name: job_models.place_frozen_model(
        model,
        self.settings.teacher.dtype,
        self.placed_model,
        self.resolved.compute,
      )
      for name, model in self.references.items()
    }

  def flops(self) -> float:
    """Returns the model FLOPs over all devices (`models.forward_flops`)."""
    lengths, answers = self.lengths, self.answers
    if self.trains:
      frozen = self.placed_model.adapters is not None
      references = self.models[1:]
      return setup.step_flops(self.recipe, self.rows, references, frozen)
    sizes = lengths.encoder, lengths.decoder
    if self.decodes:
      row = formula.decoding(self.model, *sizes)
    else:
      # Includes references: preference metrics read them.
      row = sum(
        formula.forward(model, *sizes, lengths.teacher, answers)
        for model in self.models
      )
    return float(self.rows * row)

  def program(self) -> program_shapes.Program:
    """Returns the program.

    Raises:
      UserError: the attention backend does not support the model, or a
        parameter does not divide over the mesh.
      ValueError: another array does not divide over the mesh.
    """
    return PROGRAMS[self.name](self)


def _train(job: Job) -> program_shapes.Program:
  phases = _phases(job)
  state = phases.abstract()
  read = _trees_beside(job, state)
  unread = read.keys() & job.references.keys() - {*job.read_names}
  beside = job.rewards.trees() | {name: read.pop(name) for name in unread}
  arguments = {'parameters': state.params, **read, 'batch': _batch(job)}
  return program_shapes.Program(
    phases.make_step(job.resolved.schedule),
    arguments,
    lambda a: (
      state.replace(params=a['parameters'], groups=a['optimizer']),
      a['batch'],
      {name: a[name] if name in a else a['base'] for name in job.read_names},
      a.get('base', {}),
    ),
    _axes(job, arguments),
    donated=('parameters', 'optimizer'),
    temporaries={
      'gradients': [state.params] * step_estimate.gradients(job.work)
    },
    beside=beside,
  )


def _trees_beside(job: Job, state: state_lib.TrainState) -> dict[str, Any]:
  placed = job.placed_references.items()
  references = {name: p.abstract_params() for name, p in placed}
  if job.placed_model.adapters is None:
    return {'optimizer': state.groups, **references}
  references = {
    name: tree
    for name, tree in references.items()
    # The starting model is the base, possibly with adapters.
    if not job.frozen[name].is_start
    or not job_models.shares_base(job.placed_references[name], job.placed_model)
  }
  base = job.placed_model.abstract_base()
  return {'optimizer': state.groups, 'base': base, **references}


def _phases(job: Job) -> phases_lib.Phases:
  return phases_lib.Phases(
    job.placed_model,
    job.recipe,
    job.settings.optimizer,
    job.settings.train,
    _models(job),
  )


def _models(job: Job) -> dict[str, build.Model]:
  return {name: placed.model for name, placed in job.placed_references.items()}


def _axes(job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
  # Optimizer moments share the axes of their parameters.
  trained = dict.fromkeys(('parameters', 'optimizer'), job.placed_model)
  placements = job.placed_references | trained
  return {
    name: placements[name].axes(tree)
    if name in placements
    else job.placed_model.base_axes(tree)
    if name == 'base'
    else placement.batch_axes(tree, job.axes)
    for name, tree in arguments.items()
  }


def _evaluate(job: Job) -> program_shapes.Program:
  model = job.placed_model
  # The optimizer state and training-only references stay in memory during
  # evaluation.
  beside = _trees_beside(job, _phases(job).abstract()) | job.rewards.trees()
  names = job.read_names
  arguments = {'parameters': model.abstract_params(), 'batch': _batch(job)}
  arguments |= {x: beside.pop(x) for x in ('base', *names) if x in beside}
  return program_shapes.Program(
    perplexity.Evaluator(
      model, job.recipe.metrics, job.axes, _models(job)
    ).sums,
    arguments,
    lambda a: (
      model.attach(a.get('base', {}), a['parameters']),
      a['batch'],
      {name: a[name] if name in a else a['base'] for name in names},
    ),
    _axes(job, arguments),
    beside=beside,
  )


def _decode(job: Job) -> program_shapes.Program:
  """Returns a decoding step of the inference engine, with full-length caches.

  It decodes an evaluation batch, or the completions of a policy's batch, with
  parameters in the compute dtype. During sampling the trained parameters,
  optimizer state and references stay in memory.
  """
  mesh, lengths, rules = job.mesh, job.lengths, job.program_rules
  positions = job.model.architecture.positions(lengths.encoder, 0)
  # The engine unrolls the layers: a scan would copy their caches.
  model = build.unroll(job.placed_model.model)
  placed = dataclasses.replace(
    job.placed_model,
    model=model,
    rules=rules,
    dtype=job.resolved.compute.dtype,
    adapters=None,
  )
  with partition.use(mesh, rules.as_dict()):
    merge = functools.partial(decoding.merge_kernels, model)
    params = jax.eval_shape(merge, placed.abstract_params())
  params_axes = state_lib.unflatten(
    {
      path: layers.MERGED.get(path.rpartition('/')[2], names)
      for path, names in state_lib.flatten(placed.axes(params)).items()
    }
  )
  sizes = job.rows, lengths.decoder, positions.get('encoder', 0)
  state = jax.eval_shape(functools.partial(decoding.start, model, *sizes))
  # Caches are a separate part: a step writes only one entry of them (see
  # `program_shapes.Program.moved_bytes`).
  state, cache = state._replace(cache=None), state.cache
  eos = jax.ShapeDtypeStruct((1,), jnp.int32)

  def step(params, state, cache, eos):
    with partition.use(mesh, rules.as_dict()):
      state = state._replace(cache=cache)
      return decoding.advance(model, params, state, eos)

  axes = {
    'parameters': params_axes,
    'batch': jax.tree.map(lambda leaf: (None,) * leaf.ndim, state),
    'caches': caches.axes(cache),
  }
  # Keeps unused arguments: the encoder's parameters stay in memory.
  jitted = jax.jit(
    step,
    donate_argnums=(1, 2),
    keep_unused=True,
    compiler_options=compiler.options(mesh),
  )
  return program_shapes.Program(
    jitted,
    {
      'parameters': _sharded(job, params, params_axes),
      'batch': _sharded(job, state, axes['batch']),
      'caches': _sharded(job, cache, axes['caches']),
    },
    lambda a: (a['parameters'], a['batch'], a['caches'], eos),
    axes,
    donated=('batch', 'caches'),
    beside=_state(job) if job.name == 'sample' else {},
  )


def _state(job: Job) -> dict[str, Any]:
  state = _phases(job).abstract()
  trees = {'trained parameters': state.params, **_trees_beside(job, state)}
  return trees | job.rewards.trees()


def _reward(job: Job) -> program_shapes.Program:
  """Returns the scoring program of the largest reward model.

  Every device scores the whole batch of completions.
  """
  name, shapes, beside = job.rewards.largest, _fields(job), _state(job)
  placed = job.rewards.placed[name]
  axes = jax.tree.map(lambda leaf: (None,) * leaf.ndim, shapes)
  arguments = {name: beside.pop(name), 'batch': _sharded(job, shapes, axes)}
  static = placed.model, job.mesh, job.program_rules
  return program_shapes.Program(
    rewards.scorer(job.mesh),
    arguments,
    lambda a: (*static, a[name], a['batch']),
    {name: placed.axes(arguments[name]), 'batch': axes},
    beside=beside,
  )


PROGRAMS: Mapping[str, Callable[[Job], program_shapes.Program]] = {
  'train': _train,
  'eval': _evaluate,
  'decode': _decode,
  'sample': _decode,
  'reward': _reward,
}


def _sharded(job: Job, shapes: Any, axes: Any) -> Any:
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    placement.shardings(shapes, axes, job.mesh, job.program_rules),
  )


def _batch(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
  if job.trains:
    return setup.abstract_batch(
      job.placed_model,
      job.recipe.rows,
      job.rows,
      teacher=job.reads_teacher_row,
    )
  shapes = _fields(job)
  return _sharded(job, shapes, placement.batch_axes(shapes, job.axes))


def _fields(job: Job) -> dict[str, jax.ShapeDtypeStruct]:
  layout, teacher = job.settings.data.objectives[0].rows, job.reads_teacher_row
  both_sides = setup.PADDING
  if job.name == 'reward':
    group = [[]] * job.answers
    row = framing.frame_group(group, job.lengths, both_sides, teacher=teacher)
    rows = framing.stack_rows([row])
  else:
    row = layout.frame((), job.lengths, both_sides, teacher=teacher)
    rows = framing.stack_rows([row])
  return {
    name: jax.ShapeDtypeStruct((job.rows, *value.shape[1:]), value.dtype)
    for name, value in rows.items()
  }
