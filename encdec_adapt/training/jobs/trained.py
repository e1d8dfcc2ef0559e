"""Binds a job's frozen base and frozen models to its training step.

The training loop then handles only states and batches.
"""

from collections.abc import Callable, Mapping
import dataclasses

from encdec_adapt.cluster import distributed
from encdec_adapt.models import base_model, execution
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import remat_choice, schedules, setup, workload
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.jobs import job as job_lib

Step = Callable[
  [state_lib.TrainState, step_lib.Batch],
  tuple[state_lib.TrainState, step_lib.Metrics],
]


@dataclasses.dataclass(frozen=True)
class Trained:
  """The model in training.

  Attributes:
    phases: parameter groups and their steps.
    schedule: learning rate schedule.
    base: parameters of the frozen base; {} without adapters.
    frozen: parameters of the frozen models, by name.
  """

  phases: phases_lib.Phases
  schedule: schedules.Schedule
  base: base_model.Params
  frozen: Mapping[str, base_model.Params]

  @property
  def compute(self) -> execution.ComputeConfig:
    """Section `compute`, resolved for the devices."""
    return self.phases.placement.model.compute

  @property
  def references(self) -> dict[str, base_model.Params]:
    """Parameters of the frozen models that a step reads, by name."""
    return {name: self.frozen[name] for name in self.phases.loss.references}

  def params(self, state: state_lib.TrainState) -> base_model.Params:
    """Returns the parameters of the model, merged with the base."""
    return self.phases.placement.attach(self.base, state.params)

  def make_step(self, step: int) -> Step:
    """Returns the training step of a step's phase."""
    compiled = self.phases.make_step(self.schedule, step)
    others = self.references, self.base
    return lambda state, batch: compiled(state, batch, *others)

  def with_remat(
    self, job: job_lib.Job, state: state_lib.TrainState
  ) -> tuple['Trained', str]:
    """Chooses `compute.remat` by device memory.

    Args:
      job: the job.
      state: the state, already in memory.

    Returns:
      The model in training with the policy, and a description of the choice.
    """
    phases, recipe, train = self.phases, job.recipe, job.settings.train
    # The last phase, which trains the most parameters.
    abstract, others = phases.abstract(), (self.references, self.base)
    batch = setup.abstract_batch(
      phases.placement,
      recipe.rows,
      train.batch_size,
      teacher=job.reads_teacher_row,
    )
    arguments = abstract, batch, *others
    choice = remat_choice.for_job(
      lambda policy: (
        phases.with_remat(policy).make_step(self.schedule).lower(*arguments)
      ),
      workload.of_step(phases.placement, recipe, train, job.step_references),
      arguments,
      (state, *others),
      job.frozen.unread,
      distributed.log,
    )
    phases = phases.with_remat(choice.policy, choice.program)
    # Drop the choice: it also holds the other compiled step, and its memory.
    return dataclasses.replace(self, phases=phases), choice.describe()
