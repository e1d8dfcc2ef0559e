"""Chooses the next token from logits: greedy, temperature, top-k, top-p.

Pure functions of one step's logits. Ties go to the lower token id everywhere,
so greedy, top-k and top-p agree with each other.
"""

import dataclasses

import jax
from jax import numpy as jnp

from encdec_adapt.cli import errors


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling options.

  Attributes:
    temperature: divisor of the logits; 0 is greedy.
    top_k: draw among the k likeliest tokens; None for all.
    top_p: draw among the smallest set of likeliest tokens whose probability
      (after temperature and top-k) reaches p; None for all.
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None

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
    if self.temperature == 0 and (self.top_k or self.top_p):
      raise errors.UserError(
        f'top_k ({self.top_k}) and top_p ({self.top_p}) do nothing at'
        ' temperature 0, which is greedy; set a temperature, 1.0 say, or'
        ' leave them out.'
      )


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
  """Sets all but the k largest logits to -inf.

  Args:
    logits: [..., V].
    k: number of logits to keep; lower ids win ties.

  Returns:
    [..., V].
  """
  return jnp.where(_ranks(logits) < k, logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
  """Keeps the smallest set of likeliest tokens with probability >= p.

  Args:
    logits: [..., V]; -inf for tokens that are excluded already.
    p: in (0, 1]. The likeliest token is always kept, and lower ids win ties.

  Returns:
    [..., V], -inf outside the set.
  """
  ranks = _ranks(logits)
  probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
  ordered = -jnp.sort(-probabilities, axis=-1)
  # A token stays while those ahead of it have not reached p.
  ahead = jnp.cumsum(ordered, axis=-1) - ordered
  stays = jnp.take_along_axis(ahead < p, ranks, axis=-1)
  return jnp.where(stays, logits, -jnp.inf)


def filter_logits(logits: jax.Array, config: SamplingConfig) -> jax.Array:
  """Returns the logits of the distribution to draw from, [..., V].

  Applies temperature, which must be above 0, then top-k, then top-p.
  """
  logits = logits.astype(jnp.float32) / config.temperature
  if config.top_k is not None:
    logits = keep_top_k(logits, config.top_k)
  if config.top_p is not None:
    logits = keep_top_p(logits, config.top_p)
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


def _ranks(logits: jax.Array) -> jax.Array:
  """Ranks the logits of each row: 0 is the largest, lower ids first."""
  order = jnp.argsort(-logits, axis=-1, stable=True)
  # The inverse permutation.
  return jnp.argsort(order, axis=-1, stable=True)
