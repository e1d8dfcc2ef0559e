"""Reward models of a job, as planned with its programs.

A missing model is assumed to have the policy's shape with a scalar head. Like
`programs`, this module reads no weights.
"""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any

from encdec_adapt.models import execution, model_config, parameters
from encdec_adapt.objectives import framing
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.jobs import job_models


@dataclasses.dataclass(frozen=True)
class RewardModels:
  """Reward models on the mesh of a job.

  Attributes:
    placed: the models, by name of their part in a program.
    missing: paths of missing models.
  """

  placed: dict[str, state_lib.Placement]
  missing: list[str]

  @property
  def largest(self) -> str:
    """Name of the model with the most parameters."""
    return max(
      self.placed, key=lambda k: parameters.count(self.placed[k].model.config)
    )

  def trees(self) -> dict[str, Any]:
    """Returns their abstract parameters, which stay in a job's memory."""
    return {name: x.abstract_params() for name, x in self.placed.items()}


def place(
  paths: Sequence[str],
  policy: state_lib.Placement,
  compute: execution.ComputeConfig,
  choice: vocabulary_pair.Choice,
  lengths: framing.Lengths,
) -> RewardModels:
  """Places the reward models of a job as in training.

  Args:
    paths: `config.train.rewards.models`.
    policy: the trained model and its mesh.
    compute: section `compute` of the configuration.
    choice: the vocabularies of the job.
    lengths: maximum tokens of a prompt, BOS included, and of a completion.

  Raises:
    UserError: an existing model is not a reward model, or cannot read the rows.
  """
  placed, missing = {}, []
  for i, path in enumerate(paths, 1):
    if model_on_disk.resolve(path)[0].exists():
      reward = job_models.open_reward_model(
        path, policy, compute, choice, lengths
      ).placement
    else:
      missing.append(path)
      model = model_config.reward_model(policy.model.config)
      reward = job_models.place_reward_model(model, policy, compute)
    placed[f'reward model {i}'] = reward
  return RewardModels(placed, missing)


def missing_text(paths: Iterable[str]) -> list[str]:
  """Returns a line for each missing reward model."""
  return [
    f"{path} does not exist: a reward model of the policy's shape is counted"
    for path in paths
  ]
