"""Values derived from devices and records, beside the configuration."""

from collections.abc import Mapping
import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt.models import execution
from encdec_adapt.training import schedules


@dataclasses.dataclass(frozen=True)
class Resolved:
  """Derived values of a job.

  Attributes:
    compute: section `compute` for the devices; only `remat` may still be
      'auto', until it is chosen by memory.
    steps: steps of the job.
    schedule: (step, group count) -> learning rate.
    save_every: steps between checkpoints.
    evaluate_every: steps between runs of each evaluator, by name.
  """

  compute: execution.ComputeConfig
  steps: int
  schedule: schedules.Schedule
  save_every: int
  evaluate_every: Mapping[str, int]

  @classmethod
  def of(
    cls,
    settings: config_lib.Settings,
    compute: execution.ComputeConfig,
    steps: int,
  ) -> 'Resolved':
    """Derives the values of a job.

    Args:
      settings: the validated configuration.
      compute: section `compute`, resolved for the devices.
      steps: steps of the job.

    Raises:
      UserError: the job is too short for a warm-up.
    """
    settings.train.check_steps(steps)
    return cls(
      compute,
      steps,
      schedules.make_schedule(settings.optimizer.schedule, steps),
      settings.checkpoint.interval(steps),
      settings.evaluation.intervals(steps),
    )
