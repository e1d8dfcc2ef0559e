"""AdamW and Adafactor as Optax transformations of one parameter group.

A transformation here turns gradients into a direction; the learning rate
and the weight decay are applied by `update`, so that every group uses the
same schedule with a count of its own.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int
import optax

from encdec_adapt.cli import errors
from encdec_adapt.models import layers_index
from encdec_adapt.training import schedules

Parameters = dict[str, Array]

KINDS = ('adamw', 'adafactor')
MOMENT_DTYPES = ('float32', 'bfloat16')
# The largest change, relative to a value, that bfloat16 may round away: half
# the last of its 8 bits.
_BFLOAT16_STEP = 2**-8


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """An optimizer and its learning rate.

  Attributes:
    kind: 'adamw' or 'adafactor'.
    schedule: the learning rate.
    b1, b2, eps: AdamW's moments and epsilon.
    weight_decay: decoupled, times the learning rate; norm scales (vectors)
      have none.
    clip_norm: largest global norm of the gradients of the parameters that
      move; 0 for no clipping.
    decay_rate: Adafactor's exponent of the second moment (T5X: 0.8).
    factored: Adafactor keeps row and column moments instead of full ones
      for matrices of at least 128 x 128.
    moment_dtype: dtype in which AdamW's first moments are kept.
    second_moment_dtype: that of its second moments; bfloat16 only where their
      decay, 1 - b2, is not lost in its rounding.
    offload: the state is kept in the hosts' memory between updates; see
      `training.offload`.
  """

  kind: str
  schedule: schedules.ScheduleConfig
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  decay_rate: float = 0.8
  factored: bool = True
  moment_dtype: str = 'float32'
  second_moment_dtype: str = 'float32'
  offload: bool = False

  def __post_init__(self):
    if self.kind not in KINDS:
      raise errors.UserError(
        f'config.optimizer.kind is {self.kind!r}; known optimizers:'
        f' {", ".join(KINDS)}.'
      )
    for name in ('moment_dtype', 'second_moment_dtype'):
      dtype = getattr(self, name)
      if dtype not in MOMENT_DTYPES:
        raise errors.UserError(
          f'config.optimizer.{name} is {dtype!r}; it must be one of'
          f' {", ".join(MOMENT_DTYPES)}.'
        )
      if self.kind == 'adafactor' and dtype != 'float32':
        raise errors.UserError(
          f'config.optimizer.{name} is {dtype!r} with adafactor, which keeps'
          ' no moments of AdamW; leave it float32.'
        )
    if self.second_moment_dtype == 'bfloat16' and 1 - self.b2 < _BFLOAT16_STEP:
      raise errors.UserError(
        "config.optimizer.second_moment_dtype is 'bfloat16' with b2"
        f' {self.b2}: a decay of less than {_BFLOAT16_STEP} a step is lost in'
        ' its rounding. Leave it float32, or take a smaller b2.'
      )
    for name in ('b1', 'b2'):
      if not 0 <= getattr(self, name) < 1:
        raise errors.UserError(
          f'config.optimizer.{name} is {getattr(self, name)}; it must be in'
          ' [0, 1).'
        )
    for name in ('weight_decay', 'clip_norm'):
      if getattr(self, name) < 0:
        raise errors.UserError(
          f'config.optimizer.{name} is {getattr(self, name)}; it must be at'
          ' least 0.'
        )
    for name in ('eps', 'decay_rate'):
      if getattr(self, name) <= 0:
        raise errors.UserError(
          f'config.optimizer.{name} is {getattr(self, name)}; it must be'
          ' above 0.'
        )


@flax.struct.dataclass
class GroupState:
  """Optimizer state of one parameter group.

  Attributes:
    count: updates that the group has had, int32 (an array, or its shape).
    inner: Optax state; parameter paths as flat dictionary keys.
  """

  count: Any
  inner: Any


class Optimizer:
  """`init` and `update` of one group of parameters."""

  def __init__(self, config: OptimizerConfig):
    self.config = config
    self._schedule = schedules.make_schedule(config.schedule)
    if config.kind == 'adamw':
      self._transform = optax.scale_by_adam(
        config.b1, config.b2, config.eps, mu_dtype=config.moment_dtype
      )
      self._transform = _second_moments_in(
        self._transform, config.second_moment_dtype
      )
    else:
      self._transform = optax.scale_by_factored_rms(
        factored=config.factored, decay_rate=config.decay_rate
      )

  def init(self, parameters: Parameters) -> GroupState:
    """A fresh state for these parameters (path to array)."""
    return GroupState(
      count=jnp.zeros((), jnp.int32), inner=self._transform.init(parameters)
    )

  def update(
    self,
    gradients: Parameters,
    state: GroupState,
    parameters: Parameters,
    step: Int[Array, ''],
  ) -> tuple[Parameters, GroupState]:
    """One update.

    Args:
      gradients: path to gradient, already clipped.
      state: the group's state.
      parameters: path to array.
      step: the job's step from 0; decides the decay of the learning rate.

    Returns:
      New parameters and new state.
    """
    rate = self._schedule(step, state.count)
    directions, inner = self._transform.update(
      gradients, state.inner, parameters
    )

    new = {}
    for path, parameter in parameters.items():
      # Norm scales are the only leaves without decay.
      decay = 0.0 if path.endswith('/scale') else self.config.weight_decay
      direction = directions[path]
      if self.config.kind == 'adafactor':
        direction = _adafactor_scale(path, direction, parameter)
      move = rate * (direction + decay * parameter)
      new[path] = (parameter - move).astype(parameter.dtype)
    return new, GroupState(count=state.count + 1, inner=inner)

  def learning_rate(self, state: GroupState, step: Int[Array, '']) -> Array:
    """Learning rate of the group's next update."""
    return self._schedule(step, state.count)


def _second_moments_in(
  adam: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """Adam that keeps its second moments in a dtype, and updates in float32."""

  def keep(state: optax.ScaleByAdamState, dtype) -> optax.ScaleByAdamState:
    nu = {path: moment.astype(dtype) for path, moment in state.nu.items()}
    return state._replace(nu=nu)

  def init(parameters):
    return keep(adam.init(parameters), dtype)

  def update(gradients, state, parameters):
    directions, state = adam.update(
      gradients, keep(state, jnp.float32), parameters
    )
    return directions, keep(state, dtype)

  return optax.GradientTransformation(init, update)


def _adafactor_scale(path: str, direction: Array, parameter: Array) -> Array:
  """Adafactor's clipping and relative step, layer by layer.

  The direction's root mean square is clipped to 1 and multiplied by the
  parameter's own, at least 1e-3 (Shazeer and Stern 2018, algorithm 4). Norm
  scales are stored as gain - 1, so that theirs says nothing: a gain near 1
  has scale 1.
  """
  # Layers that are stacked for the scan are parameters of their own.
  axes = tuple(range(layers_index.is_stacked(path), direction.ndim))

  def rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))

  direction = direction / jnp.maximum(1.0, rms(direction))
  if path.endswith('/scale'):
    return direction
  return direction * jnp.maximum(1e-3, rms(parameter))
