"""Opens the rows and batches of a job, as declared by its recipe."""

from encdec_adapt import config as config_lib
from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.data.records import loader as loader_lib
from encdec_adapt.data.records import row_rates, stored_teacher
from encdec_adapt.telemetry import compute_cost
from encdec_adapt.training import job_telemetry, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import (
  frozen_models,
  on_policy,
  policy_batches,
  record_batches,
)
from encdec_adapt.training.jobs import job as job_lib


def open_loader(
  settings: config_lib.Settings,
  data: setup.Data,
  placement: state_lib.Placement,
  frozen: frozen_models.FrozenModels,
  cost: compute_cost.Cost,
  step: int,
) -> loader_lib.Loader:
  """Opens the training rows of this process.

  Args:
    settings: the validated configuration.
    data: vocabularies and records.
    placement: the trained model and its mesh.
    frozen: the frozen models.
    cost: totals of the job, including its position in the rows.
    step: first step of this start.
  """
  stored = None
  if folder := settings.recipe.rows.stored_teacher:
    stored = stored_teacher.StoredTeacher(folder, data.train)
    # Processes may read different disks.
    distributed.require_same(
      'stored teacher', {'teacher.stored': stored.digest}
    )
  return setup.training_batches(
    data.train,
    settings.train.batch_size,
    placement,
    position=cost.rows,
    consumed=cost.rows_of_parts or None,
    first_step=step,
    seed=settings.seed,
    repeat=settings.data.repeat,
    rates=row_rates.parse(settings.data.rates),
    teacher=setup.reads_teacher_row(
      settings.data.train.lengths, settings.model, *frozen.shapes
    ),
    stored=stored,
  )


def open_batches(
  job: job_lib.Job,
  telemetry: job_telemetry.JobTelemetry,
  watch: watchdog.Watchdog,
) -> record_batches.RecordBatches:
  """Opens the batches of a job.

  Args:
    job: the job.
    telemetry: telemetry of the job.
    watch: watchdog of the job.
  """
  if not job.recipe.sampling:
    return record_batches.RecordBatches(job, telemetry)
  if job.frozen.rewards is None:
    return on_policy.OnPolicyBatches(job, telemetry, watch)
  return policy_batches.PolicyBatches(job, telemetry, watch)
