"""Values that follow from devices and records, not from the configuration."""

from collections.abc import Mapping
import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt.models import execution
from encdec_adapt.training import schedules


@dataclasses.dataclass(frozen=True)
class Resolved:
  """Values of a job beside its settings; `train` makes them once.

  Attributes:
    compute: section `compute` for the devices; of 'auto' only `remat` may be
      left, which memory decides.
    steps: steps of the job.
    schedule: learning rate of a group's update by the step and its count.
    save_every: steps between checkpoints.
    evaluate_every: steps between runs of each evaluator, by its name.
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
    """Returns the values of a job.

    Args:
      settings: the validated configuration.
      compute: its section `compute`, for the devices.
      steps: steps of the job.

    Raises:
      UserError: the job is shorter than a warm-up.
    """
    settings.train.check_steps(steps)
    return cls(
      compute,
      steps,
      schedules.make_schedule(settings.optimizer.schedule, steps),
      settings.checkpoint.interval(steps),
      settings.evaluation.intervals(steps),
    )
