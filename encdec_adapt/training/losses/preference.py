"""Losses of preferences, by the name in `config.loss.kind`.

Each compares the answers of a row (`objectives.preferences`): it makes a score
of each answer's log-probability, and a loss of the margin (`comparison`). An
answer's log-probability is the sum over its tokens with their end, or the mean
over them.

| name                     | score of an answer              | reference model |
|--------------------------|---------------------------------|-----------------|
| dpo, robust, hinge, ipo  | beta * (log pi - log reference) | x               |
| simpo                    | beta * mean log pi              |                 |
| orpo                     | log odds of exp(mean log pi)    |                 |

The mean of the losses is over examples; a share of cross-entropy to the chosen
answers is a mean over their tokens.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.base import keys
from encdec_adapt.training.losses import comparison, loss

_REFERENCE = 'teacher'


@dataclasses.dataclass(frozen=True)
class Form:
  """Base of the losses; its fields are the options of a name.

  Attributes:
    log_probs: 'sum' or 'mean' over the tokens of an answer.
    reads_reference: whether scores are relative to a reference model.
    cross_entropy: share of cross-entropy to the chosen answers.
  """

  log_probs: ClassVar[str] = 'sum'
  reads_reference: ClassVar[bool] = True

  cross_entropy: float = 0.0

  def __post_init__(self):
    keys.check(self, f'{loss.KIND}: ')

  def scores(
    self, log_probs: Float[Array, 'P 2'], reference: Float[Array, 'P 2']
  ) -> Float[Array, 'P 2']:
    """Returns the scores of answers; `reference` is 0 where none is read."""
    raise NotImplementedError

  def loss(self, margins: Float[Array, 'P']) -> Float[Array, 'P']:
    """Returns the loss of each example."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Scaled(Form):
  """Base of losses of log-ratios times a scale."""

  beta: float = keys.key(0.1, 'Scale of the log-ratios.', above=0)

  def scores(self, log_probs, reference):
    return self.beta * (log_probs - reference)


@dataclasses.dataclass(frozen=True)
class Dpo(Scaled):
  """Direct preference optimisation (arXiv:2305.18290, equation 7).

  -(1 - s) log sigmoid(m) - s log sigmoid(-m), where smoothing s is the share of
  labels that are expected to be wrong (conservative DPO, Mitchell 2023).
  """

  smoothing: float = keys.key(0.0, 'Wrong labels.', at_least=0, below=0.5)

  def loss(self, margins):
    right, wrong = (-jax.nn.log_sigmoid(x) for x in (margins, -margins))
    return (1 - self.smoothing) * right + self.smoothing * wrong


@dataclasses.dataclass(frozen=True)
class Robust(Dpo):
  """Provably robust DPO (arXiv:2403.00409): unbiased under wrong labels.

  (-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s).
  """

  smoothing: float = keys.key(0.1, 'Wrong labels.', above=0, below=0.5)

  def loss(self, margins):
    right, wrong = (-jax.nn.log_sigmoid(x) for x in (margins, -margins))
    difference = (1 - self.smoothing) * right - self.smoothing * wrong
    return difference / (1 - 2 * self.smoothing)


@dataclasses.dataclass(frozen=True)
class Hinge(Scaled):
  """Hinge loss of log-ratios (RSO, arXiv:2309.06657): max(0, 1 - m)."""

  def loss(self, margins):
    return jax.nn.relu(1 - margins)


@dataclasses.dataclass(frozen=True)
class Ipo(Scaled):
  """Identity preference optimisation (arXiv:2310.12036, section 5).

  (log-ratio of chosen - log-ratio of rejected - 1 / (2 beta))^2, of the sums of
  the paper, or of means over tokens as in TRL.
  """

  log_probs: str = keys.key('sum', 'Over tokens.', one_of=('sum', 'mean'))

  def loss(self, margins):
    return jnp.square((margins - 0.5) / self.beta)


@dataclasses.dataclass(frozen=True)
class Simpo(Scaled):
  """SimPO (arXiv:2405.14734, equation 6): -log sigmoid(m - gamma), of means.

  The defaults are those of its authors for the base model of Llama 3 8B.
  """

  log_probs: ClassVar[str] = 'mean'
  reads_reference: ClassVar[bool] = False

  beta: float = keys.key(2.0, 'Scale of mean log-probabilities.', above=0)
  gamma: float = keys.key(1.0, 'Margin that is aimed at.', at_least=0)

  def loss(self, margins):
    return -jax.nn.log_sigmoid(margins - self.gamma)


