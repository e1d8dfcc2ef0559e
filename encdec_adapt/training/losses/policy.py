"""Policy-gradient losses.

A row is a prompt with G completions sampled from the policy, and their rewards
(`training.rollouts`). A loss computes advantages from the rewards of a group,
and a loss per completion.

| name | reward             | advantage                    | ratio to the old  |
|------|--------------------|------------------------------|-------------------|
| rloo | R - beta * KL      | minus the mean of the others | per completion    |
| grpo | R, KL in the loss  | minus the mean, over the     | per token         |
|      |                    | deviation of the group       |                   |

Each rollout is used for one update, so the old log-probabilities are the
current values with a stopped gradient, and ratios are 1 with a gradient. Logits
are divided by the sampling temperature, after the soft-cap. A completion of
weight 0 (`cut='mask'`) counts only in the mean and deviation of its group.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import keys
from encdec_adapt.training.losses import answers, loss

_EPSILON = 1e-4  # Added to the deviation of a group, as in TRL.


class Tokens(NamedTuple):
  """Per-token tensors of a policy loss, [P, G, T] each.

  Attributes:
    log_probs: log pi, with the gradient.
    old: log pi of the sampling policy.
    reference: log-probabilities of the reference; without a reference,
      `log_probs` with a stopped gradient.
    importance: importance weights that correct the mismatch between sampler
      and trainer.
    weights: 1 at counted tokens, else 0.
    entropy: entropy of the policy at each token.
  """

  log_probs: Array
  old: Array
  reference: Array
  importance: Array
  weights: Array
  entropy: Array

  def sum(self, values: Array) -> Float[Array, 'P G']:
    """Sums values over counted tokens."""
    return jnp.sum(jnp.where(self.weights > 0, values, 0.0), axis=-1)

  @property
  def kl(self) -> Float[Array, 'P G']:
    """The sum of log pi - log reference, without a gradient."""
    difference = jax.lax.stop_gradient(self.log_probs) - self.reference
    return self.sum(difference)


@dataclasses.dataclass(frozen=True)
class Policy(loss.Loss):
  """Base class of losses over groups of sampled completions.

  Metrics of a step: `kl` (mean over completions of the sum of log pi - log
  reference; only with a reference), `entropy` per token, and `gap`, the mean
  absolute difference between the sampler's and the trainer's log-probability
  of a token.

  Attributes:
    temperature: divisor of the logits, equal to that of the rollouts.
    measures_kl: whether the KL to the reference is measured even without a KL
      term in the loss.
  """

  metrics: ClassVar[Mapping[str, str]] = loss.Loss.metrics | {
    'kl': 'completions',
    'entropy': 'tokens',
    'gap': 'tokens',
  }

  beta: float = keys.key(0.0, 'Weight of the KL to the reference.', at_least=0)
  clip: float = keys.key(
    0.2, 'Ratios are clipped to 1 - clip and 1 + clip.', above=0
  )
  truncate: float = keys.key(
    0.0,
    'Largest importance weight of a token, the ratio of trainer to sampler; 0:'
    ' all have weight 1.',
    at_least=0,
  )
  temperature: float = 1.0
  measures_kl: bool = False

  @property
  def references(self) -> tuple[str, ...]:
    """The reference model, if the loss or the KL budget reads it."""
    return (loss.TEACHER,) if self.beta > 0 or self.measures_kl else ()

  def advantages(
    self, rewards: Float[Array, 'P G'], kl: Float[Array, 'P G']
  ) -> Float[Array, 'P G']:
    """Returns the advantages of the completions of each group."""
    raise NotImplementedError

  def completion_loss(
    self, advantages: Float[Array, 'P G'], tokens: Tokens
  ) -> Float[Array, 'P G']:
    """Returns the loss of each completion, before division."""
    raise NotImplementedError

  def clipped(
    self, ratios: Float[Array, '...'], advantages: Float[Array, '...']
  ) -> Float[Array, '...']:
    """Returns -min(ratio * A, clipped ratio * A), as in PPO."""
    near = jnp.clip(ratios, 1 - self.clip, 1 + self.clip)
    return -jnp.minimum(ratios * advantages, near * advantages)

  def divisors(self, batch: loss.Batch) -> loss.Terms:
    """Returns the numbers of completions and tokens; 'mean': completions."""
    weights = batch['weights']
    count = jnp.sum(_counts(weights), dtype=jnp.float32)
    return {'mean': count, 'completions': count, 'tokens': jnp.sum(weights)}

  def tokens(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> Tokens:
    """Returns tensors of the tokens.

    Args:
      outputs: outputs of the trained model.
      frozen: see `loss.Loss.terms`.
      batch: fields of `recipes.policy_recipe.CompletionRows`.
    """
    compute = functools.partial(
      answers.log_probs,
      batch=batch,
      chunk=self.chunk,
      temperature=self.temperature,
    )
    log_probs, entropy = compute(outputs, entropy=True)
    old = jax.lax.stop_gradient(log_probs)
    reference = old
    if self.references:
      reference = compute(frozen[loss.TEACHER](batch))
    ratios = jnp.exp(old - batch['sampler_log_probs'])
    importance = jnp.ones_like(old)
    if self.truncate:
      importance = jnp.minimum(ratios, self.truncate)
    weights = batch['weights']
    return Tokens(log_probs, old, reference, importance, weights, entropy)

  def terms(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> loss.Terms:
    """Computes the sums of the loss and its metrics; see `loss.Loss.terms`."""
    tokens = self.tokens(outputs, frozen, batch)
    kl = tokens.kl
    advantages = self.advantages(batch['rewards'], kl)
    losses = self.completion_loss(advantages, tokens)
    values = {
      'loss': jnp.where(_counts(tokens.weights), losses, 0.0),
      'entropy': tokens.sum(tokens.entropy),
      'gap': tokens.sum(jnp.abs(tokens.old - batch['sampler_log_probs'])),
    }
    if self.references:
      values['kl'] = kl
    return {name: jnp.sum(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Rloo(Policy):
  """REINFORCE leave-one-out (arXiv:2402.14740, equation 7).

  r = R - beta * sum(log pi - log reference); A = r - mean of the others' r.
  """

  name: ClassVar[str] = 'rloo'

  beta: float = keys.key(0.05, 'Weight of the KL in the reward.', at_least=0)

  def advantages(self, rewards, kl):
    rewards = rewards - self.beta * kl
    group = rewards.shape[-1]
    mean = jnp.mean(rewards, axis=-1, keepdims=True)
    return (rewards - mean) * (group / (group - 1))

  def completion_loss(self, advantages, tokens):
    # Weights in the exponent: at ratio 1, the gradient is that of the weighted
    # log-probabilities.
    change = tokens.importance * (tokens.log_probs - tokens.old)
    return self.clipped(jnp.exp(tokens.sum(change)), advantages)


@dataclasses.dataclass(frozen=True)
class Grpo(Policy):
  """Group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

  A = (R - mean) / (deviation + 1e-4), for each token. The loss adds beta * k3,
  k3 = exp(d) - d - 1 with d = log reference - log pi; `kl=k3_ratio` multiplies
  k3 by the ratio (TRL 1.16). Divisors: 'sequence' is GRPO (mean over the tokens
  of each completion), 'token' is DAPO (arXiv:2503.14476), 'constant' is the
  number of completions times the maximum length, which with deviation=none is
  Dr. GRPO (arXiv:2503.20783).
  """

  name: ClassVar[str] = 'grpo'

  divisor: str = keys.key(
    'sequence',
    'Divisor of the loss.',
    one_of=('sequence', 'token', 'constant'),
  )
  deviation: str = keys.key(
    'group', 'Divisor of advantages.', one_of=('group', 'none')
  )
  kl: str = keys.key(
    'k3', 'Estimator of the KL in the loss.', one_of=('k3', 'k3_ratio')
  )

  def advantages(self, rewards, kl):
    del kl
    centred = rewards - jnp.mean(rewards, axis=-1, keepdims=True)
    if self.deviation == 'none':
      return centred
    deviation = jnp.std(rewards, axis=-1, keepdims=True, ddof=1)
    return centred / (deviation + _EPSILON)

  def completion_loss(self, advantages, tokens):
    ratios = jnp.exp(tokens.log_probs - tokens.old)
    values = tokens.importance * self.clipped(ratios, advantages[..., None])
    if self.beta:
      difference = tokens.reference - tokens.log_probs
      k3 = jnp.expm1(difference) - difference
      values += self.beta * k3 * (ratios if self.kl == 'k3_ratio' else 1.0)
    total = tokens.sum(values)
    if self.divisor != 'sequence':
      return total
    return total / jnp.maximum(jnp.sum(tokens.weights, axis=-1), 1.0)

  def divisors(self, batch):
    weights, divisors = batch['weights'], super().divisors(batch)
    longest = weights.shape[-1] if self.divisor == 'constant' else 1
    number = divisors['completions'] * longest
    if self.divisor == 'token':
      number = divisors['tokens'].astype(jnp.float32)
    return divisors | {'mean': number}


def _counts(weights: Float[Array, 'P G T']) -> Array:
  """Returns whether each completion counts, [P, G]."""
  return jnp.any(weights > 0, axis=-1)
