"""What a job trains: all parameters, groups of them, or adapters over a base.

The step takes a frozen base and frozen models beside the state. `Trained` holds
both, so that a job handles states and batches only.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from encdec_adapt.models import base_model, execution
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import remat_choice, schedules, setup, workload
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import train_section

Step = Callable[
  [state_lib.TrainState, step_lib.Batch],
  tuple[state_lib.TrainState, step_lib.Metrics],
]


@dataclasses.dataclass(frozen=True)
class Trained:
  """The model in training.

  Attributes:
    phases: groups of parameters, and their steps.
    schedule: learning rate.
    base: parameters of the frozen base of adapters; {} without adapters.
    frozen: parameters of the frozen models, by name.
  """

  phases: phases_lib.Phases
  schedule: schedules.Schedule
  base: base_model.Params
  frozen: Mapping[str, base_model.Params]

  @property
  def compute(self) -> execution.ComputeConfig:
    """Section `compute` of the configuration, for the devices."""
    return self.phases.placement.model.compute

  def params(self, state: state_lib.TrainState) -> base_model.Params:
    """Returns the parameters that the model is applied with."""
    return self.phases.placement.attach(self.base, state.params)

  def make_step(self, step: int) -> Step:
    """Returns the training step of a step's phase."""
    compiled = self.phases.make_step(self.schedule, step)
    return lambda state, batch: compiled(state, batch, self.frozen, self.base)

  def with_remat(
    self,
    recipe: recipe_lib.Recipe,
    train: train_section.TrainConfig,
    state: state_lib.TrainState,
    beside: Any,
    *,
    teacher: bool,
    log: Callable[[str], None],
  ) -> tuple['Trained', str]:
    """Chooses `compute.remat` by the memory of the devices.

    Args:
      recipe: the kind of training.
      train: section `train` of the configuration.
      state: the state, which is in memory.
      beside: shapes of parameters that are still to be read.
      teacher: whether batches have the teacher's fields.
      log: prints a line on process 0.

    Returns:
      The model in training with the policy, and the choice as text.
    """
    phases = self.phases
    # The last phase, which trains the most parameters.
    abstract, others = phases.abstract(), (self.frozen, self.base)
    batch = setup.abstract_batch(
      phases.placement, recipe.rows, train.batch_size, teacher=teacher
    )
    arguments = abstract, batch, *others
    shapes = [x.config for x in phases.models.values()]
    choice = remat_choice.for_job(
      lambda policy: (
        phases.with_remat(policy).make_step(self.schedule).lower(*arguments)
      ),
      workload.of_step(phases.placement, recipe, train, shapes),
      arguments,
      (state, *others),
      beside,
      log,
    )
    phases = phases.with_remat(choice.policy, choice.program)
    # The choice also holds the other compiled step, whose memory is needed.
    return dataclasses.replace(self, phases=phases), choice.describe()
