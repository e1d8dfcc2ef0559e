"""The same losses with all logits at once and plain differentiation.

The reference of the tests and of the benchmark: short, obvious, one device,
and as large in memory as tokens x vocabulary.
"""

import jax
import jax.numpy as jnp

from encdec_adapt.ops import distillation_loss, vocabulary_loss


def logits(
  hidden: jax.Array,
  table: jax.Array,
  *,
  vocab_size: int,
  softcap: float | None = None,
) -> jax.Array:
  """Soft-capped float32 logits of the real vocabulary."""
  raw = jnp.einsum(
    'BTD,VD->BTV',
    hidden,
    table[:vocab_size].astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
  return raw if softcap is None else softcap * jnp.tanh(raw / softcap)


def cross_entropy(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  vocab_size: int,
  softcap: float | None = None,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> vocabulary_loss.LossSums:
  """`vocabulary_loss.cross_entropy`, densely."""
  scores = logits(hidden, table, vocab_size=vocab_size, softcap=softcap)
  log_normaliser = jax.nn.logsumexp(scores, axis=-1)  # [B, T]
  wanted = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  nll = log_normaliser - wanted
  uniform = log_normaliser - jnp.mean(scores, axis=-1)
  smoothed = (1 - label_smoothing) * nll + label_smoothing * uniform
  z_term = z_loss * jnp.square(log_normaliser)
  return vocabulary_loss.LossSums(
    total=jnp.sum(weights * (smoothed + z_term)),
    cross_entropy=jnp.sum(weights * nll),
    z_loss=jnp.sum(weights * z_term),
    correct=jnp.sum(weights * (jnp.argmax(scores, axis=-1) == targets)),
    weight=jnp.sum(weights),
  )


def distillation(
  hidden: jax.Array,
  table: jax.Array,
  teacher_hidden: jax.Array,
  teacher_table: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  vocab_size: int,
  share: float = 1.0,
  softcap: float | None = None,
  teacher_softcap: float | None = None,
  temperature: float = 1.0,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> distillation_loss.DistillationSums:
  """`distillation_loss.distillation`, densely."""
  data = cross_entropy(
    hidden,
    table,
    targets,
    weights,
    vocab_size=vocab_size,
    softcap=softcap,
    label_smoothing=label_smoothing,
  )
  student = logits(hidden, table, vocab_size=vocab_size, softcap=softcap)
  teacher = jax.lax.stop_gradient(
    logits(
      teacher_hidden,
      teacher_table,
      vocab_size=vocab_size,
      softcap=teacher_softcap,
    )
  )
  z_term = z_loss * jnp.square(jax.nn.logsumexp(student, axis=-1))
  student_log_probs = jax.nn.log_softmax(student / temperature)
  teacher_log_probs = jax.nn.log_softmax(teacher / temperature)
  teacher_probs = jnp.exp(teacher_log_probs)
  to_teacher = -jnp.sum(teacher_probs * student_log_probs, axis=-1)
  entropy = -jnp.sum(teacher_probs * teacher_log_probs, axis=-1)
  soft = jnp.sum(weights * (share * temperature**2 * to_teacher + z_term))
  return distillation_loss.DistillationSums(
    total=soft + (1 - share) * data.total,
    cross_entropy=data.cross_entropy,
    kl=jnp.sum(weights * (to_teacher - entropy)),
    z_loss=jnp.sum(weights * z_term),
    correct=data.correct,
    weight=data.weight,
  )
