"""Cached generation: prefill with the prompt, then one token per step.

An encoder-decoder reads the prompt with its encoder, whose keys and values
are computed once, and its decoder starts from BOS. A decoder-only model reads
the prompt into its cache and continues it. From there both run one loop.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.cli import errors
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.models import build, decoder_only, model_config


class Generated(NamedTuple):
  """Continuations of a batch of prompts.

  Attributes:
    tokens: generated tokens [B, n], EOS included; pad after the end of a row.
    lengths: number of tokens of each row [B], EOS included.
    log_probs: natural log of the probability of each token [B, n] under the
      model itself, before temperature and filters; 0 after the end.
  """

  tokens: Int[Array, 'B n']
  lengths: Int[Array, 'B']
  log_probs: Float[Array, 'B n']


class _Loop(NamedTuple):
  """State of the decoding loop."""

  step: jax.Array  # Number of tokens generated so far.
  last: jax.Array  # [B] newest token.
  position: jax.Array  # [B] position of the newest token.
  done: jax.Array  # [B]
  cache: Any
  generated: Generated


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
  bos: int,
  eos: Int[Array, 'k'],
  pad: int,
) -> Generated:
  """Generates continuations of prompts; traceable (`generate` is jitted).

  Args:
    model: an encoder-decoder, or a decoder-only model.
    params: parameters of the model.
    tokens: prompts, BOS first, padded on either side.
    segments: 1 at tokens, 0 at padding; nothing is generated for a row of
      padding, which fills up a batch.
    positions: position of each token in its prompt.
    rng: key of all draws.
    rows: index of each row, which with `rng` decides its draws: a prompt with
      the same index draws alike in any batch. None for 0 .. B-1.
    max_tokens: n, at least 1; the loop stops earlier if all rows have ended.
    sampling: how tokens are chosen.
    bos: first token of an encoder-decoder's decoder.
    eos: tokens, any of which ends a row.
    pad: token after the end of a row.

  Returns:
    The continuations.

  Raises:
    UserError: max_tokens is below 1.
  """
  if max_tokens < 1:
    raise errors.UserError(
      f'max_tokens is {max_tokens}; at least 1 token is generated.'
    )
  if rows is None:
    rows = jnp.arange(len(tokens))
  row_keys = jax.vmap(functools.partial(jax.random.fold_in, rng))(rows)
  choose = functools.partial(
    _choose, row_keys=row_keys, sampling=sampling, eos=eos, pad=pad
  )
  decode_step, start = _start(model, params, tokens, segments, positions, bos)
  first, segments, positions = start
  # The last generated token is never read, so it needs no entry.
  cache = model.init_cache(len(tokens), first.shape[1] + max_tokens - 1)
  hidden, cache = decode_step(
    params,
    first,
    segments=segments,
    positions=positions,
    cache=cache,
    prefix=segments,  # A prefix decoder reads the prompt from both sides.
  )
  # Rows may be padded on either side.
  reverse = jnp.argmax(segments[:, ::-1] > 0, axis=1)
  last = (segments.shape[1] - 1 - reverse)[:, None]
  hidden = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
  batch = len(tokens)
  before = _Loop(
    step=jnp.zeros((), jnp.int32),
    last=jnp.full(batch, pad, jnp.int32),
    position=jnp.take_along_axis(positions, last, axis=1)[:, 0],
    done=~jnp.any(segments > 0, axis=1),
    cache=cache,
    generated=Generated(
      tokens=jnp.full((batch, max_tokens), pad, jnp.int32),
      lengths=jnp.zeros(batch, jnp.int32),
      log_probs=jnp.zeros((batch, max_tokens), jnp.float32),
    ),
  )
  loop = choose(before, model.logits(params, hidden)[:, 0])

  def advance(loop: _Loop) -> _Loop:
    """Feeds each row's newest token and chooses the next."""
    hidden, cache = decode_step(
      params,
      loop.last[:, None],
      segments=jnp.where(loop.done, 0, 1)[:, None],
      positions=loop.position[:, None],
      cache=loop.cache,
    )
    loop = loop._replace(cache=cache)
    return choose(loop, model.logits(params, hidden)[:, 0])

  return jax.lax.while_loop(
    lambda loop: (loop.step < max_tokens) & ~jnp.all(loop.done), advance, loop
  ).generated


generate = jax.jit(
  generate_tokens, static_argnames=('model', 'max_tokens', 'sampling')
)


def _start(
  model: build.Model,
  params: decoder_only.Params,
  tokens: jax.Array,
  segments: jax.Array,
  positions: jax.Array,
  bos: int,
) -> tuple[Callable[..., Any], tuple[jax.Array, jax.Array, jax.Array]]:
  """Runs the encoder.

  Returns:
    The decode step and its first input: tokens, segments and positions [B, n].
  """
  if not isinstance(model.config, model_config.EncoderDecoderConfig):
    if model.config.is_encoder:
      raise errors.UserError(
        'an encoder-only model predicts masked tokens and generates no text;'
        ' use a decoder or an encoder-decoder.'
      )
    return model.decode_step, (tokens, segments, positions)
  encoded = model.encode(params, tokens, segments, positions)
  cross = model.prefill_cross(params, encoded, segments)
  first = jnp.any(segments > 0, axis=1, keepdims=True)  # [B, 1]
  return functools.partial(model.decode_step, cross=cross), (
    jnp.full_like(first, bos, jnp.int32),
    first.astype(jnp.int32),
    jnp.zeros_like(first, jnp.int32),
  )


def _choose(
  loop: _Loop,
  logits: jax.Array,
  *,
  row_keys: jax.Array,
  sampling: sampling_lib.SamplingConfig,
  eos: jax.Array,
  pad: int,
) -> _Loop:
  """Chooses each row's next token from logits [B, V] and records it."""
  fold = functools.partial(jax.random.fold_in, data=loop.step)
  chosen = sampling_lib.choose(logits, jax.vmap(fold)(row_keys), sampling)
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(logits), chosen[:, None], axis=1
  )[:, 0]
  chosen = jnp.where(loop.done, pad, chosen)
  log_probs = jnp.where(loop.done, 0.0, log_probs)
  so_far = loop.generated
  return loop._replace(
    step=loop.step + 1,
    last=chosen,
    position=loop.position + 1,
    done=loop.done | jnp.isin(chosen, eos),
    generated=Generated(
      tokens=so_far.tokens.at[:, loop.step].set(chosen),
      lengths=so_far.lengths + ~loop.done,
      log_probs=so_far.log_probs.at[:, loop.step].set(log_probs),
    ),
  )
