"""An opened training job, shared by batches, evaluators and steps."""

import dataclasses

from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import manager
from encdec_adapt.cluster import host_memory
from encdec_adapt.data.records import loader as loader_lib
from encdec_adapt.models import model_config, parameters
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import remat_choice, setup
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
  """

  workdir: str
  settings: config_lib.Settings
  resolved: resolved.Resolved
  phases: phases_lib.Phases
  frozen: frozen_models.FrozenModels
  data: setup.Data
  loader: loader_lib.Loader

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
    shapes = (self.settings.model, *self.frozen.shapes)
    lengths = self.settings.data.train.lengths
    return setup.reads_teacher_row(lengths, *shapes)

  @property
  def step_references(self) -> list[model_config.ModelConfig]:
    """Shapes of the frozen models that a step reads."""
    models = self.frozen.models
    return [models[name].config for name in self.recipe.loss.references]

  def describe(self) -> str:
    """Returns model, mesh, rows and steps as a line of text."""
    model = self.recipe.model
    return (
      f'{model.architecture.name}: {parameters.count(model):,} parameters on'
      f' {dict(self.placement.mesh.shape)}; {len(self.data.train):,} training'
      f' rows, {self.resolved.steps:,} steps'
    )

  def flops(self) -> float:
    """Returns the model FLOPs of a step, including sampling."""
    return setup.job_flops(
      self.recipe,
      self.settings.train.batch_size,
      self.step_references,
      frozen=self.placement.adapters is not None,
    )


def open_models(
  settings: config_lib.Settings,
  mesh: Mesh,
  saved: manager.Checkpoint | None,
) -> tuple[phases_lib.Phases, frozen_models.FrozenModels]:
  """Builds the model of a job and opens its frozen models; reads no weights.

  Resolves the 'auto' values of `config.compute` except `remat`, which is chosen
  once all else is in memory.

  Args:
    settings: the validated configuration.
    mesh: the device mesh.
    saved: the checkpoint to resume from; None for a new job.

  Raises:
    UserError: see `setup.check_stacks`, `setup.check_positions`,
      `setup.place_model` and `frozen_models.open_frozen`.
  """
  model, device = settings.recipe.model, mesh.devices.flat[0]
  if device.platform == 'cpu':
    host_memory.keep_freed(parameters.count(model))
  earlier = None
  if saved:
    earlier = remat_choice.earlier_compute(
      saved.read_meta(), setup.fingerprint(mesh)
    )
  compute = settings.compute.on(device.platform, earlier)
  setup.check_stacks(compute, model, device)
  setup.check_positions(model, settings.data.train.lengths)
  placement = setup.place_model(
    model, compute, mesh, settings.rules, settings.adapters
  )
  frozen = frozen_models.open_frozen(settings, compute, placement)
  phases = phases_lib.Phases(
    placement,
    settings.recipe,
    settings.optimizer,
    settings.train,
    frozen.models,
  )
  return phases, frozen
