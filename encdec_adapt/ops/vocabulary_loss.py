"""Cross-entropy over a large vocabulary without storing logits.

Optionally with distillation from a teacher's distribution, computed from the
same logits. All results are weighted sums: the caller divides by the weight of
the global batch, so that microbatches and hosts of unequal weight add up to one
large batch. Losses over sequences use the log-probability of each token instead
(`token_log_probs`).
"""

from collections.abc import Callable
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import distillation_loss, vocabulary_parallel


@flax.struct.dataclass
class LossSums:
  """Float32 sums over the tokens of a batch; only `total` has a gradient.

  Attributes:
    total: the objective: weights * (cross-entropy with label smoothing, plus
      z_loss * log(normaliser)^2). With a teacher: weights * (share *
      temperature^2 * divergence, plus (1 - share) * cross-entropy with label
      smoothing, plus the z-loss), where KL(teacher || student) is replaced by
      the cross-entropy to the teacher, without the teacher's entropy.
    cross_entropy: weights * -log p(target), without smoothing.
    divergence: weights * divergence of teacher and student, both at the
      temperature, without the factor temperature^2. 0 without a teacher.
    z_loss: the z-loss part of `total`.
    correct: total weight of tokens whose target has the largest logit (ties
      count as correct).
    weight: sum of the weights.
  """

  total: vocabulary_parallel.Sum
  cross_entropy: vocabulary_parallel.Sum
  divergence: vocabulary_parallel.Sum
  z_loss: vocabulary_parallel.Sum
  correct: vocabulary_parallel.Sum
  weight: vocabulary_parallel.Sum


def cross_entropy(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  targets: Int[Array, 'B T'],
  weights: Float[Array, 'B T'],
  *,
  vocab_size: int,
  softcap: float | None = None,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
  teacher: distillation_loss.Distribution | None = None,
) -> LossSums:
  """Computes the cross-entropy of `targets` under softmax(hidden @ table.T).

  Products run in the dtype of `hidden` and accumulate in float32. Gradients are
  computed together with the loss, only under differentiation. Runs on the
  active partition (`ops.partition`), or else on a single device.

  Args:
    hidden: final hidden states.
    table: output table; rows from `vocab_size` on are padding, with probability
      and gradient exactly 0.
    targets: ids in [0, vocab_size). Other ids give NaN unless their weight is
      0.
    weights: any finite values; 0 excludes a token.
    vocab_size: number of real tokens.
    softcap: logits become softcap * tanh(logits / softcap) (Gemma 2: 30).
    z_loss: coefficient of log(normaliser)^2 (PaLM, section 5: 1e-4).
    label_smoothing: weight of the uniform distribution over the real vocabulary
      in the target distribution.
    chunk: maximum tokens per device with logits in memory at a time.
    teacher: a distribution to distil besides the targets, without gradient, or
      None.

  Returns:
    The sums; `total` is differentiable in hidden, table and weights.

  Raises:
    ValueError: the partition does not divide the arrays.
  """
  if teacher is not None:
    teacher = jax.lax.stop_gradient(teacher)
  run = functools.partial(
    _run,
    vocab_size=vocab_size,
    chunk=chunk,
    softcap=softcap,
    z_loss=z_loss,
    label_smoothing=label_smoothing,
  )

  @jax.custom_vjp
  def loss(*arrays):
    return run(*arrays, with_gradients=False)[0]

  # The forward pass computes the gradients too: the backward pass would have to
  # recompute the logits, the largest product of the model.
  forward = functools.partial(run, with_gradients=True)

  def backward(gradients, cotangents):
    scaled = (
      (cotangents.total * gradient).astype(array.dtype)
      for gradient, array in zip(
        gradients, (hidden, table, weights), strict=True
      )
    )
    return *scaled, None, None

  loss.defvjp(forward, backward)
  return loss(hidden, table, weights, targets, teacher)


