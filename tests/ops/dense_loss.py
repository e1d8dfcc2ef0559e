"""The same loss with all logits at once and plain differentiation.

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
  teacher: distillation_loss.Distribution | None = None,
) -> vocabulary_loss.LossSums:
  """`vocabulary_loss.cross_entropy`, densely."""
  scores = logits(hidden, table, vocab_size=vocab_size, softcap=softcap)
  log_normaliser = jax.nn.logsumexp(scores, axis=-1)  # [B, T]
  wanted = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  nll = log_normaliser - wanted
  uniform = log_normaliser - jnp.mean(scores, axis=-1)
  objective = (1 - label_smoothing) * nll + label_smoothing * uniform
  divergence = jnp.zeros_like(nll)
  if teacher is not None:
    to_teacher, divergence = _distilled(scores, teacher, vocab_size)
    share = teacher.share
    objective = share * to_teacher + (1 - share) * objective
  z_term = z_loss * jnp.square(log_normaliser)
  right = jnp.argmax(scores, axis=-1) == targets
  return vocabulary_loss.LossSums(
    total=jnp.sum(weights * (objective + z_term)),
    cross_entropy=jnp.sum(weights * nll),
    divergence=jnp.sum(weights * divergence),
    z_loss=jnp.sum(weights * z_term),
    correct=jnp.sum(weights * right),
    weight=jnp.sum(weights),
  )


def _distilled(scores, teacher, vocab_size):
  """Objective [B, T] of a teacher without its share, and the divergence."""
  if isinstance(teacher, distillation_loss.StoredTeacher):
    one_hot = jax.nn.one_hot(teacher.ids, vocab_size)
    p = jnp.einsum('BTKV,BTK->BTV', one_hot, teacher.probabilities)
    theirs = jnp.where(p > 0, jnp.log(jnp.where(p > 0, p, 1)), 0)
    heat, kind = 1.0, 'forward'
  else:
    theirs = logits(
      teacher.hidden,
      teacher.table,
      vocab_size=vocab_size,
      softcap=teacher.softcap,
    )
    heat, kind = teacher.temperature, teacher.divergence
    theirs = jax.nn.log_softmax(jax.lax.stop_gradient(theirs) / heat)
    p = jnp.exp(theirs)
    if teacher.one_hot is not None:
      ids = teacher.one_hot[..., None]
      p = jnp.where(ids < 0, p, ids == jnp.arange(vocab_size))
      theirs = jnp.where(ids < 0, theirs, 0.0)
  ours = jax.nn.log_softmax(scores / heat)
  forward = jnp.sum(p * (theirs - ours), axis=-1)
  if kind == 'forward':
    return heat**2 * -jnp.sum(p * ours, axis=-1), forward
  q = jnp.exp(ours)
  divergence = jnp.sum(q * (ours - theirs), axis=-1)
  if kind == 'js':
    beta = teacher.beta
    mixture = jnp.log(beta * p + (1 - beta) * q)
    divergence = beta * jnp.sum(p * (theirs - mixture), axis=-1)
    divergence += (1 - beta) * jnp.sum(q * (ours - mixture), axis=-1)
  return heat**2 * divergence, divergence
