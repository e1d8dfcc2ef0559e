"""Phases of a job: trainable parameter groups and their compiled steps.

In unbalanced pairs, only the fresh cross-attention trains for the first K steps
(Encoder-Decoder Gemma: K = 1000; 0 for balanced pairs). A frozen group has no
optimizer state and no gradients; when unfrozen, it starts with a fresh
optimizer state, count and learning-rate warm-up. A shared count would multiply
its first updates.

The step itself is in `step`; this module selects its trainable groups.
"""

from collections.abc import Iterable, Mapping
import copy
import dataclasses
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import block, build
from encdec_adapt.sharding import memory
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.training import optimizers, schedules
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import train_section

_COUNTERS = ('step', 'skipped', 'skipped_in_row')  # Fields of the state.
_CROSS = re.compile(rf'.*/({"|".join(block.CROSS)})/.*')


@dataclasses.dataclass(frozen=True)
class Group:
  """Parameters unfrozen at the same step.

  Attributes:
    name: key of the group's optimizer state.
    start: step of the first update, from 0.
    paths: sorted parameter paths.
  """

  name: str
  start: int
  paths: tuple[str, ...]


def warmup_groups(paths: Iterable[str], warmup_steps: int) -> tuple[Group, ...]:
  """Splits parameters into cross-attention and the rest, which starts later.

  Args:
    paths: paths of all parameters.
    warmup_steps: number of first steps that train only cross-attention and its
      norms; 0 trains all parameters from the first step.

  Returns:
    One group, or two in the order of their start.

  Raises:
    UserError: the model has no cross-attention with separate weights.
  """
  paths = sorted(paths)
  if warmup_steps == 0:
    return (Group('all', 0, tuple(paths)),)
  # Merged attention has no such paths: it shares the self-attention weights.
  cross = tuple(path for path in paths if _CROSS.fullmatch(path))
  if not cross:
    raise errors.UserError(
      f'config.train.cross_attention_warmup is {warmup_steps}; it must be 0'
      ' without cross-attention that has weights of its own.'
    )
  # Sorted, because the order of a set differs between processes.
  return (
    Group('cross_attention', 0, cross),
    Group('rest', warmup_steps, tuple(sorted({*paths} - {*cross}))),
  )


def adapter_groups(adapters: adapters_lib.Adapters) -> tuple[Group, ...]:
  """Returns the groups of adapter matrices and of fully trained parameters."""
  matrices = {*adapters.table} - {*adapters.full}
  groups = (
    Group('adapters', 0, tuple(sorted(matrices))),
    Group('full', 0, adapters.full),
  )
  return tuple(group for group in groups if group.paths)


