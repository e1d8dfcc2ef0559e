"""Next-token selection from logits: greedy or sampled.

Pure functions of a step's logits, with options per row. Ties go to the lower
token id everywhere, so greedy, top-k and top-p agree. The vocabulary is not
sorted: the last token of a filtered set is searched for among the likeliest
tokens. This module must not import models.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.base import errors

# Candidates in which top-k and top-p search for their last token. Only flat
# distributions need more; for them the vocabulary is sorted.
_CANDIDATES = 1024
MOST_TOP = 5  # Likeliest tokens that a step can report.


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling options.

  Attributes:
    temperature: divisor of the logits; 0 is greedy.
    top_k: sample from the k likeliest tokens; None for all.
    top_p: sample from the smallest set of likeliest tokens with total
      probability (after temperature and top-k) at least p; None for all.
    min_p: sample from tokens with at least this fraction of the maximum
      probability (after temperature); None for all.
    repetition_penalty: divisor of positive and factor of negative logits of
      tokens already read by the decoder (Keskar et al. 2019, section 4.1, as in
      transformers); 1 for none.
    seed: seed of the draws, in 0 .. 2^32 - 1.
    presence_penalty: subtracted once from the logit of every token generated so
      far, in -2 .. 2; tokens of the prompt are not counted (as in OpenAI's
      API).
    frequency_penalty: subtracted from the logit of a token for each time it was
      generated, in -2 .. 2.
    top_log_probs: number of likeliest tokens to report at each step, at most 5.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float = 1.0
  seed: int = 0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  top_log_probs: int = 0

  def __post_init__(self):
    share = 'above 0 and at most 1, or left out'
    # `< inf` also rejects NaN.
    for name, is_right, words in (
      ('temperature', 0 <= self.temperature < np.inf, '0 (greedy) or positive'),
      ('top_k', self.top_k is None or self.top_k > 0, 'at least 1'),
      ('top_p', self.top_p is None or 0 < self.top_p <= 1, share),
      ('min_p', self.min_p is None or 0 < self.min_p <= 1, share),
      ('repetition_penalty', 0 < self.repetition_penalty < np.inf, 'positive'),
      ('seed', 0 <= self.seed < 2**32, 'in 0 .. 2^32 - 1'),
      ('presence_penalty', -2 <= self.presence_penalty <= 2, 'in -2 .. 2'),
      ('frequency_penalty', -2 <= self.frequency_penalty <= 2, 'in -2 .. 2'),
      ('top_log_probs', 0 <= self.top_log_probs <= MOST_TOP, 'in 0 .. 5'),
    ):
      if not is_right:
        value = getattr(self, name)
        raise errors.UserError(f'{name} is {value}; it must be {words}.')
    if self.temperature == 0 and (self.top_k or self.top_p or self.min_p):
      raise errors.UserError(
        f'top_k ({self.top_k}), top_p ({self.top_p}) and min_p ({self.min_p})'
        ' do nothing at temperature 0, which is greedy; set a temperature, 1.0'
        ' say, or leave them out.'
      )


def seed_of(seed: int, *indices: int) -> int:
  """Derives the seed of a request from the job's seed and its indices."""
  # Hashed, not summed: request 1 of seed 0 would draw like request 0 of seed 1.
  return int(np.random.SeedSequence([seed, *indices]).generate_state(1)[0])


class Options(NamedTuple):
  """Sampling options of a batch, [B] each; see `SamplingConfig`."""

  temperature: jax.Array
  top_k: jax.Array  # Maximum int32: all tokens.
  top_p: jax.Array  # 1: all tokens.
  min_p: jax.Array  # 0: all tokens.
  repetition_penalty: jax.Array
  seed: jax.Array
  presence_penalty: jax.Array
  frequency_penalty: jax.Array
  top_log_probs: jax.Array


def stack(configs: Sequence[SamplingConfig]) -> Options:
  """Stacks the options of rows into arrays."""

  def column(name: str, dtype: type, absent: float | None = None) -> np.ndarray:
    values = (getattr(config, name) for config in configs)
    return np.array([absent if x is None else x for x in values], dtype)

  return Options(
    temperature=column('temperature', np.float32),
    top_k=column('top_k', np.int32, np.iinfo(np.int32).max),
    top_p=column('top_p', np.float32, 1),
    min_p=column('min_p', np.float32, 0),
    repetition_penalty=column('repetition_penalty', np.float32),
    seed=column('seed', np.uint32),
    presence_penalty=column('presence_penalty', np.float32),
    frequency_penalty=column('frequency_penalty', np.float32),
    top_log_probs=column('top_log_probs', np.int32),
  )


