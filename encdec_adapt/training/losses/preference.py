"""Preference losses.

A loss compares the two answers of a row (`objectives.preferences`): it computes
a score from each answer's log-probability, and a loss from the margin
(`comparison`). The log-probability of an answer is the sum or the mean over its
tokens, including the end of sequence.

| name                     | score of an answer              | reference model |
|--------------------------|---------------------------------|-----------------|
| dpo, robust, hinge, ipo  | beta * (log pi - log reference) | x               |
| simpo                    | beta * mean log pi              |                 |
| orpo                     | log odds of exp(mean log pi)    |                 |

Losses are averaged over examples; the optional cross-entropy to the chosen
answers is averaged over their tokens.
"""

from collections.abc import Mapping
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import keys
from encdec_adapt.training.losses import answers, comparison, loss


@dataclasses.dataclass(frozen=True)
class Preference(comparison.Comparison):
  """Base class; see the module's docstring.

  The metric `cross_entropy` is the mean over tokens of the chosen answers.

  Attributes:
    log_probs: 'sum' or 'mean' over the tokens of an answer.
  """

  metrics: ClassVar[Mapping[str, str]] = comparison.Comparison.metrics | {
    'cross_entropy': 'chosen'
  }
  log_probs: ClassVar[str] = 'sum'

  cross_entropy: float = keys.key(
    0.0, 'Share of cross-entropy to the chosen answers.', at_least=0
  )

  def scores(
    self, log_probs: Float[Array, 'P 2'], reference: Float[Array, 'P 2']
  ) -> Float[Array, 'P 2']:
    """Returns the scores of answers; `reference` is 0 without a reference."""
    raise NotImplementedError

  def margin_loss(self, margins: Float[Array, 'P']) -> Float[Array, 'P']:
    """Returns the loss of each example."""
    raise NotImplementedError

  def divisors(self, batch: loss.Batch) -> loss.Terms:
    """Returns the numbers of examples and of tokens of chosen answers."""
    tokens = jnp.sum(batch['weights'][:, 0])
    return super().divisors(batch) | {'chosen': tokens}

  def objective(
    self, terms: loss.Terms, divisors: loss.Terms
  ) -> Float[Array, '']:
    """Adds the weighted cross-entropy, which has a separate divisor."""
    cross_entropy = terms['cross_entropy'] / divisors['chosen']
    share = self.cross_entropy * cross_entropy
    return super().objective(terms, divisors) + share

  def compare(
    self,
    outputs: loss.Outputs,
    frozen: loss.Readers,
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], comparison.Values]:
    """Computes scores, losses and metrics; see `comparison.Comparison`."""
    counts = jnp.sum(batch['weights'], axis=-1)  # [P, 2]
    references = [frozen[name](batch) for name in self.references]
    sums = [
      jnp.sum(answers.log_probs(x, batch, self.chunk), axis=-1)
      for x in (outputs, *references)
    ]  # [P, 2]
    divisor = counts if self.log_probs == 'mean' else 1.0
    # Rows without answers get a finite value, and their loss is not counted:
    # an empty answer has probability 1 and infinite odds.
    exist = comparison.exist(batch)[:, None]
    log_probs, *reference = [jnp.where(exist, x / divisor, -1.0) for x in sums]
    scores = self.scores(log_probs, *(reference or [jnp.zeros_like(log_probs)]))
    losses = self.margin_loss(scores[:, 0] - scores[:, 1])
    return scores, {'loss': losses, 'cross_entropy': -sums[0][:, 0]}


@dataclasses.dataclass(frozen=True)
class Scaled(Preference):
  """Base class of losses with scaled log-ratios."""

  references: ClassVar[tuple[str, ...]] = (loss.TEACHER,)

  beta: float = keys.key(0.1, 'Scale of the log-ratios.', above=0)

  def scores(self, log_probs, reference):
    return self.beta * (log_probs - reference)


