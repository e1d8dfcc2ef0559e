"""Beam search, as transformers' `generate` does it without early stopping.

A hypothesis is compared by its log-probability divided by its number of
generated tokens, EOS included, to the power of the length penalty. The search
of a prompt ends when the likeliest open beam, at its present length, is below
the worst of its finished hypotheses: a heuristic, as a longer hypothesis may
still win with a penalty above 0.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import decoding, quantization, sampling
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import base_model, build
from encdec_adapt.models import cache as caches

_NEVER = -1e9  # Below every score; of hypotheses that do not count.


class Beams(NamedTuple):
  """Hypotheses of b prompts, n each.

  Attributes:
    tokens: generated tokens, [b, n, T].
    log_probs: log-probabilities of the tokens, [b, n, T].
    scores: of open ones the sum of the log-probabilities, of finished ones
      divided by the penalty, [b, n].
    done: which are finished, [b, n].
    lengths: number of tokens, [b, n].
  """

  tokens: Int[Array, 'b n T']
  log_probs: Float[Array, 'b n T']
  scores: Float[Array, 'b n']
  done: Bool[Array, 'b n']
  lengths: Int[Array, 'b n']

  def take(self, indices: Int[Array, 'b m']) -> 'Beams':
    """Returns the hypotheses at these indices of each prompt."""

    def take(x: jax.Array) -> jax.Array:
      """Takes from one field."""
      extended = indices.reshape(*indices.shape, *[1] * (x.ndim - 2))
      return jnp.take_along_axis(x, extended, axis=1)

    return Beams(*map(take, self))


class _Loop(NamedTuple):
  """State of the search.

  `improving` are prompts that are not done, and `limit` is the most tokens of
  their hypotheses, [b] each.
  """

  step: jax.Array
  last: jax.Array  # [b * n]
  cache: caches.Cache
  open: Beams
  finished: Beams
  improving: jax.Array
  limit: jax.Array


def search(
  engine: engine_lib.Engine,
  prompts: Sequence[np.ndarray],
  *,
  beams: int,
  max_tokens: int,
  length_penalty: float = 1.0,
) -> Iterator[tuple[int, engine_lib.Completion]]:
  """Finds the best continuation of each prompt.

  Args:
    engine: its rows are those of rows / beams prompts, at least one.
    prompts: token ids of each, BOS first.
    beams: beams per prompt, at least 1.
    max_tokens: most tokens to generate, EOS included.
    length_penalty: power of the length; above 0 it favours long ones.

  Yields:
    Index of a prompt and its continuation, as they end.

  Raises:
    UserError: `beams` is below 1 or above half of the vocabulary, or a prompt
      has tokens outside of it.
  """
  if not 1 <= beams <= engine.vocab_size // 2:
    raise errors.UserError(
      f'beams is {beams}; it must be 1 to {engine.vocab_size // 2}, half of the'
      ' vocabulary.'
    )
  for tokens in prompts:
    engine.require_tokens(tokens)
  shards = engine.shards
  at_once = max(1, engine.rows // beams // shards) * shards
  requests = [engine_lib.Request(ids, max_tokens) for ids in prompts]
  order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
  for start in range(0, len(order), at_once):
    chosen = order[start : start + at_once]
    state = engine.programs.run(
      decoding.prefill,
      *engine.prefill_arguments([requests[i] for i in chosen], at_once),
    )
    best = jax.device_get(
      engine.programs.run(
        _search,
        engine.params,
        state,
        np.array(engine.ids.eos, np.int32),
        np.float32(length_penalty),
        np.arange(at_once) < len(chosen),
        beams=beams,
      )
    )
    for row, i in enumerate(chosen):
      count = best.lengths[row, 0]
      tokens, log_probs = best.tokens[row, 0], best.log_probs[row, 0]
      yield i, engine.complete(tokens[:count], log_probs[:count])


def _search(
  model: build.Model,
  params: base_model.Params,
  state: decoding.State,
  eos: Int[Array, 'k'],
  penalty: Float[Array, ''],
  real: Bool[Array, 'b'],
  *,
  beams: int,
) -> Beams:
  """Searches for prompts that were read; returns their best, n = 1.

  Args:
    model: a model from `build.unroll`.
    params: its parameters, as the engine prepares them.
    state: the engine's state with a row per prompt.
    eos: tokens that end a hypothesis.
    penalty: length penalty.
    real: which rows have a prompt.
    beams: beams per prompt, n.
  """
  loop = _start(state, real, beams)
  advance = functools.partial(_advance, model, params, eos, penalty)
  loop = jax.lax.while_loop(
    lambda loop: jnp.any((loop.step < state.limit) & loop.improving),
    advance,
    loop,
  )
  return jax.tree.map(lambda x: x[:, :1], loop.finished)


def _start(state: decoding.State, real: Bool[Array, 'b'], beams: int) -> _Loop:
  """Returns the state of a search before its first token."""
  batch, length = state.tokens.shape
  rows = jnp.repeat(jnp.arange(batch), beams)
  nothing = Beams(
    tokens=jnp.zeros((batch, beams, length), jnp.int32),
    log_probs=jnp.zeros((batch, beams, length), jnp.float32),
    scores=jnp.full((batch, beams), _NEVER),
    done=jnp.zeros((batch, beams), bool),
    lengths=jnp.zeros((batch, beams), jnp.int32),
  )
  return _Loop(
    step=jnp.zeros((), jnp.int32),
    last=state.last[rows],
    cache=caches.take_rows(state.cache, rows),
    # The beams of a prompt are equal at first: one of them counts.
    open=nothing._replace(scores=nothing.scores.at[:, 0].set(0.0)),
    finished=nothing,
    improving=real,
    limit=state.limit,
  )


def _advance(
  model: build.Model,
  params: base_model.Params,
  eos: Int[Array, 'k'],
  penalty: Float[Array, ''],
  loop: _Loop,
) -> _Loop:
  """Extends every open hypothesis by a token."""
  batch, beams, _ = loop.open.tokens.shape
  weights = quantization.dequantize(params, model.compute.dtype)
  hidden, cache = model.decode_step(weights, loop.last, loop.cache)
  logits = model.logits(weights, hidden[:, None])[:, 0]
  log_probs = jax.nn.log_softmax(logits).reshape(batch, beams, -1)
  source, extended = _extend(loop, log_probs, eos)
  # Open ones: the likeliest that have not ended.
  closed = jnp.where(extended.done, _NEVER, 0.0)
  _, chosen = sampling.top_k(extended.scores + closed, beams)
  still_open = extended.take(chosen)
  still_open = still_open._replace(
    scores=still_open.scores + jnp.where(still_open.done, _NEVER, 0.0)
  )
  length = (loop.step + 1).astype(jnp.float32) ** penalty
  finished = _finish(loop, extended, length)
  # Whether the likeliest open one may still be among the finished.
  worst = jnp.where(
    finished.done, finished.scores.min(axis=1, keepdims=True), _NEVER
  )
  may_win = jnp.any(still_open.scores[:, :1] / length > worst, axis=1)
  origin = jnp.take_along_axis(source, chosen, axis=1)
  order = (jnp.arange(batch)[:, None] * beams + origin).reshape(-1)
  return _Loop(
    step=loop.step + 1,
    last=still_open.tokens[:, :, loop.step].reshape(-1),
    cache=caches.reorder(cache, order),
    open=still_open,
    finished=finished,
    improving=loop.improving & may_win,
    limit=loop.limit,
  )


def _extend(
  loop: _Loop, log_probs: Float[Array, 'b n V'], eos: Int[Array, 'k']
) -> tuple[Int[Array, 'b m'], Beams]:
  """Returns the likeliest hypotheses with a token more, and their origins.

  Enough are kept that n stay open even if all others end.
  """
  batch, beams, size = log_probs.shape
  total = (log_probs + loop.open.scores[:, :, None]).reshape(batch, -1)
  scores, found = sampling.top_k(total, max(2, 1 + len(eos)) * beams)
  source, tokens = found // size, found % size  # [b, m]
  gained = jnp.take_along_axis(log_probs.reshape(batch, -1), found, axis=1)
  extended = loop.open.take(source)
  return source, Beams(
    tokens=extended.tokens.at[:, :, loop.step].set(tokens),
    log_probs=extended.log_probs.at[:, :, loop.step].set(gained),
    scores=scores,
    done=jnp.isin(tokens, eos) | (loop.step + 1 >= loop.limit[:, None]),
    lengths=extended.lengths + 1,
  )


def _finish(loop: _Loop, extended: Beams, length: Float[Array, '']) -> Beams:
  """Adds those among the n likeliest that have ended to the finished ones."""
  beams = loop.finished.done.shape[1]
  counts = extended.done & (jnp.arange(extended.done.shape[1]) < beams)
  out = ~counts | ~loop.improving[:, None]
  ended = extended._replace(
    scores=extended.scores / length + jnp.where(out, _NEVER, 0.0), done=counts
  )
  merged = jax.tree.map(
    lambda *x: jnp.concatenate(x, axis=1), loop.finished, ended
  )
  return merged.take(sampling.top_k(merged.scores, beams)[1])
