"""Distillation losses against a teacher's distribution.

The objective of the Gemma 2 report (section 3, knowledge distillation) over
the full vocabulary, with the divergences of generalised knowledge distillation
(GKD, arXiv:2306.13649, section 3); `vocabulary_loss` sums it. Student and
teacher share the vocabulary and may differ in width. The teacher is a model or
stored probabilities of a few tokens (`sparse_teacher`).
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import vocabulary_parallel

# KL(teacher || student), KL(student || teacher), and the mean of the KL
# divergences of both from their mixture.
DIVERGENCES = ('forward', 'reverse', 'js')


def _static(default: Any) -> Any:
  return flax.struct.field(pytree_node=False, default=default, kw_only=True)


@flax.struct.dataclass
class Distribution:
  """Base class of teachers: a distribution over tokens for every target.

  Attributes:
    share: weight of its term in [0, 1]; the targets get the remainder.
    softcap: soft-cap of the teacher's logits, or None.
    temperature: temperature of both distributions, positive. Soft-capped
      logits are divided by it; the objective is multiplied by its square, to
      keep the size of the gradient (Hinton et al. 2015, section 2).
    divergence: one of `DIVERGENCES`.
    beta: weight of the teacher in the mixture of 'js', in (0, 1): beta *
      KL(teacher || mixture) + (1 - beta) * KL(student || mixture). It tends to
      0 at both limits of beta, not to the other divergences.
  """

  share: float = _static(1.0)
  softcap: float | None = _static(None)
  temperature: float = _static(1.0)
  divergence: str = _static('forward')
  beta: float = _static(0.5)

  @property
  def tokens(self) -> list[Array]:
    """Arrays [B, T, ..], split over the tokens."""
    raise NotImplementedError

  def tables(self, rows: int) -> list[Array]:
    """Returns arrays [rows, ..], split like the student's table."""
    del rows
    return []

  def scores(
    self,
    columns: vocabulary_parallel.Columns,
    tokens: Sequence[Array],
    tables: Sequence[Array],
  ) -> Float[Array, 'rows v']:
    """Computes the logits of rows in the local columns, after the soft-cap.

    Args:
      columns: the local columns.
      tokens: rows of `tokens`.
      tables: local rows of `tables`.
    """
    raise NotImplementedError

  def terms(
    self,
    columns: vocabulary_parallel.Columns,
    logits: Float[Array, 'rows v'],
    tokens: Sequence[Array],
    tables: Sequence[Array],
    weights: Float[Array, 'rows'] | None,
    *,
    softcap: float | None,
  ) -> tuple[list[Float[Array, 'rows v']], Callable]:
    """Prepares terms per row and, given weights, the raw logits' gradient.

    Args:
      columns: the local columns.
      logits: logits of the student, float32, before the soft-cap.
      tokens: rows of `tokens`.
      tables: local rows of `tables`.
      weights: weight of each row, or None for no gradient.
      softcap: soft-cap of the student's logits, or None.

    Returns:
      Terms to sum over the vocabulary, and a function of the sums. It returns
      unweighted 'total' and 'divergence', each [rows], and the gradient
      [rows, v] of weights * total, or None.
    """
    temperature = self.temperature
    capped, slope = vocabulary_parallel.soft_cap(logits, softcap)
    teacher_scores = self.scores(columns, tokens, tables)
    excluded = vocabulary_parallel.EXCLUDED
    scores = columns.only_tokens(capped / temperature, excluded)
    teacher_scores = columns.only_tokens(teacher_scores / temperature, excluded)
    shift, teacher_shift = (
      vocabulary_parallel.fixed_shift(cap, temperature)
      for cap in (softcap, self.softcap)
    )
    if shift is None or teacher_shift is None:
      shift, teacher_shift = columns.max(scores, teacher_scores)  # [rows] each
    exponentials = jnp.exp(scores - jnp.expand_dims(shift, -1))
    unnormalised = jnp.exp(teacher_scores - jnp.expand_dims(teacher_shift, -1))
    parts = [exponentials, unnormalised]
    # A KL divergence needs no second pass; a mixture needs both normalisers
    # before its logarithm.
    if self.divergence != 'js':
      weight = parts[int(self.divergence == 'forward')]
      parts += [weight * scores, weight * teacher_scores]

    def finish(sums):
      normalisers = shift + jnp.log(sums[0]), teacher_shift + jnp.log(sums[1])
      log_student = scores - normalisers[0][:, None]
      log_teacher = teacher_scores - normalisers[1][:, None]
      if self.divergence == 'js':
        divergence, gradient = self._js(columns, log_student, log_teacher)
        total = divergence
      else:
        # Expectations of both log-probabilities under one distribution.
        count = sums[int(self.divergence == 'forward')]
        student = sums[2] / count - normalisers[0]
        teacher = sums[3] / count - normalisers[1]
        if self.divergence == 'forward':
          # The cross-entropy: the divergence plus the teacher's entropy.
          total, divergence = -student, teacher - student
          gradient = jnp.exp(log_student) - jnp.exp(log_teacher)
        else:
          total = divergence = student - teacher
          gradient = jnp.exp(log_student) * (
            log_student - log_teacher - divergence[:, None]
          )
      values = {
        'total': self.share * temperature**2 * total,
        'divergence': divergence,
      }
      if weights is None:
        return values, None
      # One factor of temperature^2 cancels, as scores are divided by the
      # temperature.
      scale = self.share * temperature * weights.astype(jnp.float32)
      dlogits = scale[:, None] * gradient
      return values, dlogits if slope is None else dlogits * slope

    return parts, finish

  def _js(
    self,
    columns: vocabulary_parallel.Columns,
    log_student: Float[Array, 'rows v'],
    log_teacher: Float[Array, 'rows v'],
  ) -> tuple[Float[Array, 'rows'], Float[Array, 'rows v']]:
    """Returns the 'js' divergence and its gradient in the student's scores."""
    log_mixture = jnp.logaddexp(
      log_teacher + math.log(self.beta), log_student + math.log1p(-self.beta)
    )
    student = jnp.exp(log_student)
    of_student, of_teacher = columns.sum(
      student * (log_student - log_mixture),
      jnp.exp(log_teacher) * (log_teacher - log_mixture),
    )
    divergence = self.beta * of_teacher + (1 - self.beta) * of_student
    # The derivatives of the mixture's logarithm in both terms cancel.
    difference = log_student - log_mixture - of_student[:, None]
    return divergence, (1 - self.beta) * student * difference


