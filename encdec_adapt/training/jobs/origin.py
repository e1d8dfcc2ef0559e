"""Start of a job: from its sources, or resumed from its own checkpoint."""

from collections.abc import Callable, Iterable, Mapping
import functools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import manager, resume_checks
from encdec_adapt.cluster import distributed
from encdec_adapt.models import base_model, execution
from encdec_adapt.stored import frozen_base, run_artifacts
from encdec_adapt.telemetry import compute_cost
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job_models


class Origin:
  """Base class of starts; opening one reads no weights.

  Attributes:
    cost: totals of the job up to the start.
    base: frozen base of adapters; None without adapters.
  """

  cost: compute_cost.Cost
  base: frozen_base.FrozenBase | None

  def read_base(self) -> base_model.Params:
    """Reads the frozen base; {} without adapters."""
    if not self.base:
      return {}
    description = self.described_base['base']
    distributed.require_same('base', {'init.encoder': description['digest']})
    params = self.base.read()
    if distributed.is_lead():
      adapters = self.base.placement.adapters
      print(f'{adapters.description}; the base {description["name"]}')
    return params

  @functools.cached_property
  def described_base(self) -> dict[str, Any]:
    """Description of the base for `meta`; {} without adapters."""
    return {'base': self.base.describe()} if self.base else {}


class FromSources(Origin):
  """Start of a new job at step 0."""

  def __init__(
    self,
    settings: config_lib.Settings,
    compute: execution.ComputeConfig,
    phases: phases_lib.Phases,
    log: Callable[[str], None],
  ):
    """Opens the sources and checks them.

    Args:
      settings: the validated configuration.
      compute: section `compute`, resolved for the devices.
      phases: the phases of the job.
      log: prints a line on process 0.

    Raises:
      UserError: see `open_sources`, and the checks of `Sources`.
    """
    self.cost, self._log = compute_cost.Cost(), log
    self._seed, self._phases = settings.seed, phases
    self._sources = job_models.open_sources(
      settings.init, compute, phases.placement
    )
    self._sources.check_files(settings.data.vocabularies)
    if settings.recipe.sampling:
      self._sources.check_positions(settings.recipe.rows.lengths)
    self._sources.check_optimizer(phases)
    self.base = self._sources.base

  def check_rows(self, order: Mapping[str, Any], ranges: Any) -> None:
    """Does nothing: no rows were consumed before."""

  def check_references(self, digests: Mapping[str, str]) -> None:
    """Does nothing: no references were read before."""

  def chosen_remat(self, policy: str) -> str | None:
    """Returns None: no policy was chosen before."""

  def begin(
    self,
    workdir: str,
    opened: vocabulary_pair.Opened,
    references: Iterable[job_models.OpenedModel],
    fingerprint: Mapping[str, Any],
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Creates the initial state and writes the initial run artifacts.

    Args:
      workdir: work directory of the job.
      opened: vocabularies of the job.
      references: the frozen models.
      fingerprint: fingerprint of this start.

    Returns:
      The state, donated by the first step, and the costs of sources and
      references.
    """
    del fingerprint
    costs = self._sources.costs(references, self._log)
    state = self._sources.start(self._phases, self._seed)
    if self._sources.models and self._sources.coverage:
      self._log(self._sources.coverage.summary())
    if distributed.is_lead():
      run_artifacts.write_initial(
        workdir,
        self._sources.coverage,
        self._sources.pretrained_folders,
        opened,
      )
    return state, costs


class FromCheckpoint(Origin):
  """Start of a resumed job."""

  def __init__(
    self,
    settings: config_lib.Settings,
    checkpoint: manager.Checkpoint,
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    phases: phases_lib.Phases,
    log: Callable[[str], None],
  ):
    """Opens the checkpoint and checks that the job can resume from it.

    Args:
      settings: the validated configuration.
      checkpoint: the checkpoint.
      saved: its metadata.
      config: the configuration.
      phases: the phases of the job.
      log: prints a line on process 0.

    Raises:
      UserError: the configuration, the state or the base of adapters differs.
    """
    resume_checks.check_config(saved, config, log)
    self._checkpoint, self._log = checkpoint, log
    self._saved, self._shapes = saved, phases.abstract_saved(checkpoint.step)
    checkpoint.require_same(self._shapes)
    self.base = None
    if phases.placement.adapters:
      moved = settings.init.encoder
      self.base = frozen_base.reopen(saved, moved, phases.placement)
    self.cost = compute_cost.Cost(**checkpoint.read_data())

  def check_rows(self, order: Mapping[str, Any], ranges: Any) -> None:
    """Checks that the saved position refers to the same rows."""
    consumed = self.cost.rows_of_parts
    saved = self._saved['order']
    resume_checks.check_same_rows(saved, order, consumed, ranges)

  def check_references(self, digests: Mapping[str, str]) -> None:
    """Checks that the frozen models are unchanged."""
    now = {'references': digests}
    resume_checks.check_same_references(self._saved, now)

  def chosen_remat(self, policy: str) -> str | None:
    """Returns the saved text on the choice of 'auto', if the policy is kept."""
    same = self._saved['config']['compute']['remat'] == policy
    return self._saved.get('remat') if same else None

  def begin(
    self,
    workdir: str,
    opened: vocabulary_pair.Opened,
    references: Iterable[job_models.OpenedModel],
    fingerprint: Mapping[str, Any],
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Restores the state; see `FromSources.begin`."""
    del workdir, opened, references
    now = {'fingerprint': fingerprint}
    resume_checks.report_environment(self._saved, now, self._log)
    state = self._checkpoint.restore(self._shapes)
    self._log(f'resuming at step {self._checkpoint.step}')
    return state, self._saved['sources']
