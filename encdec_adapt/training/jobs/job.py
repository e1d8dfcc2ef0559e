"""An opened training job, shared by batches, evaluators and steps."""

from collections.abc import Callable
import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt.data.records import loader as loader_lib
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import frozen_models, resolved
from encdec_adapt.training.recipes import recipe as recipe_lib


@dataclasses.dataclass(frozen=True)
class Job:
  """A training job, before reading parameters.

  Attributes:
    workdir: work directory of the job.
    settings: the validated configuration.
    resolved: values derived from devices and records.
    phases: trainable parameter groups and their placement.
    frozen: frozen models and rewards.
    data: vocabularies and records.
    loader: training rows of this process.
    log: prints a line on process 0.
  """

  workdir: str
  settings: config_lib.Settings
  resolved: resolved.Resolved
  phases: phases_lib.Phases
  frozen: frozen_models.FrozenModels
  data: setup.Data
  loader: loader_lib.Loader
  log: Callable[[str], None]

  @property
  def recipe(self) -> recipe_lib.Recipe:
    """The kind of training."""
    return self.settings.recipe

  @property
  def placement(self) -> state_lib.Placement:
    """The trained model and its mesh."""
    return self.phases.placement

  @property
  def reads_teacher_row(self) -> bool:
    """Whether batches have the teacher's fields."""
    return reads_teacher_row(self.settings, self.frozen)

  def flops(self) -> float:
    """Returns the model FLOPs of a step, including sampling."""
    return setup.job_flops(
      self.recipe,
      self.settings.train.batch_size,
      self.frozen.shapes,
      frozen=self.placement.adapters is not None,
    )


def reads_teacher_row(
  settings: config_lib.Settings, frozen: frozen_models.FrozenModels
) -> bool:
  """Returns whether a model reads the teacher's fields of batches."""
  shapes = (settings.model, *frozen.shapes)
  return setup.reads_teacher_row(settings.data.train.lengths, *shapes)