def keep_vocabulary(logits: jax.Array, vocab_size: int | None) -> jax.Array:
  """Masks logits [..., V] of ids beyond `vocab_size` with -inf; None: none."""
  size = logits.shape[-1]
  if vocab_size is None or vocab_size >= size:
    return logits
  return jnp.where(jnp.arange(size) < vocab_size, logits, -jnp.inf)


def keep_top_k(logits: jax.Array, k: jax.Array | int) -> jax.Array:
  """Sets all but the k largest logits to -inf.

  Args:
    logits: [..., V].
    k: number of logits to keep, at least 1, [...]; lower ids win ties.

  Returns:
    [..., V].
  """
  size = logits.shape[-1]
  k = jnp.broadcast_to(jnp.asarray(k), logits.shape[:-1])[..., None]

  def find_last(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = ids.shape[-1]
    return jnp.minimum(k, count) - 1, (k <= count) | (k >= size)

  return jnp.where(k >= size, logits, _keep_until(logits, find_last))


def keep_top_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
  """Keeps the smallest set of likeliest tokens with probability >= p.

  Args:
    logits: [..., V]; -inf for masked tokens.
    p: in (0, 1], [...]; 1 keeps all. The likeliest token is always kept; lower
      ids win ties.

  Returns:
    [..., V], -inf outside the set.
  """
  p = jnp.broadcast_to(jnp.asarray(p), logits.shape[:-1])[..., None]
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)

  def find_last(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    reached = jnp.cumsum(jnp.take_along_axis(probabilities, ids, -1), axis=-1)
    # A token is kept if the likelier tokens do not reach p.
    last = jnp.sum(reached[..., :-1] < p, axis=-1, keepdims=True)
    return last, (reached[..., -1:] >= p) | (p >= 1)

  return jnp.where(p >= 1, logits, _keep_until(logits, find_last))


def keep_min_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
  """Keeps tokens with at least `p` times the largest probability.

  Args:
    logits: [..., V].
    p: in [0, 1], [...]; 0 keeps all.

  Returns:
    [..., V], -inf for the others.
  """
  # No softmax: a ratio of probabilities is a difference of logits. p = 0 gives
  # a bound of -inf, which keeps all.
  least = jnp.max(logits, axis=-1) + jnp.log(p)
  return jnp.where(logits >= least[..., None], logits, -jnp.inf)


def penalise(
  logits: jax.Array, seen: jax.Array, penalty: jax.Array
) -> jax.Array:
  """Applies the repetition penalty; see `SamplingConfig`.

  Args:
    logits: [B, V].
    seen: whether the decoder has read each token, bool [B, V].
    penalty: repetition penalty [B].
  """
  penalty = penalty[:, None]
  # Dividing a negative logit would make its token likelier.
  lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen, lower, logits)


def penalise_generated(
  logits: jax.Array, tokens: jax.Array, counts: jax.Array, options: Options
) -> jax.Array:
  """Applies presence and frequency penalty; see `SamplingConfig`.

  Args:
    logits: [B, V].
    tokens: generated tokens, the first `counts` of each row, [B, length].
    counts: number of generated tokens, [B].
    options: sampling options [B].
  """
  presence = options.presence_penalty[:, None]
  frequency = options.frequency_penalty[:, None]

  def lower() -> jax.Array:
    rows = jnp.arange(len(tokens))[:, None]
    is_generated = jnp.arange(tokens.shape[1]) < counts[:, None]
    # Counted anew at every step: no state [B, V] between steps.
    is_generated = is_generated.astype(logits.dtype)
    times = jnp.zeros_like(logits).at[rows, tokens].add(is_generated)
    return logits - frequency * times - presence * (times > 0)

  is_used = jnp.any((presence != 0) | (frequency != 0))
  return jax.lax.cond(is_used, lower, lambda: logits)


