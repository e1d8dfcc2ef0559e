"""Terms of distillation from a teacher's whole distribution.

The objective of the Gemma 2 report (section 3, knowledge distillation) over
the full vocabulary; `vocabulary_loss` adds it up. Student and teacher may
differ in width; they share the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import vocabulary_parallel


@flax.struct.dataclass
class Teacher:
  """A distribution over the vocabulary for every target.

  Attributes:
    hidden: final hidden states [B, T, E] at the positions that predict the
      same tokens as the student's.
    table: output table [W, E], possibly padded differently.
    softcap: soft-cap of its logits, or None.
    share: weight of its term in [0, 1]; the targets get the rest.
    temperature: temperature of both distributions, positive. Soft-capped
      logits are divided by it; the objective is multiplied by its square, which
      keeps the size of the gradient (Hinton et al. 2015, section 2).
  """

  # Any: tree maps put specs, shapes and shardings in the place of arrays.
  hidden: Any
  table: Any
  softcap: float | None = flax.struct.field(pytree_node=False, default=None)
  share: float = flax.struct.field(pytree_node=False, default=1.0)
  temperature: float = flax.struct.field(pytree_node=False, default=1.0)

  def table_with_rows(self, rows: int) -> Float[Array, 'V E']:
    """Returns the table, padded like the student's to be sharded alike."""
    # Rows beyond the vocabulary are excluded from every sum, so they may be
    # cut off or zeros.
    table = self.table[:rows]
    table = jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))
    return table.astype(self.hidden.dtype)


def terms(
  columns: vocabulary_parallel.Columns,
  logits: Float[Array, 'rows v'],
  teacher_logits: Float[Array, 'rows v'],
  weights: Float[Array, 'rows'] | None,
  teacher: Teacher,
  *,
  softcap: float | None,
) -> tuple[list[Float[Array, 'rows v']], Callable]:
  """Prepares terms per row, and with weights the gradient of the raw logits.

  Args:
    columns: the local columns.
    logits: logits of the student, float32, before the soft-cap.
    teacher_logits: logits of the teacher, float32, before its soft-cap.
    weights: weight of each row, or None for no gradient.
    teacher: the teacher; its soft-cap, share and temperature are read.
    softcap: soft-cap of the student's logits, or None.

  Returns:
    What is summed over the vocabulary; and a function of the sums, which
    returns 'total' and 'kl', each [rows], without weights; and the gradient
    [rows, v] of weights * total, or None.
  """
  share, temperature = teacher.share, teacher.temperature
  capped, slope = vocabulary_parallel.soft_cap(logits, softcap)
  teacher_scores, _ = vocabulary_parallel.soft_cap(
    teacher_logits, teacher.softcap
  )
  excluded = vocabulary_parallel.EXCLUDED
  scores = columns.only_tokens(capped / temperature, excluded)
  teacher_scores = columns.only_tokens(teacher_scores / temperature, excluded)
  shift, teacher_shift = (
    vocabulary_parallel.fixed_shift(cap, temperature)
    for cap in (softcap, teacher.softcap)
  )
  if shift is None or teacher_shift is None:
    shift, teacher_shift = columns.max(scores, teacher_scores)  # [rows] each
  # Both entropies follow from four sums: no array of log-probabilities is ever
  # formed.
  unnormalised = jnp.exp(teacher_scores - jnp.expand_dims(teacher_shift, -1))
  parts = [
    jnp.exp(scores - jnp.expand_dims(shift, -1)),
    unnormalised,
    unnormalised * scores,
    unnormalised * teacher_scores,
  ]

  def finish(sums):
    normaliser, teacher_normaliser, cross, self_term = sums
    log_normaliser = shift + jnp.log(normaliser)
    teacher_log_normaliser = teacher_shift + jnp.log(teacher_normaliser)
    cross_entropy = log_normaliser - cross / teacher_normaliser
    entropy = teacher_log_normaliser - self_term / teacher_normaliser
    values = {
      'total': share * temperature**2 * cross_entropy,
      'kl': cross_entropy - entropy,
    }
    if weights is None:
      return values, None
    # Of temperature^2 a factor cancels: scores are divided by the temperature.
    scale = share * temperature * weights.astype(jnp.float32)
    dlogits = scale[:, None] * (
      jnp.exp(scores - log_normaliser[:, None])
      - jnp.exp(teacher_scores - teacher_log_normaliser[:, None])
    )
    return values, dlogits if slope is None else dlogits * slope

  return parts, finish
