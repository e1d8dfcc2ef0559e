"""Chooses the next token from logits: greedy, or drawn from a filtered set.

Pure functions of one step's logits. Ties go to the lower token id everywhere,
so greedy, top-k and top-p agree with each other. The vocabulary is not sorted:
the least likely token that is kept is found among the likeliest ones.
"""

import dataclasses

import jax
from jax import numpy as jnp

from encdec_adapt.cli import errors

# Tokens among which top-p looks for its last one; beyond them it sorts all.
_CANDIDATES = 1024


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling options.

  Attributes:
    temperature: divisor of the logits; 0 is greedy.
    top_k: draw among the k likeliest tokens; None for all.
    top_p: draw among the smallest set of likeliest tokens whose probability
      (after temperature and top-k) reaches p; None for all.
    min_p: draw among tokens with at least this share of the likeliest token's
      probability (after temperature); None for all.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None

  def __post_init__(self):
    if not 0 <= self.temperature < float('inf'):
      raise errors.UserError(
        f'temperature is {self.temperature}; it must be 0 (greedy) or a'
        ' positive number.'
      )
    if self.top_k is not None and self.top_k < 1:
      raise errors.UserError(
        f'top_k is {self.top_k}; it must be at least 1, or left out.'
      )
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise errors.UserError(
        f'top_p is {self.top_p}; it must be above 0 and at most 1, or left out.'
      )
    if self.min_p is not None and not 0 < self.min_p <= 1:
      raise errors.UserError(
        f'min_p is {self.min_p}; it must be above 0 and at most 1, or left out.'
      )
    if self.temperature == 0 and (self.top_k or self.top_p or self.min_p):
      raise errors.UserError(
        f'top_k ({self.top_k}), top_p ({self.top_p}) and min_p ({self.min_p})'
        ' do nothing at temperature 0, which is greedy; set a temperature, 1.0'
        ' say, or leave them out.'
      )


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
  """Sets all but the k largest logits to -inf.

  Args:
    logits: [..., V].
    k: number of logits to keep; lower ids win ties.

  Returns:
    [..., V].
  """
  values, ids = _top_k(logits, min(k, logits.shape[-1]))
  return _keep_until(logits, values[..., -1:], ids[..., -1:])


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
  """Keeps the smallest set of likeliest tokens with probability >= p.

  Args:
    logits: [..., V]; -inf for tokens that are excluded already.
    p: in (0, 1]. The likeliest token is always kept, and lower ids win ties.

  Returns:
    [..., V], -inf outside the set.
  """
  if p == 1:
    return logits
  size = logits.shape[-1]
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)

  def find_last(count: int) -> tuple[jax.Array, ...]:
    """Finds the last token of the set among the `count` likeliest.

    Returns:
      Its logit and id [..., 1], and whether these tokens reach p [...].
    """
    values, ids = _top_k(logits, count)
    reached = jnp.cumsum(jnp.take_along_axis(probabilities, ids, -1), axis=-1)
    # A token stays while those ahead of it have not reached p.
    last = jnp.sum(reached[..., :-1] < p, axis=-1, keepdims=True)
    found = (jnp.take_along_axis(x, last, axis=-1) for x in (values, ids))
    return *found, reached[..., -1] >= p

  *last, enough = find_last(min(size, _CANDIDATES))
  if size > _CANDIDATES:
    last = jax.lax.cond(
      jnp.all(enough), lambda: last, lambda: list(find_last(size)[:2])
    )
  return _keep_until(logits, *last)


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
  """Keeps tokens with at least `p` times the largest probability.

  Args:
    logits: [..., V].
    p: in (0, 1].

  Returns:
    [..., V], -inf for the others.
  """
  least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)
  return jnp.where(logits >= least, logits, -jnp.inf)


def filter_logits(logits: jax.Array, config: SamplingConfig) -> jax.Array:
  """Returns the logits of the distribution to draw from, [..., V].

  Applies temperature, which must be above 0, then top-k, top-p and min-p.
  """
  logits = logits.astype(jnp.float32) / config.temperature
  if config.top_k is not None:
    logits = keep_top_k(logits, config.top_k)
  if config.top_p is not None:
    logits = keep_top_p(logits, config.top_p)
  if config.min_p is not None:
    logits = keep_min_p(logits, config.min_p)
  return logits


def choose(
  logits: jax.Array, keys: jax.Array, config: SamplingConfig
) -> jax.Array:
  """Chooses the next token of each row.

  Args:
    logits: [B, V].
    keys: PRNG keys [B], one per row, so that the draws of a row do not depend
      on other rows of the batch; unused by greedy decoding.
    config: sampling options.

  Returns:
    [B] int32.
  """
  if config.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  tokens = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, config))
  return tokens.astype(jnp.int32)


def _top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """Returns the k largest logits, descending, and their ids, [..., k]."""
  logits = jnp.where(logits == 0, 0, logits)  # -0 would come after 0.
  # XLA:CPU sorts the vocabulary where it can merge a slice into top_k.
  return tuple(jax.lax.optimization_barrier(jax.lax.top_k(logits, k)))


def _keep_until(
  logits: jax.Array, value: jax.Array, token: jax.Array
) -> jax.Array:
  """Sets logits [..., V] below the last token that is kept to -inf.

  Args:
    logits: [..., V].
    value: logit of the last token, [..., 1].
    token: id of the last token, [..., 1]; equal logits are kept up to this id.
  """
  ties = (logits == value) & (jnp.arange(logits.shape[-1]) <= token)
  return jnp.where((logits > value) | ties, logits, -jnp.inf)
