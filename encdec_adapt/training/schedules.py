"""Learning rate schedules: warm-up by group count, decay by job step.

With separate counters, a group unfrozen late (see `training.phases`) warms up
over its updates while the decay follows the job's step. Imports only `base`.
"""

from collections.abc import Callable
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.base import keys

KINDS = ('cosine', 'linear', 'rsqrt', 'constant')

Schedule = Callable[[Int[Array, ''], Int[Array, '']], Float[Array, '']]


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """Learning rate keys of `config.optimizer`."""

  kind: str = keys.key(
    'cosine',
    "Learning rate after the warm-up: 'cosine' or 'linear' decay to"
    " end_fraction at the last step, 'rsqrt' (T5: constant for rsqrt_steps,"
    " then falling with the square root of the step) or 'constant'.",
    one_of=KINDS,
    name='schedule',
  )
  peak: float = keys.key(
    1e-3, 'Highest learning rate.', at_least=0, name='learning_rate'
  )
  warmup_steps: int | None = keys.key(
    None,
    "Steps of linear warm-up, by each group's own count; -1: a twentieth of"
    ' config.train.steps. A tenth of these if they are fewer.',
    at_least=0,
    none=-1,
  )
  end_fraction: float = keys.key(
    0.1, 'Share of the peak at the last step.', at_least=0, at_most=1
  )
  rsqrt_steps: int = keys.key(
    10_000, "Flat steps of 'rsqrt' (Wang et al. 2022: 10,000).", at_least=1
  )

  def __post_init__(self):
    keys.check(self, 'config.optimizer.')

  def warmup(self, total_steps: int) -> int:
    """Returns the number of warm-up steps; a tenth of a shorter job.

    Args:
      total_steps: steps of the job; 0 (unknown) before its records exist.
    """
    if self.warmup_steps is None:
      return total_steps // 20
    is_short = 0 < total_steps < self.warmup_steps
    return total_steps // 10 if is_short else self.warmup_steps


def make_schedule(config: ScheduleConfig, total_steps: int) -> Schedule:
  """Builds `(step, count) -> learning rate`.

  `step` is the job's step from 0, `count` the number of updates of the
  parameter group. The first update of a group uses peak / warmup, not 0.

  Args:
    config: the schedule.
    total_steps: steps of the job.
  """
  warmup_steps = config.warmup(total_steps)
  # At least 1: all steps may be warm-up, and `total_steps` unknown (0).
  span = max(total_steps - warmup_steps, 1)

  def decay(step):
    progress = jnp.clip((step - warmup_steps) / span, 0.0, 1.0)
    if config.kind == 'cosine':
      shape = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    elif config.kind == 'linear':
      shape = 1.0 - progress
    elif config.kind == 'rsqrt':
      # Independent of the job's length and of `end_fraction`, so that a job can
      # be extended.
      flat = config.rsqrt_steps
      return jnp.sqrt(flat / jnp.maximum(step, flat))
    else:
      return jnp.float32(1.0)
    return config.end_fraction + (1.0 - config.end_fraction) * shape

  def schedule(step, count):
    warmup = jnp.minimum((count + 1) / max(warmup_steps, 1), 1.0)
    return jnp.float32(config.peak * warmup * decay(step))

  return schedule
