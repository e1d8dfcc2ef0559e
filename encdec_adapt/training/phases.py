"""Which parameters train at which step, and the compiled step that does it.

Unbalanced pairs warm their fresh cross-attention up alone for K steps
(Encoder-Decoder Gemma: K = 1000; 0 for balanced pairs). A frozen group has no
optimizer state and no gradients; when it thaws it starts with a fresh
optimizer, count and learning-rate warm-up of its own. Thawing against a
shared count would multiply its first updates.
"""

from collections.abc import Iterable
import dataclasses
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.models import block
from encdec_adapt.sharding import memory, placement
from encdec_adapt.training import losses, optimizers, train_section
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib

_CROSS = re.compile(rf'.*/({"|".join(block.CROSS)})/.*')


@dataclasses.dataclass(frozen=True)
class Group:
  """Parameters that start to train at the same step.

  Attributes:
    name: key of the group's optimizer state.
    start: step of the first update, from 0.
    paths: sorted parameter paths.
  """

  name: str
  start: int
  paths: tuple[str, ...]


def warmup_groups(paths: Iterable[str], warmup_steps: int) -> tuple[Group, ...]:
  """Splits parameters into those that warm up alone and the rest.

  Args:
    paths: paths of all parameters.
    warmup_steps: first steps in which only cross-attention and its norms
      train; 0 trains all parameters from the first step.

  Returns:
    One group, or two in the order in which they start.

  Raises:
    UserError: there is no cross-attention with weights of its own to warm up.
  """
  paths = sorted(paths)
  if warmup_steps == 0:
    return (Group('all', 0, tuple(paths)),)
  cross = tuple(path for path in paths if _CROSS.fullmatch(path))
  if not cross:
    raise errors.UserError(
      f'config.train.cross_attention_warmup is {warmup_steps}; it must be 0'
      ' without cross-attention that has weights of its own.'
    )
  rest = tuple(path for path in paths if path not in set(cross))
  return (
    Group('cross_attention', 0, cross),
    Group('rest', warmup_steps, rest),
  )


class Phases:
  """The phases of a job: a phase ends where another group starts to train.

  Attributes:
    where: the trained model and its mesh.
    optimizer: the optimizer of every group.
    groups: all groups, in the order in which they start.
  """

  def __init__(
    self,
    where: state_lib.Placement,
    loss: losses.loss.Loss,
    optimizer: optimizers.OptimizerConfig,
    train: train_section.TrainConfig,
    axes: placement.BatchAxes = types.MappingProxyType({}),
  ):
    """Assigns parameters to groups; nothing is compiled yet.

    Args:
      where: the trained model and its mesh.
      loss: the loss, with its reference models.
      optimizer: section `optimizer` of the configuration.
      train: section `train`.
      axes: logical axes of batch fields, see `placement.batch_axes`.

    Raises:
      UserError: see `warmup_groups`.
    """
    self.where = where
    self.optimizer = optimizers.Optimizer(optimizer, where.model.table)
    self.groups = warmup_groups(where.model.table, train.cross_attention_warmup)
    self._loss, self._axes = loss, axes
    self._microbatches, self._dropout = train.microbatches, train.dropout

  def begins(self, step: int) -> bool:
    """Whether groups that were frozen start to train at this step."""
    return any(0 < group.start == step for group in self.groups)

  def trainable(self, step: int | None = None) -> state_lib.Groups:
    """Paths of the groups that train at a step; by default of all groups."""
    return {
      group.name: group.paths
      for group in self.groups
      if step is None or group.start <= step
    }

  def create(self, params: Any, seed: int = 0) -> state_lib.TrainState:
    """Makes the state before the first step, which takes the parameters over.

    Only the groups that train first have optimizer state.

    Args:
      params: the parameters, sharded.
      seed: seed of dropout's masks.
    """
    # Three arrays, not one: the step donates each of them.
    place = placement.replicated(self.where.mesh)
    step, skipped, in_row = (
      jax.device_put(np.zeros((), np.int32), place) for _ in range(3)
    )
    state = state_lib.TrainState(
      step=step,
      params=params,
      groups={},
      skipped=skipped,
      skipped_in_row=in_row,
    )
    if self._dropout:
      make = jax.jit(lambda: jax.random.key(seed), out_shardings=place)
      state = state.replace(dropout_key=make())
    return self.thaw(state, 0)

  def thaw(
    self, state: state_lib.TrainState, step: int
  ) -> state_lib.TrainState:
    """Adds a fresh optimizer state for every group that starts at `step`."""
    groups, init = dict(state.groups), self.optimizer.init
    flat = state_lib.flatten(state.params)
    for name, paths in self.trainable(step).items():
      if name not in groups:
        part = {path: flat[path] for path in paths}
        shardings = self._shardings(jax.eval_shape(init, part))
        groups[name] = jax.jit(init, out_shardings=shardings)(part)
    return state.replace(groups=groups)

  def abstract(self, step: int | None = None) -> state_lib.TrainState:
    """Shapes and shardings of the state while these groups train.

    Args:
      step: the step whose groups have optimizer state; by default all have.

    Raises:
      UserError: the optimizer's state is offloaded, but the devices cannot
        read host memory.
    """
    params = self.where.abstract_params()
    flat = state_lib.flatten(params)
    key = jax.eval_shape(jax.random.key, 0)
    scalar, key = (
      jax.ShapeDtypeStruct(
        (), dtype, sharding=placement.replicated(self.where.mesh)
      )
      for dtype in (jnp.int32, key.dtype)
    )
    groups = {}
    for name, paths in self.trainable(step).items():
      part = {path: flat[path] for path in paths}
      shape = jax.eval_shape(self.optimizer.init, part)
      groups[name] = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding
        ),
        shape,
        self._shardings(shape),
      )
    return state_lib.TrainState(
      step=scalar,
      params=params,
      groups=groups,
      skipped=scalar,
      skipped_in_row=scalar,
      dropout_key=key if self._dropout else None,
    )

  def abstract_saved(self, step: int) -> state_lib.TrainState:
    """Shapes and shardings of the state in the checkpoint of a step.

    A group that thaws at this very step is thawed after the save.
    """
    return self.abstract(max(step - 1, 0))

  def make_step(self, step: int | None = None) -> step_lib.StepFunction:
    """Builds the jitted training step of a step's phase; by default the last.

    It compiles when it is first called.
    """
    return step_lib.make_train_step(
      self.where,
      self._loss,
      self.optimizer,
      self.trainable(step),
      self.abstract(step),
      self._microbatches,
      self._dropout,
      self._axes,
    )

  def _shardings(self, shape: optimizers.GroupState) -> optimizers.GroupState:
    """Returns the shardings of a group's optimizer state between updates."""
    shardings = self.where.shardings(shape)
    if not self.optimizer.config.offload:
      return shardings
    try:
      memory.check_host(self.where.mesh)
    except ValueError as error:
      raise errors.UserError(
        f'config.optimizer.offload is True, but {error} Set it to False.'
      ) from error
    # Counts stay: they are read before the update.
    return jax.tree.map(
      lambda leaf, sharding: (
        memory.on_host(sharding) if leaf.ndim else sharding
      ),
      shape,
      shardings,
    )