class Phases:
  """The phases of a job: a new phase begins when a group is unfrozen.

  Attributes:
    placement: the trained model and its mesh.
    optimizer: the optimizer of every group.
    groups: all groups, in the order of their start.
    loss: the loss of a step.
    models: frozen models of the loss, by name.
  """

  def __init__(
    self,
    placement: state_lib.Placement,
    recipe: recipe_lib.Recipe,
    optimizer: optimizers.OptimizerConfig,
    train: train_section.TrainConfig,
    models: Mapping[str, build.Model] = types.MappingProxyType({}),
  ):
    """Assigns parameters to groups; compiles nothing.

    Args:
      placement: the trained model and its mesh.
      recipe: the kind of training.
      optimizer: section `optimizer` of the configuration.
      train: section `train`.
      models: frozen models of the loss, by name; required by `make_step`.

    Raises:
      UserError: see `warmup_groups`.
    """
    self.placement, table = placement, placement.table
    # A single optimizer: groups differ only in their counts.
    self.optimizer = optimizers.Optimizer(optimizer, table)
    self.groups = (
      adapter_groups(placement.adapters)
      if placement.adapters
      else warmup_groups(table, train.warmup)
    )
    self._recipe, self.loss, self.models = recipe, recipe.loss, models
    self._last_step = None  # The last phase's step, if already compiled.
    self._microbatches, self._dropout = train.microbatches, train.dropout
    # Adapter dropout uses the same key.
    adapters = placement.adapters
    self._draws = bool(train.dropout or adapters and adapters.options.dropout)

  def with_remat(
    self, policy: str, last_step: step_lib.StepFunction | None = None
  ) -> 'Phases':
    """Returns the phases with another `compute.remat`.

    Args:
      policy: name of the policy.
      last_step: compiled step of the last phase, if available.
    """
    phases = copy.copy(self)
    phases.placement = self.placement.with_remat(policy)
    phases._last_step = last_step
    return phases

  def begins(self, step: int) -> bool:
    """Returns whether frozen groups are unfrozen at this step."""
    return any(0 < group.start == step for group in self.groups)

  def trainable(self, step: int | None = None) -> state_lib.Groups:
    """Returns the paths of the groups trained at a step, by default all."""
    return {
      group.name: group.paths
      for group in self.groups
      if step is None or group.start <= step
    }

  def create(
    self,
    params: Any,
    seed: int = 0,
    *,
    step: Any = None,
    groups: Mapping[str, optimizers.GroupState] = types.MappingProxyType({}),
  ) -> state_lib.TrainState:
    """Creates the initial state; the first step donates the parameters.

    Only groups of the first phase have optimizer state.

    Args:
      params: the parameters, sharded.
      seed: seed of dropout masks.
      step: number of previous steps of the model, an array; None for 0.
      groups: optimizer state of groups; other groups start fresh.
    """
    replicated = placement_lib.replicated(self.placement.mesh)
    # One array per counter: a buffer cannot be donated twice.
    counters = {
      name: jax.device_put(np.zeros((), np.int32), replicated)
      for name in _COUNTERS
    }
    if step is not None:
      counters['step'] = step
    state = state_lib.TrainState(params=params, groups=dict(groups), **counters)
    if self._draws:
      # Under jit: `device_put` can place only NumPy arrays on devices of other
      # processes, and keys have no NumPy form.
      make = jax.jit(lambda: jax.random.key(seed), out_shardings=replicated)
      state = state.replace(dropout_key=make())
    return self.thaw(state, 0)

  def thaw(
    self, state: state_lib.TrainState, step: int
  ) -> state_lib.TrainState:
    """Adds fresh optimizer state for groups unfrozen up to `step`."""
    groups, init = dict(state.groups), self.optimizer.init
    for name, part in self._parameters(state.params, step).items():
      # A restored state has the groups of its last step.
      if name not in groups:
        # Moments are created sharded: no device ever holds them whole.
        shardings = self._shardings(jax.eval_shape(init, part))
        groups[name] = jax.jit(init, out_shardings=shardings)(part)
    return state.replace(groups=groups)

  def abstract(self, step: int | None = None) -> state_lib.TrainState:
    """Returns shapes and shardings of the state at a step.

    Args:
      step: the step; by default all groups have optimizer state.

    Raises:
      UserError: the optimizer state is offloaded, but the devices cannot read
        host memory.
    """
    params = self.placement.abstract_params()
    replicated = placement_lib.replicated(self.placement.mesh)
    # The dtype of keys depends on the configured PRNG.
    scalar, key = (
      jax.ShapeDtypeStruct((), dtype, sharding=replicated)
      for dtype in (jnp.int32, jax.eval_shape(jax.random.key, 0).dtype)
    )
    groups = {}
    for name, part in self._parameters(params, step).items():
      shape = jax.eval_shape(self.optimizer.init, part)
      groups[name] = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        shape,
        self._shardings(shape),
      )
    return state_lib.TrainState(
      params=params,
      groups=groups,
      dropout_key=key if self._draws else None,
      **dict.fromkeys(_COUNTERS, scalar),
    )

  def abstract_saved(self, step: int) -> state_lib.TrainState:
    """Returns shapes and shardings of the state in the checkpoint of a step.

    Groups unfrozen at that step are added after the save.
    """
    return self.abstract(max(step - 1, 0))

  def make_step(
    self, schedule: schedules.Schedule, step: int | None = None
  ) -> step_lib.StepFunction:
    """Returns the jitted training step of a phase, by default the last.

    Args:
      schedule: (step, group count) -> learning rate.
      step: a step of the phase.
    """
    if self._last_step and self.trainable(step) == self.trainable():
      return self._last_step
    return step_lib.make_train_step(
      self.placement,
      self._recipe,
      self.models,
      self.optimizer,
      schedule,
      self.trainable(step),
      self.abstract(step),
      self._microbatches,
      self._dropout,
    )

  def _parameters(self, params: Any, step: int | None) -> dict[str, Any]:
    flat = state_lib.flatten(params)
    return {
      name: {path: flat[path] for path in paths}
      for name, paths in self.trainable(step).items()
    }

  def _shardings(self, shape: optimizers.GroupState) -> optimizers.GroupState:
    shardings = self.placement.shardings(shape)
    if not self.optimizer.config.offload:
      return shardings
    try:
      memory.check_host(self.placement.mesh)
    except ValueError as error:
      raise errors.UserError(
        f'config.optimizer.offload is True, but {error} Set it to False.'
      ) from error
    # Counts stay on the devices: the learning rate depends on them before the
    # update copies the moments.
    return jax.tree.map(
      lambda leaf, sharding: (
        memory.on_host(sharding) if leaf.ndim else sharding
      ),
      shape,
      shardings,
    )
