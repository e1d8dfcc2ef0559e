"""Losses of policies, by the name in `config.loss.kind`.

A row is a prompt with a group of G completions that the policy has sampled, and
their rewards (`training.rollouts`). A form makes advantages of the rewards of a
group, and a loss of each completion.

| name | reward             | advantage                    | ratio to the old  |
|------|--------------------|------------------------------|-------------------|
| rloo | R - beta * KL      | minus the mean of the others | of the completion |
| grpo | R, KL in the loss  | minus the mean, over the     | of each token     |
|      |                    | deviation of the group       |                   |

There is an update for each rollout, so that the old log-probabilities are the
policy's own with the gradient stopped, and ratios are 1 with a gradient. All
log-probabilities are of logits divided by the rollout's temperature, after the
soft-cap. A completion of weight 0 (`cut=mask`) counts in the mean and deviation
of its group, and in nothing else.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from encdec_adapt.base import errors, keys
from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training.losses import loss, rollout_options

_REFERENCE = 'teacher'
_EPSILON = 1e-4  # Added to the deviation of a group, as in TRL.


class Tokens(NamedTuple):
  """Per-token tensors of a policy loss, [P, G, T] each.

  Attributes:
    log_probs: log pi, which has the gradient.
    old: log pi of the policy that has sampled.
    reference: log-probabilities of the reference; `log_probs` without the
      gradient where none is read.
    importance: weights of the tokens for the difference of sampler and trainer.
    weights: 1 at tokens that count, else 0.
  """

  log_probs: Array
  old: Array
  reference: Array
  importance: Array
  weights: Array

  def sum(self, values: Array) -> Float[Array, 'P G']:
    """Sums values over the tokens that count."""
    return jnp.sum(jnp.where(self.weights > 0, values, 0.0), axis=-1)

  @property
  def kl(self) -> Float[Array, 'P G']:
    """The sum of log pi - log reference, without a gradient."""
    difference = jax.lax.stop_gradient(self.log_probs) - self.reference
    return self.sum(difference)


@dataclasses.dataclass(frozen=True)
class Form:
  """Base of the losses; its fields are the options of a name."""

  beta: float = keys.key(0.0, 'Weight of the KL to the reference.', at_least=0)
  clip: float = keys.key(0.2, 'Ratios count within 1 -+ clip.', above=0)
  truncate: float = keys.key(
    0.0,
    'Tokens count by the ratio of trainer to sampler, at most this (2); 0: by'
    ' 1.',
    at_least=0,
  )

  def __post_init__(self):
    keys.check(self, f'{loss.KIND}: ')

  def advantages(
    self, rewards: Float[Array, 'P G'], kl: Float[Array, 'P G']
  ) -> Float[Array, 'P G']:
    """Returns the advantages of the completions of each group."""
    raise NotImplementedError

  def loss(
    self, advantages: Float[Array, 'P G'], tokens: Tokens
  ) -> Float[Array, 'P G']:
    """Returns the loss of each completion, before its divisor."""
    raise NotImplementedError

  def divisor(self, weights: Float[Array, 'P G T']) -> Array:
    """Returns the divisor of the sum over a batch: here the completions."""
    return jnp.sum(_counts(weights))

  def clipped(
    self, ratios: Float[Array, '...'], advantages: Float[Array, '...']
  ) -> Float[Array, '...']:
    """Returns -min(ratio * A, clipped ratio * A), as in PPO."""
    near = jnp.clip(ratios, 1 - self.clip, 1 + self.clip)
    return -jnp.minimum(ratios * advantages, near * advantages)


@dataclasses.dataclass(frozen=True)
class Rloo(Form):
  """REINFORCE leave-one-out (arXiv:2402.14740, equation 7).

  r = R - beta * sum(log pi - log reference); A = r - mean of the others' r.
  """

  beta: float = keys.key(0.05, 'Weight of the KL in the reward.', at_least=0)

  def advantages(self, rewards, kl):
    rewards = rewards - self.beta * kl
    group = rewards.shape[-1]
    mean = jnp.mean(rewards, axis=-1, keepdims=True)
    return (rewards - mean) * (group / (group - 1))

  def loss(self, advantages, tokens):
    # Weighted in the exponent: where the ratio is 1, its gradient is that of
    # the weighted log-probabilities.
    change = tokens.importance * (tokens.log_probs - tokens.old)
    return self.clipped(jnp.exp(tokens.sum(change)), advantages)


@dataclasses.dataclass(frozen=True)
class Grpo(Form):
  """Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

  A = (R - mean) / (deviation + 1e-4), of each token; plus beta times k3 =
  exp(d) - d - 1 of d = log reference - log pi, or with `kl=k3_ratio` k3 times
  the ratio (TRL 1.16). Divisor: 'sequence' is GRPO (mean over the tokens of
  each completion), 'token' DAPO (arXiv:2503.14476), and 'constant' completions
  times the most tokens of one, which with deviation=none is Dr. GRPO
  (arXiv:2503.20783).
  """

  divisor_of: str = keys.key(
    'sequence',
    'Of the loss.',
    one_of=('sequence', 'token', 'constant'),
    name='divisor',
  )
  deviation: str = keys.key(
    'group', 'Divisor of advantages.', one_of=('group', 'none')
  )
  kl: str = keys.key('k3', 'Its term.', one_of=('k3', 'k3_ratio'))

  def advantages(self, rewards, kl):
    del kl
    centred = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    if self.deviation == 'none':
      return centred
    deviation = jnp.std(rewards, axis=-1, keepdims=True, ddof=1)
    return centred / (deviation + _EPSILON)

  def loss(self, advantages, tokens):
    ratios = jnp.exp(tokens.log_probs - tokens.old)
    values = tokens.importance * self.clipped(ratios, advantages[..., None])
    if self.beta:
      difference = tokens.reference - tokens.log_probs
      k3 = jnp.expm1(difference) - difference
      values += self.beta * k3 * (ratios if self.kl == 'k3_ratio' else 1.0)
    total = tokens.sum(values)
    if self.divisor_of != 'sequence':
      return total
    return total / jnp.maximum(jnp.sum(tokens.weights, axis=-1), 1.0)

  def divisor(self, weights):
    if self.divisor_of == 'token':
      return jnp.sum(weights)
    longest = weights.shape[-1] if self.divisor_of == 'constant' else 1
    return super().divisor(weights) * longest


FORMS: Mapping[str, type[Form]] = {'rloo': Rloo, 'grpo': Grpo}


@dataclasses.dataclass(frozen=True)
class Policy(loss.Loss):
  """The loss of a form on groups of completions that the policy has sampled.

  Metrics of steps: `kl` (mean over completions of the sum of log pi - log
  reference; only with a reference), `entropy` of a token, and `gap`, the mean
  absolute difference of the sampler's and the trainer's log-probability of a
  token. Held-out metrics are those of cross-entropy to the given targets, and
  `reward`, the mean of greedy completions.
  """

  name: ClassVar[str] = 'policy'
  forms: ClassVar[Mapping[str, type]] = FORMS
  starts_from_reference: ClassVar[bool] = True
  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'kl': 'completions',
    'entropy': 'tokens',
    'gap': 'tokens',
  }
  curves: ClassVar[tuple[str, ...]] = (
    *loss.Loss.curves,
    'reward',
    'sampled_reward',
  )
  selects: ClassVar[str] = 'reward'
  highest: ClassVar[bool] = True
  samples: ClassVar[bool] = True
  reads_rewards: ClassVar[bool] = True
  allows_dropout: ClassVar[bool] = False
  unit: ClassVar[str] = 'of greedy completions'
  axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = framing.GROUP_AXES | {
    'rewards': ('batch', None),
    'sampler_log_probs': ('batch', None, 'length'),
  }

  def __post_init__(self):
    super().__post_init__()
    if self.kind_name in FORMS:
      for part, _ in self.kind_parts[1]:
        raise part.error('must be left out: a policy has a single loss')

  @property
  def form(self) -> Form:
    """The form that `kind` names, with its options."""
    return self.kind_parts[0]

  @property
  def references(self) -> tuple[str, ...]:
    """The reference model, if the loss or the budget of KL reads it."""
    is_read = self.form.beta > 0 or self.rollouts.max_kl > 0
    return (_REFERENCE,) if is_read else ()

  def check(
    self, model: model_config.ModelConfig, objectives: loss.Objectives
  ) -> None:
    """Checks the options of sampling, and that rows have a prompt.

    Raises:
      UserError: they do not suit a policy.
    """
    options, label = self.rollouts, rollout_options.LABEL
    if options.samples < 2:
      raise errors.UserError(
        f'{label}: samples is {options.samples} with the loss {self.kind!r},'
        ' which compares the completions of a prompt; set it to at least 2.'
      )
    if options.filters:
      raise errors.UserError(
        f'{label}: top_k and top_p are not read by the loss {self.kind!r}:'
        ' log-probabilities would not be those of the distribution that was'
        ' sampled from; leave them out.'
      )
    if any(
      x.feeds != 'pair' or x.answers > 1 or x.masks_inputs for x in objectives
    ):
      raise errors.UserError(
        f'{loss.KIND} is {self.kind!r} and config.data.objective is'
        f' {" | ".join(map(str, objectives))!r}, whose rows have no prompt with'
        ' a single answer, or have masks (meap); choose the objective pairs or'
        ' chat, without masks.'
      )

  def make_batch(
    self,
    groups: Sequence[Sequence[Sequence[framing.Pair]]],
    lengths: framing.Lengths,
    ids: special_ids.Framing,
    *,
    teacher: bool,
  ) -> loss.Rows:
    """Frames completions, with rewards and log-probabilities of 0.

    Args:
      groups: for each completion of each prompt, its pair alone; no pair frames
        a row of padding.
      lengths: tokens of a prompt, and of a given answer.
      ids: special ids.
      teacher: whether to make the teacher's fields.
    """
    lengths, _ = self.row_shape(lengths, 1)
    batch = framing.stack_rows(
      [framing.frame_group(x, lengths, ids, teacher=teacher) for x in groups]
    )
    zeros = np.zeros_like(batch['weights'])
    return batch | {'rewards': zeros[..., 0], 'sampler_log_probs': zeros}

  def row_shape(self, lengths, answers):
    del answers
    tokens = self.rollouts.tokens
    return dataclasses.replace(lengths, decoder=tokens), self.rollouts.samples

  def pad_batch(self, maker, lengths, ids, *, teacher):
    del maker
    group = [[]] * self.rollouts.samples
    return self.make_batch([group], lengths, ids, teacher=teacher)

  def weight(self, batch: loss.Batch) -> Float[Array, '']:
    """Returns the divisor of the loss."""
    return self.form.divisor(batch['weights']).astype(jnp.float32)

  def divisors(self, batch: loss.Batch) -> loss.Terms:
    """Returns the divisor of the loss, numbers of completions and tokens."""
    weights = batch['weights']
    counts = {
      'completions': jnp.sum(_counts(weights), dtype=jnp.float32),
      'tokens': jnp.sum(weights),
    }
    at_least_one = {k: jnp.maximum(n, 1.0) for k, n in counts.items()}
    return super().divisors(batch) | at_least_one

  def terms(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    compute = functools.partial(
      self.answer_log_probs,
      batch=batch,
      temperature=self.rollouts.temperature,
    )
    log_probs, entropy = compute(outputs, entropy=True)
    old = jax.lax.stop_gradient(log_probs)
    reference = old
    if references:
      reference = compute(references[_REFERENCE])
    ratios = jnp.exp(old - batch['sampler_log_probs'])
    importance = jnp.ones_like(old)
    if self.form.truncate:
      importance = jnp.minimum(ratios, self.form.truncate)
    tokens = Tokens(log_probs, old, reference, importance, batch['weights'])
    kl = tokens.kl
    advantages = self.form.advantages(batch['rewards'], kl)
    losses = self.form.loss(advantages, tokens)
    values = {
      'loss': jnp.where(_counts(tokens.weights), losses, 0.0),
      'entropy': tokens.sum(entropy),
      'gap': tokens.sum(jnp.abs(old - batch['sampler_log_probs'])),
    }
    if references:
      values['kl'] = kl
    return {name: jnp.sum(value) for name, value in values.items()}


def _counts(weights: Float[Array, 'P G T']) -> Array:
  """Returns whether each completion counts, [P, G]."""
  return jnp.any(weights > 0, axis=-1)
