"""Distillation from a teacher's whole distribution, in one pass.

Student and teacher may differ in width; they share the vocabulary. Their
logits exist for one chunk of tokens at a time, as in `vocabulary_loss`. The
data's own loss is taken from the same logits.
"""

from collections.abc import Mapping
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import vocabulary_loss, vocabulary_parallel


@flax.struct.dataclass
class DistillationSums:
  """Float32 sums over the tokens of a batch; only `total` has a gradient.

  Attributes:
    total: the objective: weights * (share * temperature^2 * cross-entropy of
      the student to the teacher, plus (1 - share) * cross-entropy to the
      targets with label smoothing, plus z_loss * log(normaliser)^2).
    cross_entropy: weights * -log p(target), without smoothing.
    kl: weights * KL(teacher || student), both at the temperature; not
      multiplied by its square.
    z_loss: the z-loss part of `total`.
    correct: weight of the tokens whose target has the largest logit.
    weight: sum of the weights.
  """

  total: vocabulary_parallel.Sum
  cross_entropy: vocabulary_parallel.Sum
  kl: vocabulary_parallel.Sum
  z_loss: vocabulary_parallel.Sum
  correct: vocabulary_parallel.Sum
  weight: vocabulary_parallel.Sum


def distillation(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  teacher_hidden: Float[Array, 'B T E'],
  teacher_table: Float[Array, 'W E'],
  targets: Int[Array, 'B T'],
  weights: Float[Array, 'B T'],
  *,
  vocab_size: int,
  share: float = 1.0,
  softcap: float | None = None,
  teacher_softcap: float | None = None,
  temperature: float = 1.0,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
) -> DistillationSums:
  """Computes the student's cross-entropy to the teacher, summed by weight.

  The objective of the Gemma 2 report (section 3, knowledge distillation) over
  the full vocabulary. Soft-capped logits are divided by `temperature`; the
  objective is multiplied by its square, which keeps the size of the gradient
  (Hinton et al. 2015, section 2). There is no gradient to the teacher.

  Args:
    hidden: final hidden states of the student.
    table: output table; rows from `vocab_size` on are padding.
    teacher_hidden: final hidden states of the teacher at the positions that
      predict the same tokens.
    teacher_table: the teacher's output table, possibly padded differently.
    targets: ids in [0, vocab_size), as for `vocabulary_loss.cross_entropy`.
    weights: any finite values; 0 hides a token.
    vocab_size: number of real tokens, the same for both.
    share: weight of the teacher's term in [0, 1]; the targets get the rest.
    softcap: the student's soft-cap, or None.
    teacher_softcap: the teacher's soft-cap, or None.
    temperature: temperature of both distributions, positive.
    z_loss: coefficient of log(normaliser)^2, the student's at temperature 1.
    label_smoothing: label smoothing of the targets' term, in [0, 1).
    chunk: most tokens of one device whose logits exist at a time.

  Returns:
    The sums; `total` is differentiable in hidden, table and weights.

  Raises:
    ValueError: an argument out of range, or a partition that does not divide
      the arrays.
  """
  for states, rows, cap in (
    (hidden, table, softcap),
    (teacher_hidden, teacher_table, teacher_softcap),
  ):
    vocabulary_parallel.check_arguments(
      states, rows, vocab_size=vocab_size, softcap=cap, chunk=chunk
    )
  if temperature <= 0 or not 0 <= share <= 1:
    raise ValueError(
      f'temperature={temperature} must be positive and share={share} in [0, 1]'
    )

  run = functools.partial(
    _run,
    vocab_size=vocab_size,
    chunk=chunk,
    of_teacher=dict(
      softcap=softcap,
      teacher_softcap=teacher_softcap,
      temperature=temperature,
      share=share,
    ),
    of_data=dict(
      softcap=softcap,
      share=1 - share,
      z_loss=z_loss,
      label_smoothing=label_smoothing,
    ),
  )
  teacher = jax.lax.stop_gradient(
    (teacher_hidden, _with_rows(teacher_table, table.shape[0]))
  )
  return vocabulary_parallel.stored_gradients(
    run, hidden, table, weights, *teacher, targets
  )