def per_token(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  targets: Int[Array, 'B T'],
  *,
  vocab_size: int,
  softcap: float | None = None,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
) -> tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Computes the cross-entropy of every token without gradients.

  Args (see `cross_entropy`):
    hidden: final hidden states.
    table: output table.
    targets: ids in [0, vocab_size).
    vocab_size: number of real tokens.
    softcap: soft-cap of the logits.
    chunk: maximum tokens per device with logits in memory at a time.

  Returns:
    -log p(target) in nats, and 1 where the target has the largest logit (ties
    count), else 0; float32.
  """
  values, _, _ = _sweep(
    hidden,
    table,
    jnp.ones(targets.shape, jnp.float32),
    targets,
    None,
    with_gradients=False,
    vocab_size=vocab_size,
    chunk=chunk,
    softcap=softcap,
  )
  return values['cross_entropy'], values['correct']


def token_log_probs(
  hidden: Float[Array, 'B T D'],
  table: Float[Array, 'V D'],
  targets: Int[Array, 'B T'],
  *,
  vocab_size: int,
  softcap: float | None = None,
  temperature: float = 1.0,
  chunk: int = vocabulary_parallel.DEFAULT_CHUNK,
  entropy: bool = False,
) -> Float[Array, 'B T'] | tuple[Float[Array, 'B T'], Float[Array, 'B T']]:
  """Computes the log-probability of every target with gradients.

  The backward pass is a second pass over the chunks, without stored logits: it
  computes the gradients of `cross_entropy` weighted by the negative cotangents.

  Args (see `cross_entropy`):
    hidden: final hidden states.
    table: output table.
    targets: ids in [0, vocab_size).
    vocab_size: number of real tokens.
    softcap: soft-cap of the logits.
    temperature: divisor of the logits, after the soft-cap.
    chunk: maximum tokens per device with logits in memory at a time.
    entropy: whether to return entropies too.

  Returns:
    log p(target) in nats, float32, differentiable in hidden and table; with
    `entropy` also the entropy of every distribution, without gradients.
  """
  run = functools.partial(
    _sweep,
    vocab_size=vocab_size,
    chunk=chunk,
    softcap=softcap,
    temperature=temperature,
  )

  @jax.custom_vjp
  def compute(hidden, table, targets):
    arrays = hidden, table, jnp.ones(targets.shape, jnp.float32), targets, None
    values, _, _ = run(*arrays, with_gradients=False, entropy=entropy)
    log_probs = -values['cross_entropy']
    return (log_probs, values['entropy']) if entropy else log_probs

  def forward(*arrays):
    return compute(*arrays), arrays

  def backward(arrays, cotangents):
    hidden, table, targets = arrays
    weights = -(cotangents[0] if entropy else cotangents)
    arrays = hidden, table, weights, targets, None
    _, dhidden, dtable = run(*arrays, with_gradients=True)
    return dhidden, dtable.astype(table.dtype), None

  compute.defvjp(forward, backward)
  return compute(hidden, table, targets)


def _run(hidden, table, weights, *arguments, **options):
  """Computes the sums and the gradients of `total`; arguments as in `_sweep`.

  Returns:
    The sums; gradients in `hidden` and `table`, None without gradients, and in
    `weights` (`total` is linear in them).
  """
  values, dhidden, dtable = _sweep(
    hidden, table, weights, *arguments, **options
  )
  # A weight of 0 hides any value, including NaN: padding has no target.
  sums = {
    name: jnp.sum(jnp.where(weights == 0, 0.0, weights * value))
    for name, value in values.items()
  }
  sums.setdefault('divergence', jnp.zeros((), jnp.float32))
  sums['weight'] = jnp.sum(weights)
  return LossSums(**sums), (dhidden, dtable, values['total'])


def _sweep(
  hidden: jax.Array,
  table: jax.Array,
  weights: jax.Array,
  targets: jax.Array,
  teacher: distillation_loss.Distribution | None,
  *,
  with_gradients: bool,
  vocab_size: int,
  chunk: int,
  softcap: float | None,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
  temperature: float = 1.0,
  entropy: bool = False,
) -> tuple[dict[str, jax.Array], jax.Array | None, jax.Array | None]:
  """Computes the terms of every token and gradients of their weighted sum.

  Returns:
    Terms [B, T] by name; gradients in `hidden` and `table`, None without
    gradients.
  """
  share = 1.0
  tokens, tables = [hidden, targets, weights], [table.astype(hidden.dtype)]
  if teacher is not None:
    share = 1.0 - teacher.share
    tokens += teacher.tokens
    tables += teacher.tables(table.shape[0])
  # If the data have no weight, their terms are only reported.
  data_counts = share > 0 or z_loss > 0

  def step(columns, tokens, tables):
    x, y, w, *teacher_tokens = tokens
    w = w if with_gradients else None
    logits = vocabulary_parallel.product(x, tables[0])  # [rows, v]
    parts, finish = terms(
      columns,
      logits,
      y,
      w if data_counts else None,
      softcap=softcap,
      share=share,
      z_loss=z_loss,
      label_smoothing=label_smoothing,
      temperature=temperature,
      entropy=entropy,
    )
    if teacher is None:
      return finish(*columns.reduce(*parts))
    teacher_parts, distill = teacher.terms(
      columns, logits, teacher_tokens, tables[1:], w, softcap=softcap
    )
    # One pass over the logits and one collective.
    largest, sums = columns.reduce(*parts, *teacher_parts)
    values, dlogits = finish(largest, sums)
    distilled, gradient = distill(sums[-len(teacher_parts) :])
    values['divergence'] = distilled['divergence']
    values['total'] += distilled['total']
    return values, gradient if dlogits is None else gradient + dlogits

  return vocabulary_parallel.sweep(
    step,
    tokens,
    tables,
    vocab_size=vocab_size,
    chunk=chunk,
    with_gradients=with_gradients,
  )


def terms(
  columns: vocabulary_parallel.Columns,
  logits: Float[Array, 'rows v'],
  targets: Int[Array, 'rows'],
  weights: Float[Array, 'rows'] | None,
  *,
  softcap: float | None,
  share: float = 1.0,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
  temperature: float = 1.0,
  entropy: bool = False,
) -> tuple[list[Float[Array, 'rows v']], Callable]:
  """Prepares terms per row and, given weights, the raw logits' gradient.

  Args (the remaining ones as for `cross_entropy`):
    columns: the local columns.
    logits: [rows, v] float32, before the soft-cap.
    targets: [rows] int32.
    weights: [rows], or None for no gradient.
    share: factor of the cross-entropy in 'total', not of the z-loss.
    temperature: divisor of the logits, after the soft-cap.
    entropy: whether to compute 'entropy', which has no gradient.

  Returns:
    Arguments of `columns.reduce`, and a function of its results. It returns
    unweighted 'total', 'cross_entropy', 'z_loss', 'correct' and, on request,
    'entropy', each [rows], and the gradient [rows, v] of weights * total, or
    None.
  """
  capped, slope = vocabulary_parallel.soft_cap(logits, softcap)
  if temperature != 1:
    capped = capped / temperature
    slope = (1.0 if slope is None else slope) / temperature
  scores = columns.only_tokens(capped, vocabulary_parallel.EXCLUDED)
  is_target = columns.ids == targets[:, None]  # [rows, v]
  shift = vocabulary_parallel.fixed_shift(softcap, temperature)
  if shift is None:
    shift = columns.max(scores)[0]
  shifted = scores - jnp.expand_dims(shift, -1)
  # The soft-cap is increasing: the largest logit has the largest score.
  parts = [scores, jnp.exp(shifted), jnp.where(is_target, capped, 0.0)]
  if label_smoothing:
    parts.append(columns.only_tokens(capped, 0.0))
  if entropy:
    # Padding has probability exactly 0 and a finite score.
    parts.append(jnp.exp(shifted) * shifted)

  def finish(largest, sums):
    log_normaliser = shift + jnp.log(sums[0])
    # An id outside the vocabulary matches no column and would get logit 0.
    in_vocabulary = (targets >= 0) & (targets < columns.vocab_size)
    nll = jnp.where(in_vocabulary, log_normaliser - sums[1], jnp.nan)
    smoothed = nll
    if label_smoothing:
      uniform_nll = log_normaliser - sums[2] / columns.vocab_size
      smoothed = (1 - label_smoothing) * nll + label_smoothing * uniform_nll
    z_term = z_loss * jnp.square(log_normaliser)
    values = {
      'total': share * smoothed + z_term,
      'cross_entropy': nll,
      'z_loss': z_term,
      'correct': (sums[1] >= largest).astype(jnp.float32),
    }
    if entropy:  # Never with a teacher: its parts would be last.
      values['entropy'] = jnp.log(sums[0]) - sums[-1] / sums[0]
    if weights is None:
      return values, None
    row_weights = weights.astype(jnp.float32)
    scale = row_weights * (share + 2 * z_loss * log_normaliser)  # [rows]
    probabilities = jnp.exp(scores - log_normaliser[:, None])
    target_probabilities = jnp.where(is_target, 1 - label_smoothing, 0.0)
    if label_smoothing:
      uniform = label_smoothing / columns.vocab_size
      target_probabilities += columns.only_tokens(uniform, 0.0)
    dlogits = scale[:, None] * probabilities
    dlogits -= (share * row_weights)[:, None] * target_probabilities
    return values, dlogits if slope is None else dlogits * slope

  return parts, finish