@dataclasses.dataclass(frozen=True)
class Dpo(Scaled):
  """Direct preference optimisation (arXiv:2305.18290, equation 7).

  -(1 - s) log sigmoid(m) - s log sigmoid(-m), where smoothing s is the expected
  fraction of wrong labels (conservative DPO, Mitchell 2023).
  """

  name: ClassVar[str] = 'dpo'

  smoothing: float = keys.key(
    0.0, 'Share of labels that are expected to be wrong.', at_least=0, below=0.5
  )

  def margin_loss(self, margins):
    right, wrong = (-jax.nn.log_sigmoid(x) for x in (margins, -margins))
    return (1 - self.smoothing) * right + self.smoothing * wrong


@dataclasses.dataclass(frozen=True)
class Robust(Dpo):
  """Provably robust DPO (arXiv:2403.00409): unbiased under wrong labels.

  (-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s).
  """

  name: ClassVar[str] = 'robust'

  smoothing: float = keys.key(
    0.1, 'Share of labels that are expected to be wrong.', above=0, below=0.5
  )

  def margin_loss(self, margins):
    right, wrong = (-jax.nn.log_sigmoid(x) for x in (margins, -margins))
    difference = (1 - self.smoothing) * right - self.smoothing * wrong
    return difference / (1 - 2 * self.smoothing)


@dataclasses.dataclass(frozen=True)
class Hinge(Scaled):
  """Hinge loss on log-ratios (RSO, arXiv:2309.06657): max(0, 1 - m)."""

  name: ClassVar[str] = 'hinge'

  def margin_loss(self, margins):
    return jax.nn.relu(1 - margins)


@dataclasses.dataclass(frozen=True)
class Ipo(Scaled):
  """Identity preference optimisation (arXiv:2310.12036, section 5).

  (log-ratio of chosen - log-ratio of rejected - 1 / (2 beta))^2, with sums over
  tokens as in the paper, or means as in TRL.
  """

  name: ClassVar[str] = 'ipo'

  log_probs: str = keys.key(
    'sum',
    'Log-probability of an answer, over its tokens.',
    one_of=('sum', 'mean'),
  )

  def margin_loss(self, margins):
    return jnp.square((margins - 0.5) / self.beta)


@dataclasses.dataclass(frozen=True)
class Simpo(Scaled):
  """SimPO (arXiv:2405.14734, equation 6): -log sigmoid(m - gamma), with means.

  The defaults are the authors' for the base model of Llama 3 8B.
  """

  name: ClassVar[str] = 'simpo'
  log_probs: ClassVar[str] = 'mean'
  references: ClassVar[tuple[str, ...]] = ()

  beta: float = keys.key(2.0, 'Scale of mean log-probabilities.', above=0)
  gamma: float = keys.key(1.0, 'Target margin.', at_least=0)

  def margin_loss(self, margins):
    return -jax.nn.log_sigmoid(margins - self.gamma)


@dataclasses.dataclass(frozen=True)
class Orpo(Preference):
  """ORPO (arXiv:2403.07691): cross-entropy - weight * log sigmoid(m).

  The score is log(p / (1 - p)) with p = exp(mean log-probability).
  """

  name: ClassVar[str] = 'orpo'
  log_probs: ClassVar[str] = 'mean'

  cross_entropy: float = keys.key(
    1.0, 'Share of cross-entropy to the chosen answers.', at_least=0
  )
  weight: float = keys.key(
    0.1, 'Weight of the comparison (lambda of the paper).', above=0
  )

  def scores(self, log_probs, reference):
    # expm1 because the probability of a short answer may be close to 1; if
    # float32 rounds it to 1, the gradient would be NaN.
    log_probs = jnp.minimum(log_probs, -1e-6)
    return log_probs - jnp.log(-jnp.expm1(log_probs))

  def margin_loss(self, margins):
    return -self.weight * jax.nn.log_sigmoid(margins)