def filter_logits(logits: jax.Array, options: Options) -> jax.Array:
  """Returns the logits of the sampling distribution, [B, V].

  Applies temperature, which must be above 0, then top-k, top-p and min-p.
  """
  logits = logits.astype(jnp.float32) / options.temperature[:, None]
  # Unused filters are skipped. Min-p needs no search.
  for keep, option, is_used in (
    (keep_top_k, options.top_k, options.top_k < logits.shape[-1]),
    (keep_top_p, options.top_p, options.top_p < 1),
  ):
    logits = jax.lax.cond(
      jnp.any(is_used), keep, lambda logits, _: logits, logits, option
    )
  return keep_min_p(logits, options.min_p)


def draw(logits: jax.Array, keys: jax.Array, options: Options) -> jax.Array:
  """Samples the next token of each row; greedy at temperature 0.

  Args:
    logits: [B, V].
    keys: PRNG keys [B], one per row, so a row's draws do not depend on other
      rows of the batch.
    options: sampling options [B].

  Returns:
    [B] int32.
  """
  is_greedy = options.temperature == 0
  # Greedy rows are sampled with the others at temperature 1: no division by 0.
  positive = options._replace(
    temperature=jnp.where(is_greedy, 1, options.temperature)
  )
  drawn = jax.vmap(jax.random.categorical)(
    keys, filter_logits(logits, positive)
  )
  return jnp.where(is_greedy, choose_likeliest(logits), drawn.astype(jnp.int32))


def choose(logits: jax.Array, counts: jax.Array, options: Options) -> jax.Array:
  """Chooses the next token of each row; skips sampling if all are greedy.

  Args:
    logits: [B, V].
    counts: number of tokens generated so far, [B]; determines a row's draw
      together with its seed.
    options: sampling options [B].

  Returns:
    [B] int32.
  """

  def draw_rows() -> jax.Array:
    # Folds in the row's count instead of splitting keys, so a row's draws do
    # not depend on when it started or on the steps of other rows.
    keys = jax.vmap(lambda seed, i: jax.random.fold_in(jax.random.key(seed), i))
    return draw(logits, keys(options.seed, counts), options)

  return jax.lax.cond(
    jnp.any(options.temperature > 0),
    draw_rows,
    lambda: choose_likeliest(logits),
  )


def choose_likeliest(logits: jax.Array) -> jax.Array:
  """Chooses the likeliest token of each row [B, V]; lower ids win ties."""
  # Not argmax: XLA:CPU compares its (value, index) pairs one by one.
  last = logits.shape[-1] - 1
  peak = jnp.max(logits, axis=-1, keepdims=True)
  ids = jnp.arange(last + 1, dtype=jnp.int32)
  # `last` if no logit equals the peak: the peak is NaN.
  return jnp.min(jnp.where(logits == peak, ids, last), axis=-1)


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the k largest logits, descending, and their ids, [..., k].

  Lower ids come first among ties.
  """
  logits = jnp.where(logits == 0, 0, logits)  # -0 would come after 0.
  # Without the barrier, XLA:CPU merges slices into top_k and sorts everything.
  return tuple(jax.lax.optimization_barrier(jax.lax.top_k(logits, k)))


def _keep_until(
  logits: jax.Array,
  find_last: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
) -> jax.Array:
  """Masks logits below the last token of a set of likeliest tokens with -inf.

  Args:
    logits: [..., V].
    find_last: maps the ids of the likeliest tokens [..., k] to the index of the
      last token of the set among them, and to whether k is large enough, both
      [..., 1].
  """
  size = logits.shape[-1]

  def search(count: int) -> tuple[jax.Array, ...]:
    values, ids = top_k(logits, count)
    last, is_enough = find_last(ids)
    last_token = (jnp.take_along_axis(x, last, axis=-1) for x in (values, ids))
    return *last_token, jnp.all(is_enough)

  *last, is_enough = search(min(size, _CANDIDATES))
  if size > _CANDIDATES:
    last = jax.lax.cond(is_enough, lambda: last, lambda: list(search(size)[:2]))
  value, token = last
  # Equal logits are kept up to the id of the last token.
  ties = (logits == value) & (jnp.arange(size) <= token)
  return jnp.where((logits > value) | ties, logits, -jnp.inf)
