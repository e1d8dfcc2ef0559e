"""Cached generation: the prompt once, then one token per step.

An encoder-decoder reads the prompt with its encoder, whose keys and values
are made once, and its decoder starts from BOS. A decoder-only model reads
the prompt into its cache and continues it. From there both run one loop.
"""

import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import build
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import decoder_only
from encdec_adapt.runtime import errors


class Generated(NamedTuple):
  """Continuations of a batch of prompts.

  Attributes:
    tokens: [B, n], EOS included where a row ended; pad after it.
    lengths: [B], tokens of each row, EOS included.
    log_probs: [B, n], natural log of the probability of each token under
      the model itself, before temperature and filters; 0 after the end.
  """

  tokens: Int[Array, 'B n']
  lengths: Int[Array, 'B']
  log_probs: Float[Array, 'B n']


class _Loop(NamedTuple):
  """What the decoding loop carries."""

  step: jax.Array
  last: jax.Array  # [B] the newest token
  positions: jax.Array  # [B] of the newest token
  done: jax.Array  # [B]
  cache: object
  tokens: jax.Array  # [B, n]
  log_probs: jax.Array  # [B, n]


def generate_tokens(
  model: build.Model,
  params: decoder_only.Params,
  tokens: Int[Array, 'B S'],
  segments: Int[Array, 'B S'],
  positions: Int[Array, 'B S'],
  *,
  rng: jax.Array,
  rows: Int[Array, 'B'] | None = None,
  max_tokens: int,
  sampling: sampling_lib.SamplingConfig = sampling_lib.SamplingConfig(),
  bos: int = 2,
  eos: int = 1,
  pad: int = 0,
) -> Generated:
  """Continues a batch of prompts; to be traced (`generate` is it jitted).

  Args:
    model: an encoder-decoder, or a decoder-only model.
    params: its parameters.
    tokens: prompts, BOS first, padded on either side.
    segments: 1 at tokens, 0 at padding; a row of padding only fills up the
      batch, and nothing is generated for it.
    positions: position of each token in its prompt.
    rng: key of all draws.
    rows: number of each row, which with `rng` decides its draws: a prompt
      with the same number draws alike in any batch. None for 0 .. B-1.
    max_tokens: n, at least 1; the loop ends earlier if all rows have ended.
    sampling: how tokens are chosen.
    bos: first token of an encoder-decoder's decoder.
    eos: token that ends a row.
    pad: token after the end.

  Returns:
    The continuations.

  Raises:
    UserError: max_tokens is below 1.
  """
  if max_tokens < 1:
    raise errors.UserError(
      f'max_tokens is {max_tokens}; at least 1 token is generated.'
    )
  batch = tokens.shape[0]
  empty = ~jnp.any(segments > 0, axis=1)  # [B]
  if rows is None:
    rows = jnp.arange(batch)
  row_keys = jax.vmap(functools.partial(jax.random.fold_in, rng))(rows)
  step_model = model.decode_step
  if isinstance(model.config, config_lib.EncoderDecoderConfig):
    encoded = model.encode(params, tokens, segments, positions)
    cross = model.prefill_cross(params, encoded, segments)
    step_model = functools.partial(step_model, cross=cross)
    tokens = jnp.full((batch, 1), bos, jnp.int32)
    segments = jnp.where(empty, 0, 1)[:, None]
    positions = jnp.zeros((batch, 1), jnp.int32)

  # The last generated token is never read, so it needs no entry.
  length = tokens.shape[1] + max_tokens - 1
  hidden, cache = step_model(
    params,
    tokens,
    segments=segments,
    positions=positions,
    cache=model.init_cache(batch, length),
  )
  # Index of each row's last token: after it there is padding at most.
  last = segments.shape[1] - 1 - jnp.argmax(segments[:, ::-1] > 0, axis=1)
  hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
  position = jnp.take_along_axis(positions, last[:, None], axis=1)[:, 0]

  def choose(loop: _Loop, hidden: jax.Array) -> _Loop:
    """Chooses the next token from states [B, 1, D] and writes it down."""
    logits = model.logits(params, hidden)[:, 0]  # [B, vocab]
    fold = functools.partial(jax.random.fold_in, data=loop.step)
    chosen = sampling_lib.choose(logits, jax.vmap(fold)(row_keys), sampling)
    log_probs = jnp.take_along_axis(
      jax.nn.log_softmax(logits), chosen[:, None], axis=1
    )[:, 0]
    chosen = jnp.where(loop.done, pad, chosen)
    log_probs = jnp.where(loop.done, 0.0, log_probs)
    return loop._replace(
      step=loop.step + 1,
      last=chosen,
      positions=loop.positions + 1,
      done=loop.done | (chosen == eos),
      tokens=loop.tokens.at[:, loop.step].set(chosen),
      log_probs=loop.log_probs.at[:, loop.step].set(log_probs),
    )

  def advance(loop: _Loop) -> _Loop:
    hidden, cache = step_model(
      params,
      loop.last[:, None],
      segments=jnp.where(loop.done, 0, 1)[:, None],
      positions=loop.positions[:, None],
      cache=loop.cache,
    )
    return choose(loop._replace(cache=cache), hidden)

  loop = _Loop(
    step=jnp.zeros((), jnp.int32),
    last=jnp.full(batch, pad, jnp.int32),
    positions=position,
    done=empty,
    cache=cache,
    tokens=jnp.full((batch, max_tokens), pad, jnp.int32),
    log_probs=jnp.zeros((batch, max_tokens), jnp.float32),
  )
  loop = jax.lax.while_loop(
    lambda loop: (loop.step < max_tokens) & ~jnp.all(loop.done),
    advance,
    choose(loop, hidden),
  )
  ends = jnp.argmax(loop.tokens == eos, axis=1) + 1
  ended = jnp.any(loop.tokens == eos, axis=1)
  lengths = jnp.where(ended, ends, jnp.where(empty, 0, max_tokens))
  return Generated(loop.tokens, lengths, loop.log_probs)


generate = jax.jit(
  generate_tokens, static_argnames=('model', 'max_tokens', 'sampling')
)
