"""Frozen models and rewards of a job, as declared by its recipe."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.checkpoints import resume_checks
from encdec_adapt.data.records import record_sets
from encdec_adapt.models import (
  base_model,
  build,
  execution,
  model_config,
)
from encdec_adapt.stored import frozen_base
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import completion_rewards, job_models


@dataclasses.dataclass(frozen=True)
class FrozenModels:
  """Opened frozen models and rewards of a job, before reading weights.

  Attributes:
    references: the models of the recipe, by name.
    rewards: rewards of completions; None without rewards.
  """

  references: Mapping[str, job_models.OpenedModel]
  rewards: completion_rewards.Rewards | None

  @property
  def models(self) -> dict[str, build.Model]:
    """Frozen models of loss and metrics, by name."""
    return {name: x.placement.model for name, x in self.references.items()}

  def check(self, records: record_sets.RecordSet) -> None:
    """Checks that rows have the fields of the rewards; see `Rewards.check`."""
    if self.rewards:
      self.rewards.check(records)

  @property
  def shapes(self) -> list[model_config.ModelConfig]:
    """Shapes of the models of the recipe."""
    return [model.config for model in self.models.values()]

  @property
  def unread(self) -> list[Any]:
    """Parameter shapes of reward models, which are loaded at the first call."""
    models = self.rewards.models.values() if self.rewards else ()
    return [x.reference.placement.abstract_params() for x in models]

  def read(
    self, base: frozen_base.FrozenBase | None, base_params: base_model.Params
  ) -> tuple[dict[str, base_model.Params], dict[str, str]]:
    """Reads the parameters; returns them by name, and all digests.

    Args:
      base: frozen base of adapters; models made from it share its arrays.
      base_params: its parameters.
    """
    params, digests = job_models.read_frozen(self.references, base, base_params)
    for path, model in self.rewards.models.items() if self.rewards else ():
      name = f'{resume_checks.REWARD_MODEL} {path}'
      digests[name] = model.reference.source.digest
    return params, digests


def open_frozen(
  settings: config_lib.Settings,
  compute: execution.ComputeConfig,
  placement: state_lib.Placement,
) -> FrozenModels:
  """Opens the frozen models and rewards of a job.

  Args:
    settings: the validated configuration.
    compute: section `compute`, resolved for the devices.
    placement: the trained model and its mesh.

  Raises:
    UserError: see `job_models.open_frozen` and `completion_rewards.Rewards`.
  """
  references = job_models.open_frozen(
    settings.recipe.frozen,
    settings.teacher.dtype,
    placement,
    compute,
    settings.data.vocabularies,
    settings.recipe.rows.lengths,
  )
  rewards = completion_rewards.open_rewards(settings, compute, placement)
  return FrozenModels(references, rewards)
