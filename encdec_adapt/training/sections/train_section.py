"""The configuration section `train`: the training loop.

Plans and evaluations also read it, so it does not import the loop.
"""

import dataclasses

from encdec_adapt.base import errors, keys
from encdec_adapt.models import adapters
from encdec_adapt.telemetry import trackers
from encdec_adapt.training.sections import rewards_section, rollout_options


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Keys of `config.train`."""

  steps: int = keys.key(
    100,
    'Optimizer updates of the job; 0: until the records end, so that'
    ' config.data.passes is the number of epochs.',
    at_least=0,
  )
  batch_size: int = keys.key(
    16,
    'Rows of a step, over all devices and hosts; of preferences, prompts.',
    at_least=1,
  )
  microbatches: int = keys.key(
    1, 'Parts of a batch whose gradients are accumulated.', at_least=1
  )
  dropout: float = keys.key(
    0.0,
    'Rate of dropout in training: of the embeddings, and of what attention,'
    ' cross-attention and feed-forward of every layer add to the residual'
    ' stream (after their post-norms). Teacher, sampler and evaluation have'
    ' none. 0 for preferences and policies. A resumed job keeps it above 0, or'
    ' 0.',
    at_least=0,
    below=1,
  )
  cross_attention_warmup: int = keys.key(
    0,
    'First steps in which only cross-attention trains; the paper uses 1000'
    ' for unbalanced pairs and 0 for balanced ones. A tenth of'
    ' config.train.steps if these are not more; of a job that ends with its'
    ' records (steps=0) it is taken as it is.',
    at_least=0,
  )
  log_every: int = keys.key(10, 'Steps between printed lines.', at_least=1)
  trackers: tuple[str, ...] = keys.key(
    ('tensorboard',),
    'Trackers that show configuration, metrics, scores and samples:'
    " 'tensorboard', 'wandb' (encdec_adapt/evaluation/README.md); () for none.",
    names=True,
  )
  patience: int = keys.key(
    0,
    'Evaluations in a row without a lower held-out loss (of preferences, a'
    ' higher accuracy; of policies, a higher greedy reward) after which the job'
    ' ends (early stopping); 0: never.',
    at_least=0,
  )
  eval_batch_size: int = keys.key(16, 'Rows of an evaluation step.', at_least=1)
  max_skipped: int = keys.key(
    10, 'Non-finite updates in a row before the job stops.', at_least=1
  )
  hang_seconds: float = keys.key(
    300.0,
    'A step hangs after 20 times the median step and at least this long:'
    ' the job writes the stacks of all threads to WORKDIR/hang and exits.'
    ' Compiling, evaluating, saving and the first steps may take 12 times as'
    ' long. 0: never.',
    at_least=0,
  )
  profile_from: int = keys.key(
    10, 'First step traced into WORKDIR/profile.', at_least=0
  )
  profile_steps: int = keys.key(
    0, 'Steps to trace; SIGUSR1 traces the next 3.', at_least=0
  )

  lora: adapters.Options = keys.section(adapters.Options, switch='rank')
  rollouts: rollout_options.Rollouts = keys.section(rollout_options.Rollouts)
  rewards: rewards_section.RewardsConfig = keys.section(
    rewards_section.RewardsConfig
  )

  def __post_init__(self):
    keys.check(self, 'config.train.')
    trackers.check_names(self.trackers)
    if self.batch_size % self.microbatches:
      raise errors.UserError(
        f'config.train.batch_size ({self.batch_size}) does not divide into'
        f' config.train.microbatches ({self.microbatches}); change one of'
        ' them.'
      )
    if self.lora.rank and self.cross_attention_warmup:
      raise errors.UserError(
        'config.train.cross_attention_warmup is'
        f' {self.cross_attention_warmup} and config.train.lora.rank'
        f' {self.lora.rank}: adapters train from the first step on; set one of'
        ' them to 0.'
      )

  @property
  def warmup(self) -> int:
    """First steps in which only cross-attention trains."""
    return shortened(self.cross_attention_warmup, self.steps)

  def check_steps(self, steps: int) -> None:
    """Checks that a job is longer than the warm-up of cross-attention.

    Args:
      steps: steps of the job; 0 (unknown) before its records exist.

    Raises:
      UserError: the job is too short.
    """
    if 0 < steps <= self.warmup:
      raise errors.UserError(
        f'config.train.cross_attention_warmup ({self.warmup}) leaves none of'
        f' the {steps} steps to the other parameters; lower it or raise'
        ' config.train.steps.'
      )


def shortened(warmup: int, steps: int) -> int:
  """Returns a warm-up of cross-attention, shortened for a short job.

  Args:
    warmup: `config.train.cross_attention_warmup`.
    steps: `config.train.steps`.
  """
  return steps // 10 if 0 < steps <= warmup else warmup