@flax.struct.dataclass
class Teacher(Distribution):
  """The distribution of a model.

  Attributes:
    hidden: final hidden states [B, T, E] at the positions predicting the same
      tokens as the student's.
    table: output table [W, E], possibly padded differently.
    one_hot: ids [B, T] of targets with probability 1, -1 where the model's
      distribution applies; None if it applies everywhere.
  """

  # Any: tree maps put specs, shapes and shardings in the place of arrays.
  hidden: Any
  table: Any
  one_hot: Any = None

  @property
  def tokens(self):
    return [self.hidden] + ([self.one_hot] if self.one_hot is not None else [])

  def tables(self, rows):
    # Padded like the student's table, for the same sharding. Rows beyond the
    # vocabulary are excluded from every sum, so they may be dropped or zero.
    table = self.table[:rows]
    table = jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))
    return [table.astype(self.hidden.dtype)]

  def scores(self, columns, tokens, tables):
    logits = vocabulary_parallel.product(tokens[0], *tables)
    scores, _ = vocabulary_parallel.soft_cap(logits, self.softcap)
    if self.one_hot is None:
      return scores
    ids = tokens[1][:, None]
    alone = jnp.where(columns.ids == ids, 0.0, vocabulary_parallel.EXCLUDED)
    return jnp.where(ids < 0, scores, alone)


@flax.struct.dataclass
class StoredTeacher(Distribution):
  """Stored probabilities of k tokens per target; other tokens have 0.

  Attributes:
    ids: token ids [B, T, k]; the probabilities of equal ids add up.
    probabilities: their probabilities [B, T, k], which sum to 1, or to 0 at a
      target of weight 0.
  """

  ids: Any
  probabilities: Any

  @property
  def tokens(self):
    return [self.ids, self.probabilities]

  def scores(self, columns, tokens, tables):
    ids, probabilities = tokens
    size = len(columns.ids)
    local = ids - columns.ids[0]
    # Drops ids of other devices' columns; a negative index would count
    # from the end.
    local = jnp.where(local < 0, size, local)
    rows = jnp.arange(len(ids))[:, None]
    dense = jnp.zeros((len(ids), size), jnp.float32)
    dense = dense.at[rows, local].add(probabilities, mode='drop')
    return jnp.where(dense > 0, jnp.log(dense), vocabulary_parallel.EXCLUDED)
