"""The start of a job: from its sources, or resumed from its checkpoint.

Opening a start reads configs and headers and checks them before any long work;
`Start.begin` then reads the weights.
"""

from collections.abc import Mapping
from typing import Any

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import manager, resume_checks
from encdec_adapt.cluster import distributed
from encdec_adapt.data.records import record_sets
from encdec_adapt.models import execution
from encdec_adapt.stored import frozen_base, run_artifacts
from encdec_adapt.telemetry import compute_cost, environment
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.jobs import job_models, job_sources
from encdec_adapt.training.jobs import trained as trained_lib


class Start:
  """Base class of starts.

  Attributes:
    saved_step: step of the checkpoint to resume from; None for a new job.
    step: the first step.
    cost: totals of the job up to that step.
    base: frozen base of adapters; None without adapters.
  """

  saved_step: int | None = None
  step = 0
  cost: compute_cost.Cost
  base: frozen_base.FrozenBase | None

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    settings: config_lib.Settings,
    phases: phases_lib.Phases,
  ):
    """Keeps the job's configuration with the resolved section `compute`."""
    self._settings, self._phases = settings, phases
    self._config = config_lib.with_compute(config, self._compute)

  @property
  def _compute(self) -> execution.ComputeConfig:
    return self._phases.placement.model.compute

  def begin(
    self, job: job_lib.Job, made_by: Mapping[str, str]
  ) -> tuple[state_lib.TrainState, trained_lib.Trained, dict[str, Any]]:
    """Reads all models and chooses `compute.remat` if it is 'auto'.

    All processes call it together; process 0 writes the configuration to the
    work directory.

    Args:
      job: the job.
      made_by: description of the command.

    Returns:
      The state, donated by the first step; the model in training with its
      frozen models; and the metadata of checkpoints.
    """
    described, base = {}, {}
    if self.base:
      described = {'base': self.base.describe()}
      distributed.require_same(
        'base', {'init.encoder': described['base']['digest']}
      )
      base = self.base.read()
      distributed.log(
        f'{self.base.placement.adapters.description}; the base'
        f' {described["base"]["name"]}'
      )
    fingerprint = setup.fingerprint(job.placement.mesh)
    # The first step donates the state's buffers: another reference to the
    # parameters would keep a second copy in memory.
    state, costs = self._read(job, fingerprint)
    params, digests = job.frozen.read(self.base, base)
    if stored := job.loader.stored_teacher:
      digests['teacher'] = stored.digest
    self._check_references(digests)
    trained = trained_lib.Trained(
      job.phases, job.resolved.schedule, base, params
    )
    config, chosen = self._config, self._saved_remat()
    if self._compute.remat == execution.AUTO:
      trained, chosen = trained.with_remat(job, state)
      config = config_lib.with_compute(config, trained.compute)
    meta = {
      'config': config.to_dict(),
      'environment': environment.report(),
      'fingerprint': fingerprint,
      'vocabularies': job.data.vocabularies.describe(),
      'order': self._order(job.data.train),
      'sources': costs,
      'references': digests,
      'remat': chosen,
      **described,
    }
    if distributed.is_lead():
      run_artifacts.write_config(
        job.workdir, config, meta['environment'], made_by
      )
    return state, trained, meta

  def _order(self, records: record_sets.RecordSet) -> dict[str, Any]:
    return {'records': records.digests, 'seed': self._settings.seed}

  def check_rows(self, records: record_sets.RecordSet) -> None:
    """Checks that the saved position refers to the same rows."""

  def _read(
    self, job: job_lib.Job, fingerprint: Mapping[str, Any]
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Returns the state, and the costs of sources and references."""
    raise NotImplementedError

  def _check_references(self, digests: Mapping[str, str]) -> None:
    """Checks that the frozen models are unchanged."""

  def _saved_remat(self) -> str | None:
    """Returns the saved text on the choice of 'auto', if the policy is kept."""
    return None


class FromSources(Start):
  """Start of a new job at step 0."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    settings: config_lib.Settings,
    phases: phases_lib.Phases,
  ):
    """Opens the sources and checks them.

    Args:
      config: the configuration.
      settings: the validated configuration.
      phases: the phases of the job.

    Raises:
      UserError: see `job_sources`.
    """
    super().__init__(config, settings, phases)
    self.cost = compute_cost.Cost()
    self._sources = job_sources.open_sources(
      settings.init, self._compute, phases.placement
    )
    self._sources.check_files(settings.data.vocabularies)
    if settings.recipe.sampling:
      for source in self._sources.models:
        job_models.check_positions(
          source,
          settings.model.architecture,
          settings.recipe.rows.lengths,
          'source',
        )
    self._sources.check_optimizer(phases)
    self.base = self._sources.base

  def _read(
    self, job: job_lib.Job, fingerprint: Mapping[str, Any]
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Creates the initial state and writes the initial run artifacts."""
    del fingerprint
    models, coverage = self._sources.models, self._sources.coverage
    ancestors = [*models, *(x.source for x in job.frozen.references.values())]
    costs = compute_cost.read_sources({x.name: x.path for x in ancestors})
    for name in costs['not_counted']:
      distributed.log(
        f'the cost of {name} is unknown: the summary leaves it out'
      )
    state = self._sources.start(self._phases, self._settings.seed)
    if models and coverage:
      distributed.log(coverage.summary())
    if distributed.is_lead():
      run_artifacts.write_initial(
        job.workdir,
        coverage,
        self._sources.pretrained_folders,
        job.data.vocabularies,
      )
    return state, costs


class FromCheckpoint(Start):
  """Start of a resumed job."""

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    settings: config_lib.Settings,
    phases: phases_lib.Phases,
    saved: manager.Checkpoint,
  ):
    """Checks that the job can resume from its checkpoint.

    Args:
      config: the configuration.
      settings: the validated configuration.
      phases: the phases of the job.
      saved: the checkpoint.

    Raises:
      UserError: the configuration, the state or the base of adapters differs.
    """
    super().__init__(config, settings, phases)
    self.step = self.saved_step = saved.step
    self._checkpoint, self._meta = saved, saved.read_meta()
    resume_checks.check_config(
      self._meta, self._config.to_dict(), distributed.log
    )
    self._shapes = phases.abstract_saved(saved.step)
    saved.require_same(self._shapes)
    self.base = None
    if phases.placement.adapters:
      moved = settings.init.encoder
      self.base = frozen_base.reopen(self._meta, moved, phases.placement)
    self.cost = compute_cost.Cost(**saved.read_data())

  def check_rows(self, records: record_sets.RecordSet) -> None:
    """Checks that the saved position refers to the same rows."""
    resume_checks.check_same_rows(
      self._meta['order'],
      self._order(records),
      self.cost.rows_of_parts,
      records.ranges,
    )

  def _check_references(self, digests: Mapping[str, str]) -> None:
    now = {'references': digests}
    resume_checks.check_same_references(self._meta, now)

  def _saved_remat(self) -> str | None:
    same = self._meta['config']['compute']['remat'] == self._compute.remat
    return self._meta.get('remat') if same else None

  def _read(
    self, job: job_lib.Job, fingerprint: Mapping[str, Any]
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Restores the state."""
    del job
    resume_checks.report_environment(
      self._meta, {'fingerprint': fingerprint}, distributed.log
    )
    state = self._checkpoint.restore(self._shapes)
    distributed.log(f'resuming at step {self.step}')
    return state, self._meta['sources']


def open_start(
  config: ml_collections.ConfigDict,
  settings: config_lib.Settings,
  checkpoints: manager.Checkpoints,
  saved: manager.Checkpoint | None,
  phases: phases_lib.Phases,
) -> Start:
  """Opens the start of a job.

  Args:
    config: the configuration.
    settings: the validated configuration.
    checkpoints: the checkpoints of the job.
    saved: the newest of them; None for a new job.
    phases: the phases of the job.

  Raises:
    UserError: see `FromSources` and `FromCheckpoint`, or all checkpoints are
      damaged.
  """
  if saved:
    return FromCheckpoint(config, settings, phases, saved)
  checkpoints.check_not_lost()
  return FromSources(config, settings, phases)
