"""The configuration section `train.rollouts`, shared with recipes."""

import dataclasses

from encdec_adapt.base import errors, keys

LABEL = 'config.train.rollouts'


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """Keys of `config.train.rollouts`: how completions are sampled."""

  samples: int = keys.key(
    8, 'Policies: completions of each prompt.', at_least=1
  )
  tokens: int = keys.key(
    0,
    'Policies, and distillation with on_policy: most tokens of a completion,'
    ' its end included; 0: config.data.decoder_length.',
    at_least=0,
  )
  temperature: float = keys.key(
    1.0,
    'Divisor of the logits, in policies also of those in the loss.',
    above=0,
  )
  top_k: int = keys.key(
    0,
    'Distillation with on_policy: likeliest tokens to draw from; 0: all.',
    at_least=0,
  )
  top_p: float = keys.key(
    1.0,
    'Distillation with on_policy: probability of the likeliest tokens to draw'
    ' from.',
    above=0,
    at_most=1,
  )
  cut: str = keys.key(
    'keep',
    "Policies: 'keep' counts completions that do not end as they are, 'mask'"
    " leaves them out of the loss, 'penalty' subtracts cut_penalty from their"
    ' reward.',
    one_of=('keep', 'mask', 'penalty'),
  )
  cut_penalty: float = keys.key(
    0.0, "Above 0 with cut='penalty', else 0.", at_least=0
  )
  max_kl: float = keys.key(
    0.0,
    'Policies: KL to the reference at which the job ends; 0: never.',
    at_least=0,
  )

  def __post_init__(self):
    keys.check(self, f'{LABEL}.')
    if (self.cut == 'penalty') != (self.cut_penalty > 0):
      raise errors.UserError(
        f'{LABEL}.cut is {self.cut!r} and {LABEL}.cut_penalty'
        f" {self.cut_penalty}; set both, cut to 'penalty' and cut_penalty above"
        ' 0, or neither.'
      )

  @property
  def filters(self) -> bool:
    """Whether sampling uses top-k or top-p."""
    return self.top_k > 0 or self.top_p < 1
