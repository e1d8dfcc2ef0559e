"""Options of sampling, which losses of sampled completions read too."""

import dataclasses
import math

from encdec_adapt.base import errors, keys

LABEL = 'config.train.rollouts'


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """Options of `config.train.rollouts`: how completions are sampled."""

  samples: int = keys.key(8, 'Completions of each prompt.', at_least=1)
  tokens: int = keys.key(
    0,
    'Most tokens of a completion, its end included; 0: config.data'
    '.decoder_length.',
    at_least=0,
  )
  temperature: float = keys.key(1.0, 'Divisor of the logits.', above=0)
  top_k: int = keys.key(0, 'Likeliest tokens to draw from; 0: all.', at_least=0)
  top_p: float = keys.key(1.0, 'Their probability.', above=0, at_most=1)
  cut: str = keys.key(
    'keep',
    "Completions that do not end: 'keep', 'mask', or a penalty, which is"
    ' subtracted from the reward.',
  )
  max_kl: float = keys.key(
    0.0, 'KL to the reference at which the job ends; 0: none.', at_least=0
  )

  def __post_init__(self):
    keys.check(self, f'{LABEL}: ')
    self.penalty  # noqa: B018  Checks `cut`.

  @property
  def filters(self) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return self.top_k > 0 or self.top_p < 1

  @property
  def penalty(self) -> float:
    """Reward penalty for truncated completions."""
    if self.cut in ('keep', 'mask'):
      return 0.0
    try:
      value = float(self.cut)
    except ValueError:
      value = math.nan
    if not 0 < value < math.inf:
      raise errors.UserError(
        f'{LABEL}: cut is {self.cut!r}; it must be keep, mask, or a penalty'
        ' above 0.'
      )
    return value
