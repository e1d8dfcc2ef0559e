"""Distillation from a teacher's whole distribution, in one pass.

Student and teacher may differ in width; they share the vocabulary. Their
logits exist for one chunk of tokens at a time, as in `vocabulary_loss`.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import vocabulary_parallel


@flax.struct.dataclass
class DistillationSums:
  """Float32 sums over the tokens of a batch; only `total` has a gradient.

  Attributes:
    total: the objective: weights * (temperature^2 * cross-entropy of the
      student to the teacher, plus z_loss * log(normaliser)^2).
    kl: weights * KL(teacher || student), both at the temperature; not
      multiplied by its square.
    z_loss: the z-loss part of `total`.
    weight: sum of the weights.
  """

  total: vocabulary_parallel.Sum
  kl: vocabulary_parallel.Sum
  z_loss: vocabulary_parallel.Sum
  weight: vocabulary_parallel.Sum


def distillation(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  teacher_hidden: Float[Array, 'B T E'],
  teacher_table: Float[Array, 'W E'],
  weights: Float[Array, 'B T'],
  *,
  vocab_size: int,
  softcap: float | None = None,
  teacher_softcap: float | None = None,
  temperature: float = 1.0,
  z_loss: float = 0.0,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
) -> DistillationSums:
  """Sums of the student's cross-entropy to the teacher, per position.

  The objective of the Gemma 2 report (section 3, knowledge distillation) over
  the full vocabulary. Soft-capped logits are divided by `temperature`; the
  objective is multiplied by its square, which keeps the size of the gradient
  (Hinton et al. 2015, section 2). There is no gradient to the teacher.

  Args:
    hidden: final hidden states of the student.
    table: its output table; rows from `vocab_size` on are padding.
    teacher_hidden: final hidden states of the teacher at the positions that
      predict the same tokens.
    teacher_table: the teacher's output table, possibly padded differently.
    weights: any finite values; 0 hides a token.
    vocab_size: number of real tokens, the same for both.
    softcap: the student's soft-cap, or None.
    teacher_softcap: the teacher's soft-cap, or None.
    temperature: of both distributions.
    z_loss: coefficient of log(normaliser)^2, the student's at `temperature`.
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
  if temperature <= 0:
    raise ValueError(f'temperature={temperature} must be positive')

  run = functools.partial(
    _run,
    vocab_size=vocab_size,
    chunk=chunk,
    softcap=softcap,
    teacher_softcap=teacher_softcap,
    temperature=temperature,
    z_loss=z_loss,
  )
  teacher = jax.lax.stop_gradient(
    (teacher_hidden, _with_rows(teacher_table, table.shape[0]))
  )
  return vocabulary_parallel.stored_gradients(
    run, hidden, table, weights, *teacher
  )


def _run(
  hidden: jax.Array,
  table: jax.Array,
  weights: jax.Array,
  teacher_hidden: jax.Array,
  teacher_table: jax.Array,
  *,
  with_gradients: bool,
  vocab_size: int,
  chunk: int,
  **options: float | None,
) -> tuple[DistillationSums, jax.Array, jax.Array | None, jax.Array | None]:
  """Sums, objective [B, T] and gradients, as `stored_gradients` wants them.

  `options` are those of `_chunk`.
  """

  def step(columns, tokens, tables):
    """`_chunk` of these tokens' products with both tables."""
    x, x_teacher, w = tokens
    return _chunk(
      columns,
      vocabulary_parallel.product(x, tables[0]),  # [rows, v]
      vocabulary_parallel.product(x_teacher, tables[1]),  # [rows, v]
      w if with_gradients else None,
      **options,
    )

  values, dhidden, dtable = vocabulary_parallel.sweep(
    step,
    (hidden, teacher_hidden, weights),
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
  """Drops or adds padding rows, so that both tables split alike."""
  if table.shape[0] < rows:
    return jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))
  return table[:rows]


def _chunk(
  columns: vocabulary_parallel.Columns,
  logits: jax.Array,
  teacher_logits: jax.Array,
  weights: jax.Array | None,
  *,
  softcap: float | None,
  teacher_softcap: float | None,
  temperature: float,
  z_loss: float,
) -> tuple[dict[str, jax.Array], jax.Array | None]:
  """Values per row, and the gradient of the raw logits if given weights.

  Args (the rest as for `distillation`):
    columns: the local columns.
    logits: the student's, [rows, v] float32, before the soft-cap.
    teacher_logits: the teacher's, likewise.
    weights: [rows], or None for no gradient.

  Returns:
    'total', 'kl' and 'z_loss', each [rows], without weights; the gradient
    [rows, v] of weights * total, or None.
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
  z_term = z_loss * jnp.square(log_normaliser)
  values = {
    'total': temperature**2 * cross_entropy + z_term,
    'kl': cross_entropy - entropy,
    'z_loss': z_term,
  }
  if weights is None:
    return values, None
  # The scores are capped / temperature: one factor of it goes.
  weights = weights.astype(jnp.float32)
  scale = weights * (temperature + 2 * z_loss / temperature * log_normaliser)
  dlogits = scale[:, None] * jnp.exp(scores - log_normaliser[:, None]) - (
    weights * temperature
  )[:, None] * jnp.exp(wanted - wanted_log_normaliser[:, None])
  return values, dlogits if slope is None else dlogits * slope
