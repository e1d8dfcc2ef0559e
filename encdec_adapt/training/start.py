"""The start of a job: from its sources, or resumed from its checkpoint.

Opening a start reads configs and headers and checks them before any long work;
`Start.begin` then reads the weights.
"""

from collections.abc import Iterator, Mapping
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
from encdec_adapt.training.jobs import job_sources
from encdec_adapt.training.jobs import trained as trained_lib
from encdec_adapt.training.sections import train_section


class Start:
  """Start of a job.

  Attributes:
    saved: the checkpoint to resume from; None for a new job.
    step: the first step.
    cost: totals of the job up to that step.
    base: frozen base of adapters; None without adapters.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    settings: config_lib.Settings,
    saved: manager.Checkpoint | None,
    phases: phases_lib.Phases,
  ):
    """Opens the sources, or the checkpoint, and checks them.

    Args:
      config: the configuration.
      settings: the validated configuration.
      saved: the newest checkpoint of the job; None for a new job.
      phases: the phases of the job.

    Raises:
      UserError: see `job_sources` for a new job; or the configuration, the
        state or the base of adapters differs from the checkpoint.
    """
    self._settings, self._phases, self.saved = settings, phases, saved
    self._compute = phases.placement.model.compute
    self._config = config_lib.with_compute(config, self._compute)
    self._meta = saved.read_meta() if saved else {}
    self.step, self.base = saved.step if saved else 0, None
    if not saved:
      self.cost = compute_cost.Cost()
      self._sources = job_sources.open_sources(
        settings.init, self._compute, phases.placement
      )
      self._sources.check(settings, phases)
      self.base = self._sources.base
      return
    resume_checks.check_config(
      self._meta, self._config.to_dict(), distributed.log
    )
    before = self._meta['config']['train']
    resume_checks.check_same_phase(
      train_section.shortened(
        before['cross_attention_warmup'], before['steps']
      ),
      settings.train.warmup,
      saved.step,
    )
    saved.require_same(phases.abstract_saved(saved.step))
    if phases.placement.adapters:
      moved = settings.init.encoder
      self.base = frozen_base.reopen(self._meta, moved, phases.placement)
    self.cost = compute_cost.Cost(**saved.read_data())

  def check_rows(self, records: record_sets.RecordSet) -> None:
    """Checks that a saved position refers to the same rows.

    Raises:
      UserError: see `resume_checks.check_same_rows`.
    """
    if self.saved:
      resume_checks.check_same_rows(
        self._meta['order'],
        self._order(records),
        self.cost.rows_of_parts,
        records.ranges,
      )

  def _order(self, records: record_sets.RecordSet) -> dict[str, Any]:
    return {'records': records.digests, 'seed': self._settings.seed}

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

    Raises:
      UserError: a frozen model or the base differs between processes or from
        the checkpoint, or no policy of 'auto' fits.
    """
    for note in _warmup_notes(self._settings, job.resolved.steps):
      distributed.log(note)
    base_fields, base = {}, {}
    if self.base:
      base_fields = {'base': self.base.describe()}
      distributed.require_same(
        'base', {'init.encoder': base_fields['base']['digest']}
      )
      base = self.base.read()
      distributed.log(
        f'{self.base.placement.adapters.description}; the base'
        f' {base_fields["base"]["name"]}'
      )
    fingerprint = setup.fingerprint(job.placement.mesh)
    # The first step donates the state's buffers: another reference to the
    # parameters would keep a second copy in memory.
    if self.saved:
      state, costs = self._restore(fingerprint), self._meta['sources']
    else:
      state, costs = self._read_sources(job)
    params, digests = job.frozen.read(self.base, base)
    if stored := job.loader.stored_teacher:
      digests['teacher'] = stored.digest
    resume_checks.check_same_references(self._meta, {'references': digests})
    trained = trained_lib.Trained(
      job.phases, job.resolved.schedule, base, params
    )
    config, remat = self._config, None
    if self._compute.remat == execution.AUTO:
      trained, remat = trained.with_remat(job, state)
      config = config_lib.with_compute(config, trained.compute)
    elif (
      self.saved
      and self._meta['config']['compute']['remat'] == self._compute.remat
    ):
      remat = self._meta.get('remat')
    meta = {
      'config': config.to_dict(),
      'environment': environment.report(),
      'fingerprint': fingerprint,
      'vocabularies': job.data.vocabularies.describe(),
      'order': self._order(job.data.train),
      'sources': costs,
      'references': digests,
      'remat': remat,  # Describes the choice of 'auto'.
      **base_fields,
    }
    if distributed.is_lead():
      run_artifacts.write_config(
        job.workdir, config, meta['environment'], made_by
      )
    return state, trained, meta

  def _restore(self, fingerprint: Mapping[str, Any]) -> state_lib.TrainState:
    resume_checks.report_environment(
      self._meta, {'fingerprint': fingerprint}, distributed.log
    )
    state = self.saved.restore(self._phases.abstract_saved(self.step))
    distributed.log(f'resuming at step {self.step}')
    return state

  def _read_sources(
    self, job: job_lib.Job
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Creates the initial state and writes the initial run artifacts.

    Returns:
      The state, and the costs of sources and references.
    """
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


def _warmup_notes(settings: config_lib.Settings, steps: int) -> Iterator[str]:
  """Describes warm-ups that are longer than the job."""
  train, schedule = settings.train, settings.optimizer.schedule
  for key, given, used in (
    (
      'train.cross_attention_warmup',
      train.cross_attention_warmup,
      train.warmup,
    ),
    ('optimizer.warmup_steps', schedule.warmup_steps, schedule.warmup(steps)),
  ):
    if given is not None and given != used:
      yield (
        f'config.{key} is {given}, and the job has {steps} steps: its warm-up'
        f' takes a tenth of them, {used}'
      )
