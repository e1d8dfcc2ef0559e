"""The configuration section `train.rewards`: rewards of completions.

`training.jobs.completion_rewards` computes them.
"""

import dataclasses
import functools
import re

from encdec_adapt.base import errors, keys

LABEL = 'config.train.rewards'


@dataclasses.dataclass(frozen=True)
class RewardsConfig:
  """Keys of `config.train.rewards`."""

  answers: float = keys.key(
    0.0,
    'Policies: weight of the reward 1 where the last number of a completion'
    ' equals that of the target; 0: off.',
    at_least=0,
  )
  code: float = keys.key(
    0.0,
    'Weight of the reward 1 where a completion passes the tests of its row,'
    ' with --allow_code; 0: off.',
    at_least=0,
  )
  models: tuple[str, ...] = keys.key(
    (), 'Checkpoints of reward models.', names=True
  )
  model_weights: tuple[float, ...] = keys.key(
    (), 'Their weights; () for 1 each.', weights=True
  )
  functions: tuple[str, ...] = keys.key(
    (),
    'FILE.py#FUNCTION: functions of prompts, completions and fields.',
    names=True,
  )
  function_weights: tuple[float, ...] = keys.key(
    (), 'Their weights; () for 1 each.', weights=True
  )

  def __post_init__(self):
    keys.check(self, f'{LABEL}.')
    for name, texts, weights in (
      ('model', self.models, self.model_weights),
      ('function', self.functions, self.function_weights),
    ):
      if weights and len(weights) != len(texts):
        raise errors.UserError(
          f'{LABEL}.{name}_weights is {weights!r} and {LABEL}.{name}s'
          f' {texts!r}; give a weight for each, or () for 1 each.'
        )
    texts = [name for name in ('answers', 'code') if getattr(self, name)]
    texts += [*self.functions, *self.models]
    if len({*map(name_of, texts)}) < len(texts):
      raise errors.UserError(
        f'two of the rewards {", ".join(texts)} have the same name, which is'
        ' that of the function or the last one of the path; rename one of them.'
      )

  @functools.cached_property
  def weights(self) -> dict[str, float]:
    """Weight of each enabled reward, by name."""
    weights = {'answers': self.answers, 'code': self.code}
    for texts, values in (
      (self.functions, self.function_weights),
      (self.models, self.model_weights),
    ):
      values = values or (1.0,) * len(texts)
      weights |= zip(map(name_of, texts), values, strict=True)
    return {name: weight for name, weight in weights.items() if weight}


def name_of(text: str) -> str:
  """Returns the name of a reward: its function, or the last path component."""
  return re.split('[/#]', text.rstrip('/'))[-1]
