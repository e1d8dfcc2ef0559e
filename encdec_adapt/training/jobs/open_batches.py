"""Opens the rows and batches of a job, as declared by its recipe."""

from encdec_adapt import config as config_lib
from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.data.records import loader as loader_lib
from encdec_adapt.data.records import row_rates, stored_teacher
from encdec_adapt.telemetry import compute_cost
from encdec_adapt.training import job_telemetry, setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.jobs import (
  on_policy,
  policy_batches,
  record_batches,
)


def open_loader(
  settings: config_lib.Settings,
  data: setup.Data,
  placement: state_lib.Placement,
  cost: compute_cost.Cost,
  step: int,
  *,
  teacher: bool,
) -> tuple[loader_lib.Loader, dict[str, str]]:
  """Opens the training rows of this process.

  Args:
    settings: the validated configuration.
    data: vocabularies and records.
    placement: the trained model and its mesh.
    cost: totals of the job, including its position in the rows.
    step: first step of this start.
    teacher: whether batches have the teacher's fields.

  Returns:
    The loader, and the digest of the stored teacher, if any.
  """
  stored, digests = None, {}
  if folder := settings.recipe.rows.stored_teacher:
    stored = stored_teacher.StoredTeacher(folder, data.train)
    digests['teacher'] = stored.digest
    # Processes may read different disks.
    distributed.require_same(
      'stored teacher', {'teacher.stored': stored.digest}
    )
  loader = setup.training_batches(
    data.train,
    settings.train.batch_size,
    placement,
    position=cost.rows,
    consumed=cost.rows_of_parts or None,
    first_step=step,
    seed=settings.seed,
    repeat=settings.data.repeat,
    rates=row_rates.parse(settings.data.rates),
    teacher=teacher,
    stored=stored,
  )
  return loader, digests


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
