"""AdamW and Adafactor as Optax transformations of one parameter group.

A transformation turns gradients into a direction; `Optimizer.update` applies
learning rate and weight decay, so that all groups share a schedule, each with
a separate count. Independent of phases and mesh.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from encdec_adapt.base import errors, keys
from encdec_adapt.models import layers_index, parameters
from encdec_adapt.training import schedules

Parameters = dict[str, Array]

KINDS = ('adamw', 'adafactor')
MOMENT_DTYPES = ('float32', 'bfloat16')
# Largest relative change that bfloat16 may round away: half a unit in the last
# of its 8 bits.
_BFLOAT16_STEP = 2**-8


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Keys of `config.optimizer`.

  Attributes:
    schedule: learning rate schedule; its keys are in the same section.
  """

  kind: str = keys.key('adamw', "'adamw' or 'adafactor'.", one_of=KINDS)
  schedule: schedules.ScheduleConfig = schedules.ScheduleConfig()
  b1: float = keys.key(
    0.9, "Decay of AdamW's first moment.", at_least=0, below=1
  )
  b2: float = keys.key(
    0.95, "Decay of AdamW's second moment.", at_least=0, below=1
  )
  eps: float = keys.key(1e-8, "AdamW's epsilon.", above=0)
  weight_decay: float = keys.key(
    0.0,
    'Decoupled weight decay, times the learning rate; norms and biases have'
    ' none.',
    at_least=0,
  )
  clip_norm: float = keys.key(
    1.0,
    'Largest global norm of the gradients of parameters that train; 0 for no'
    ' clipping.',
    at_least=0,
  )
  moment_dtype: str = keys.key(
    'float32', "Dtype of AdamW's first moments.", one_of=MOMENT_DTYPES
  )
  second_moment_dtype: str = keys.key(
    'float32',
    "Dtype of AdamW's second moments; 'bfloat16' needs a b2 of at most 0.996.",
    one_of=MOMENT_DTYPES,
  )
  offload: bool = keys.key(
    False,
    "Keep the optimizer state in the hosts' memory and copy it for each"
    ' update.',
  )

  def __post_init__(self):
    keys.check(self, 'config.optimizer.')
    for name in ('moment_dtype', 'second_moment_dtype'):
      if self.kind == 'adafactor' and getattr(self, name) != 'float32':
        raise errors.UserError(
          f'config.optimizer.{name} is {getattr(self, name)!r} with adafactor,'
          ' which keeps no moments of AdamW; leave it float32.'
        )
    if self.second_moment_dtype == 'bfloat16' and 1 - self.b2 < _BFLOAT16_STEP:
      raise errors.UserError(
        "config.optimizer.second_moment_dtype is 'bfloat16' with b2"
        f' {self.b2}: a decay of less than {_BFLOAT16_STEP} a step is lost in'
        ' its rounding. Leave it float32, or take a smaller b2.'
      )


@flax.struct.dataclass
class GroupState:
  """Optimizer state of a parameter group.

  Attributes:
    count: number of updates of the group, int32 (an array, or its shape).
    inner: Optax state; parameter paths as flat dictionary keys.
  """

  count: Any
  inner: Any


def is_kernel(axes: Sequence[str]) -> bool:
  """Returns whether a parameter with these logical axes is a kernel.

  Kernels and token tables have the model width and a second axis; adapter
  matrices have a rank. Norm gains and single token vectors lack the second
  axis, biases one of the two: these get neither weight decay nor Adafactor's
  parameter scale.
  """
  # The number of dimensions does not tell: biases of heads and stacked norm
  # gains have two.
  axes = set(axes) - {'layers'}
  return bool(axes & {'embed', 'table_embed', 'rank'}) and len(axes) > 1


class Optimizer:
  """Optimizer of a parameter group, with `init` and `update`.

  Attributes:
    config: the optimizer's configuration.
  """

  def __init__(
    self, config: OptimizerConfig, table: Mapping[str, parameters.ParamInfo]
  ):
    """Builds the transformation.

    Args:
      config: the optimizer's configuration.
      table: logical axes of every parameter, by path.
    """
    self.config = config
    self._kernels = {path for path in table if is_kernel(table[path].axes)}
    # Relative position biases keep T5's scale, and have no weight decay.
    self._scaled = self._kernels | {
      path for path in table if 'buckets' in table[path].axes
    }
    if config.kind == 'adamw':
      self._transform = _second_moments_in(
        optax.scale_by_adam(
          config.b1, config.b2, config.eps, mu_dtype=config.moment_dtype
        ),
        config.second_moment_dtype,
      )
    else:
      # Only the factored moments: `optax.adafactor` would clip and scale a
      # stack of layers as a single parameter.
      self._transform = optax.scale_by_factored_rms()

  def init(self, values: Parameters) -> GroupState:
    """Returns a fresh state for parameters (path to array)."""
    return GroupState(
      count=jnp.zeros((), jnp.int32), inner=self._transform.init(values)
    )

  def update(
    self,
    gradients: Parameters,
    state: GroupState,
    values: Parameters,
    rate: Float[Array, ''],
  ) -> tuple[Parameters, GroupState]:
    """Updates parameters and state.

    Args:
      gradients: path to gradient, already clipped.
      state: the group's state.
      values: path to parameter.
      rate: learning rate.

    Returns:
      New parameters and new state.
    """
    directions, inner = self._transform.update(gradients, state.inner, values)

    new = {}
    for path, parameter in values.items():
      kernel = path in self._kernels
      decay = self.config.weight_decay if kernel else 0.0
      direction = directions[path]
      if self.config.kind == 'adafactor':
        stacked = layers_index.is_stacked(path)
        scaled = path in self._scaled
        direction = _adafactor_scale(direction, parameter, stacked, scaled)
      # Decoupled decay (AdamW): not in the moments, times the learning rate.
      move = rate * (direction + decay * parameter)
      new[path] = (parameter - move).astype(parameter.dtype)
    return new, GroupState(count=state.count + 1, inner=inner)


def _second_moments_in(
  adam: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """Stores Adam's second moments in a dtype, but updates in float32.

  `optax.scale_by_adam` has a dtype argument only for the first moments.
  """

  def cast(state: optax.ScaleByAdamState, dtype) -> optax.ScaleByAdamState:
    nu = {path: moment.astype(dtype) for path, moment in state.nu.items()}
    return state._replace(nu=nu)

  def init(parameters):
    return cast(adam.init(parameters), dtype)

  def update(gradients, state, parameters):
    # The direction uses the float32 moments, before they are rounded.
    directions, state = adam.update(
      gradients, cast(state, jnp.float32), parameters
    )
    return directions, cast(state, dtype)

  return optax.GradientTransformation(init, update)


def _adafactor_scale(
  direction: Array, parameter: Array, stacked: bool, scaled: bool
) -> Array:
  """Applies Adafactor's clipping and relative step, layer by layer.

  The RMS of the direction is clipped to 1 and, for kernels and relative
  position biases, multiplied by the parameter's RMS, at least 1e-3 (Shazeer and
  Stern 2018, algorithm 4). Norm gains may be stored as gain - 1 and projection
  biases start at 0, so their RMS is no scale for their step.

  Args:
    direction: step direction.
    parameter: the parameter, of the same shape.
    stacked: whether axis 0 is a stack of layers, treated as separate
      parameters.
    scaled: whether the step is relative to the parameter.
  """
  axes = tuple(range(stacked, direction.ndim))

  def rms(x):
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))

  direction = direction / jnp.maximum(1.0, rms(direction))
  return direction * jnp.maximum(1e-3, rms(parameter)) if scaled else direction