def _run(
  hidden: jax.Array,
  table: jax.Array,
  weights: jax.Array,
  teacher_hidden: jax.Array,
  teacher_table: jax.Array,
  targets: jax.Array,
  *,
  with_gradients: bool,
  vocab_size: int,
  chunk: int,
  of_teacher: Mapping[str, float | None],
  of_data: Mapping[str, float | None],
) -> tuple[DistillationSums, jax.Array, jax.Array | None, jax.Array | None]:
  """Returns sums, objective [B, T] and gradients, for `stored_gradients`.

  `of_teacher` are options of `_terms`, `of_data` of `vocabulary_loss.terms`.
  """
  # With no weight on the data its terms are only reported.
  data_counts = of_data['share'] > 0 or of_data['z_loss'] > 0

  def step(columns, tokens, tables):
    """Computes the terms of one chunk from both models' logits."""
    x, x_teacher, y, w = tokens
    logits = vocabulary_parallel.product(x, tables[0])  # [rows, v]
    teacher_logits = vocabulary_parallel.product(x_teacher, tables[1])
    w = w if with_gradients else None
    values, dlogits = _terms(columns, logits, teacher_logits, w, **of_teacher)
    data, of_targets = vocabulary_loss.terms(
      columns, logits, y, w if data_counts else None, **of_data
    )
    total = values['total'] + data['total']
    if of_targets is not None:
      dlogits = dlogits + of_targets
    return {**data, **values, 'total': total}, dlogits

  values, dhidden, dtable = vocabulary_parallel.sweep(
    step,
    (hidden, teacher_hidden, targets, weights),
    (table.astype(hidden.dtype), teacher_table.astype(teacher_hidden.dtype)),
    vocab_size=vocab_size,
    chunk=chunk,
    with_gradients=with_gradients,
  )
  sums = {
    name: vocabulary_parallel.weighted_sum(weights, value)
    for name, value in values.items()
  }
  sums['weight'] = jnp.sum(weights)
  return DistillationSums(**sums), values['total'], dhidden, dtable


def _with_rows(table: jax.Array, rows: int) -> jax.Array:
  """Drops or adds padding rows, so that both tables are sharded alike."""
  if table.shape[0] < rows:
    return jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))
  return table[:rows]


def _terms(
  columns: vocabulary_parallel.Columns,
  logits: jax.Array,
  teacher_logits: jax.Array,
  weights: jax.Array | None,
  *,
  softcap: float | None,
  teacher_softcap: float | None,
  temperature: float,
  share: float,
) -> tuple[dict[str, jax.Array], jax.Array | None]:
  """Values per row, and the gradient of the raw logits if given weights.

  Args (the rest as for `distillation`):
    columns: the local columns.
    logits: the student's, [rows, v] float32, before the soft-cap.
    teacher_logits: the teacher's, likewise.
    weights: [rows], or None for no gradient.

  Returns:
    'total' and 'kl', each [rows], without weights; the gradient [rows, v] of
    weights * total, or None.
  """
  capped, slope = vocabulary_parallel.soft_cap(logits, softcap)
  wanted, _ = vocabulary_parallel.soft_cap(teacher_logits, teacher_softcap)
  excluded = vocabulary_parallel.EXCLUDED
  scores = columns.only_tokens(capped / temperature, excluded)
  wanted = columns.only_tokens(wanted / temperature, excluded)
  shift, wanted_shift = columns.max(scores, wanted)  # [rows] each
  unnormalised = jnp.exp(wanted - wanted_shift[:, None])
  normaliser, wanted_normaliser, cross, self_term = columns.sum(
    jnp.exp(scores - shift[:, None]),
    unnormalised,
    unnormalised * scores,
    unnormalised * wanted,
  )
  log_normaliser = shift + jnp.log(normaliser)
  wanted_log_normaliser = wanted_shift + jnp.log(wanted_normaliser)
  cross_entropy = log_normaliser - cross / wanted_normaliser
  entropy = wanted_log_normaliser - self_term / wanted_normaliser
  values = {
    'total': share * temperature**2 * cross_entropy,
    'kl': cross_entropy - entropy,
  }
  if weights is None:
    return values, None
  # The scores are capped / temperature: one factor of it goes.
  scale = share * temperature * weights.astype(jnp.float32)
  dlogits = scale[:, None] * (
    jnp.exp(scores - log_normaliser[:, None])
    - jnp.exp(wanted - wanted_log_normaliser[:, None])
  )
  return values, dlogits if slope is None else dlogits * slope
