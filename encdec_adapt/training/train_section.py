"""The configuration section `train`: the training loop.

Plans and evaluations read it without the loop, so it imports nothing of that.
"""

import dataclasses

from encdec_adapt.base import errors, keys, option_strings
from encdec_adapt.telemetry import trackers

# All other names of evaluators are those of tasks, or folders of them.
LOSS, SAMPLES = 'loss', 'samples'


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
    16, 'Rows of a step, over all devices and hosts.', at_least=1
  )
  microbatches: int = keys.key(
    1, 'Parts of a batch whose gradients are accumulated.', at_least=1
  )
  dropout: float = keys.key(
    0.0,
    'Rate of dropout in training: of the embeddings, and of what attention,'
    ' cross-attention and feed-forward of every layer add to the residual'
    ' stream (after their post-norms). Teacher and evaluation have none. A job'
    ' that is resumed keeps it above 0, or 0.',
    at_least=0,
    below=1,
  )
  cross_attention_warmup: int = keys.key(
    0,
    'First steps in which only cross-attention trains; the paper uses 1000'
    ' for unbalanced pairs and 0 for balanced ones.',
    at_least=0,
  )
  log_every: int = keys.key(10, 'Steps between printed lines.', at_least=1)
  evaluators: str = keys.key(
    'loss=50',
    'Evaluators, and the steps between two runs of each:'
    " 'loss=100,samples=500,tasks/=1000', or a share of the job's steps:"
    " 'loss=5%,samples=10%'. `loss` is of the held-out rows,"
    ' `samples` are answers to two of them; others are local tasks (a folder)'
    ' or tasks by name (encdec_adapt/evaluation/README.md). All run at step 0'
    ' and at the last step; steps are multiples of those of `loss`. Scores go'
    ' to WORKDIR/results.jsonl and to trackers.',
  )
  trackers: str = keys.key(
    'tensorboard',
    "Trackers that show configuration, metrics, scores and samples: '', or"
    " names, as in 'tensorboard,wandb' (encdec_adapt/evaluation/README.md).",
  )
  patience: int = keys.key(
    0,
    'Evaluations in a row without a lower held-out loss after which the job'
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

  def __post_init__(self):
    keys.check(self, 'config.train.')
    self.intervals  # noqa: B018  Checks them.
    trackers.parse(self.trackers)
    if self.batch_size % self.microbatches:
      raise errors.UserError(
        f'config.train.batch_size ({self.batch_size}) does not divide into'
        f' config.train.microbatches ({self.microbatches}); change one of'
        ' them.'
      )
    # Steps of 0 are open: they follow from the records, which are not made yet.
    if 0 < self.steps <= self.cross_attention_warmup:
      raise errors.UserError(
        'config.train.cross_attention_warmup'
        f' ({self.cross_attention_warmup}) leaves none of the'
        f' {self.steps} steps to the other parameters; lower it or raise'
        ' config.train.steps.'
      )

  @property
  def intervals(self) -> dict[str, int]:
    """Steps between two runs of each evaluator, by its name.

    Shares are of `steps`, and mean nothing while these are open.
    """
    parts: dict[str, option_strings.Interval] = {}
    label = 'config.train.evaluators'
    for part in option_strings.Part(label, self.evaluators).divide(','):
      entry = part.strip()
      # The last mark, as the names of folders contain it too.
      name, _, number = entry.text.rpartition('=')
      if not name or not number or name in parts:
        raise entry.error(
          "must be NAME=STEPS, each name once, as in 'loss=100,samples=500'"
          " or 'loss=5%'."
        )
      start = entry.stop - len(number)
      parts[name] = option_strings.Interval.read(
        dataclasses.replace(entry, start=start)
      )
    # Evaluations are due at the steps of the held-out loss only, so the others
    # could not run between them.
    loss = parts.get(LOSS)
    if not loss or not all(_are_multiples(x, loss) for x in parts.values()):
      raise errors.UserError(
        f'config.train.evaluators is {self.evaluators!r}; it must have'
        f' {LOSS}=STEPS, and the steps of the others must be multiples of'
        ' those, or all of them shares.'
      )
    every = loss.steps(self.steps)
    # Rounding keeps multiples of a share multiples.
    return {
      name: every * round(part.number / loss.number)
      if part.is_share == loss.is_share
      else part.steps(self.steps, every)
      for name, part in parts.items()
    }


def _are_multiples(
  part: option_strings.Interval, loss: option_strings.Interval
) -> bool:
  """Returns whether an interval can be a multiple of that of the loss."""
  if part.is_share != loss.is_share:
    return part.is_share  # It is rounded to a multiple.
  ratio = part.number / loss.number
  return abs(ratio - round(ratio)) < 1e-6 and ratio > 0.5
