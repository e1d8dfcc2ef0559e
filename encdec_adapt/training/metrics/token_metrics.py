"""Held-out metrics over target tokens: cross-entropy, accuracy, exact rows."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from encdec_adapt.ops import vocabulary_loss
from encdec_adapt.training.losses import cross_entropy, policy
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import held_out_metrics


@dataclasses.dataclass(frozen=True)
class TargetTokens(held_out_metrics.HeldOut):
  """Cross-entropy in nats and argmax accuracy per target token.

  `accuracy` is the weighted fraction of targets with the largest logit;
  `exact_match` is whether greedy decoding gives all targets of a row.
  """

  names: ClassVar[tuple[str, ...]] = ('loss', 'accuracy', 'exact_match')
  curves: ClassVar[tuple[str, ...]] = ('loss', 'accuracy')
  unit: ClassVar[str] = 'per target token'

  loss: loss_lib.Loss = cross_entropy.CrossEntropy()

  def ratios(
    self,
    outputs: loss_lib.Outputs,
    readers: loss_lib.Readers,
    batch: loss_lib.Batch,
  ) -> held_out_metrics.Ratios:
    """Computes the metrics; see `HeldOut.ratios`."""
    del readers
    nats, correct = vocabulary_loss.per_token(
      outputs.hidden,
      outputs.table,
      batch['targets'],
      vocab_size=outputs.config.outputs,
      softcap=outputs.config.final_softcap,
      chunk=self.loss.chunk,
    )
    weights = batch['weights']  # [B, T]
    # jnp.where: padding may have infinite cross-entropy, and 0 * inf is NaN.
    ignored = weights == 0
    nats = jnp.where(ignored, 0.0, weights * nats)
    wrong = (correct <= 0) & ~ignored
    terms = jnp.stack([nats, weights, weights * correct, wrong])  # [4, B, T]
    if jnp.ndim(batch.get('row', 0)) < 2:
      terms = jnp.sum(terms, axis=2)
    else:
      size = weights.shape[1]
      sums = functools.partial(jax.ops.segment_sum, num_segments=size)
      numbers = batch.get('decoder_segments', batch.get('encoder_segments')) - 1
      terms = jax.vmap(jax.vmap(sums), (0, None))(terms, numbers)
    nats, weight, correct, wrong = terms.reshape(4, -1)
    exact = (wrong == 0).astype(jnp.float32)
    return (nats, weight), (correct, weight), (exact, jnp.ones_like(exact))


@dataclasses.dataclass(frozen=True)
class Completions(TargetTokens):
  """Metrics of policies: token metrics of the data, and of completions.

  `training.jobs.policy_batches` computes `reward`, the mean over greedy
  completions, and of sampled completions `sampled_reward`, `length`, `entropy`
  and, with a reference, `kl`.
  """

  selects: ClassVar[str] = 'reward'
  shown: ClassVar[tuple[str, ...]] = ('reward', 'kl', 'length', 'entropy')
  unit: ClassVar[str] = 'of greedy completions'

  loss: policy.Policy

  @property
  def curves(self) -> tuple[str, ...]:
    """The metrics recorded during training."""
    names = (*TargetTokens.curves, 'reward', 'sampled_reward', 'length')
    return *names, *Sampled(self.loss).names


@dataclasses.dataclass(frozen=True)
class Sampled(held_out_metrics.HeldOut):
  """`entropy` per token and, with a reference, `kl` per completion.

  Rows are prompts with a group of sampled completions.
  """

  loss: policy.Policy

  @property
  def references(self) -> tuple[str, ...]:
    """The reference of the KL."""
    return self.loss.references

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the metrics."""
    return ('entropy', 'kl') if self.loss.references else ('entropy',)

  def ratios(
    self,
    outputs: loss_lib.Outputs,
    readers: loss_lib.Readers,
    batch: loss_lib.Batch,
  ) -> held_out_metrics.Ratios:
    """Computes the metrics; see `HeldOut.ratios`."""
    tokens = self.loss.tokens(outputs, readers, batch)
    counts = jnp.sum(tokens.weights, axis=-1)  # [P, G]
    terms = [(tokens.sum(tokens.entropy), counts)]
    if self.loss.references:
      terms.append((tokens.kl, counts > 0))
    return [
      (jnp.sum(x, axis=1), jnp.sum(n, axis=1, dtype=jnp.float32))
      for x, n in terms
    ]
