"""Learning rates: a warm-up in a group's own steps times a global decay.

Keeping the two apart lets a group of parameters that thaws late (see
`training.phases`) warm up by its own count while the decay goes by the
job's step.
"""

from collections.abc import Callable
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.cli import errors

KINDS = ('cosine', 'linear', 'rsqrt', 'constant')

Schedule = Callable[[Int[Array, ''], Int[Array, '']], Float[Array, '']]


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """A learning rate over a job.

  Attributes:
    kind: 'cosine' or 'linear' decay to `end_fraction` of the peak at the
      last step, 'rsqrt' (T5: constant for `rsqrt_steps`, then falling with
      the square root of the step), or 'constant'.
    peak: highest learning rate.
    warmup_steps: steps of linear warm-up, by each group's own count.
    total_steps: steps of the job.
    end_fraction: what remains of the peak at the end.
    rsqrt_steps: flat steps of 'rsqrt' (Wang et al. 2022: 10,000).
  """

  kind: str
  peak: float
  warmup_steps: int
  total_steps: int
  end_fraction: float = 0.0
  rsqrt_steps: int = 10_000

  def __post_init__(self):
    if self.kind not in KINDS:
      raise errors.UserError(
        f'config.optimizer.schedule is {self.kind!r}; known schedules:'
        f' {", ".join(KINDS)}.'
      )
    if self.peak < 0 or not 0 <= self.end_fraction <= 1:
      raise errors.UserError(
        f'config.optimizer: learning_rate is {self.peak} and end_fraction'
        f' {self.end_fraction}; a rate is at least 0, a fraction in [0, 1].'
      )
    if not 0 <= self.warmup_steps <= self.total_steps:
      raise errors.UserError(
        f'config.optimizer.warmup_steps is {self.warmup_steps}; it must be'
        f' between 0 and config.train.steps, {self.total_steps}.'
      )
    if self.rsqrt_steps < 1:
      raise errors.UserError(
        f'config.optimizer.rsqrt_steps is {self.rsqrt_steps}; it must be at'
        ' least 1.'
      )


def make_schedule(config: ScheduleConfig) -> Schedule:
  """Builds `(step, count) -> learning rate`.

  `step` is the job's step from 0, `count` the number of updates that the
  group of parameters has had. The first update of a group uses
  peak / warmup_steps, not 0.
  """
  span = max(config.total_steps - config.warmup_steps, 1)

  def decay(step):
    progress = jnp.clip((step - config.warmup_steps) / span, 0.0, 1.0)
    if config.kind == 'cosine':
      shape = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    elif config.kind == 'linear':
      shape = 1.0 - progress
    elif config.kind == 'rsqrt':
      flat = config.rsqrt_steps
      return jnp.sqrt(flat / jnp.maximum(step, flat))
    else:
      return jnp.float32(1.0)
    return config.end_fraction + (1.0 - config.end_fraction) * shape

  def schedule(step, count):
    warmup = jnp.minimum((count + 1) / max(config.warmup_steps, 1), 1.0)
    return jnp.float32(config.peak * warmup * decay(step))

  return schedule