@dataclasses.dataclass(frozen=True)
class Orpo(Form):
  """ORPO (arXiv:2403.07691): cross-entropy - lambda log sigmoid(m).

  The score is log(p / (1 - p)) of p = exp(mean log-probability).
  """

  log_probs: ClassVar[str] = 'mean'
  reads_reference: ClassVar[bool] = False

  cross_entropy: float = 1.0
  weight: float = keys.key(0.1, 'Weight.', above=0, name='lambda')

  def scores(self, log_probs, reference):
    # expm1, as the probability of a short answer may be almost 1; at 1, as
    # float32 rounds it, the gradient would be NaN.
    log_probs = jnp.minimum(log_probs, -1e-6)
    return log_probs - jnp.log(-jnp.expm1(log_probs))

  def loss(self, margins):
    return -self.weight * jax.nn.log_sigmoid(margins)


FORMS: Mapping[str, type[Form]] = {
  'dpo': Dpo,
  'robust': Robust,
  'hinge': Hinge,
  'ipo': Ipo,
  'simpo': Simpo,
  'orpo': Orpo,
}


@dataclasses.dataclass(frozen=True)
class Preference(comparison.Comparison):
  """The loss of a form, and a share of cross-entropy to the chosen answers.

  `cross_entropy` of the chosen answers is a metric, too. The held-out `loss`
  has no share of it.
  """

  name: ClassVar[str] = 'preference'
  forms: ClassVar[Mapping[str, type]] = FORMS
  starts_from_reference: ClassVar[bool] = True
  metrics: ClassVar[Mapping[str, str]] = comparison.Comparison.metrics | {
    'cross_entropy': 'chosen'
  }
  held_out: ClassVar[tuple[str, ...]] = (
    *comparison.Comparison.held_out,
    'cross_entropy',
  )
  curves: ClassVar[tuple[str, ...]] = (
    *comparison.Comparison.curves,
    'cross_entropy',
  )

  def __post_init__(self):
    super().__post_init__()
    if self.kind_name in FORMS:
      self.form  # noqa: B018  Checks the string.

  @functools.cached_property
  def form(self) -> Form:
    """The form that `kind` names, with its options and share."""
    form, shares = self.kind_parts
    for extra, share in shares:
      if extra.text != 'cross_entropy' or form.cross_entropy:
        raise extra.error(
          'must be cross_entropy@SHARE, once, and not with orpo, which has it'
        )
      form = dataclasses.replace(form, cross_entropy=share or 1.0)
    return form

  @property
  def references(self) -> tuple[str, ...]:
    """The reference model, if scores are relative to it."""
    return (_REFERENCE,) if self.form.reads_reference else ()

  @property
  def held_out_references(self) -> tuple[str, ...]:
    """The same: held-out accuracy is that of the scores."""
    return self.references

  def divisors(self, batch: loss.Batch) -> loss.Terms:
    """Returns the number of examples, and of tokens of chosen answers."""
    tokens = jnp.sum(batch['weights'][:, 0])
    return super().divisors(batch) | {'chosen': jnp.maximum(tokens, 1.0)}

  def objective(
    self, terms: loss.Terms, divisors: loss.Terms
  ) -> Float[Array, '']:
    """Adds the share of cross-entropy, which has its own divisor."""
    cross_entropy = terms['cross_entropy'] / divisors['chosen']
    share = self.form.cross_entropy * cross_entropy
    return super().objective(terms, divisors) + share

  def compare(
    self,
    outputs: loss.Outputs,
    references: Mapping[str, loss.Outputs],
    batch: loss.Batch,
  ) -> tuple[Float[Array, 'P 2'], comparison.Values]:
    """Computes scores, losses and metrics; see `comparison.Comparison`."""
    counts = jnp.sum(batch['weights'], axis=-1)  # [P, 2]
    models = outputs, *references.values()
    sums = [
      jnp.sum(self.answer_log_probs(x, batch), axis=-1) for x in models
    ]  # [P, 2]
    divisor = counts if self.form.log_probs == 'mean' else 1.0
    # A row without answers has a finite value, whose loss is not counted: the
    # odds of an empty answer, which is certain, are infinite.
    exist = comparison.exist(batch)[:, None]
    log_probs, *reference = [jnp.where(exist, x / divisor, -1.0) for x in sums]
    scores = self.form.scores(
      log_probs, *(reference or [jnp.zeros_like(log_probs)])
    )
    losses = self.form.loss(scores[:, 0] - scores[:, 1])
    return scores, {'loss': losses, 'cross_entropy': -sums[0][:, 0]}
