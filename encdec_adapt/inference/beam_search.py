"""Beam search, equivalent to transformers' `generate` without early stopping.

A hypothesis is scored by its log-probability divided by its number of generated
tokens, EOS included, to the power of the length penalty. The search of a prompt
ends when the likeliest open beam, at its present length, scores below the worst
finished hypothesis: a heuristic, since a longer hypothesis may still win with a
penalty above 0.

This module holds only the loop; the engine prefills prompts and shards rows.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import (
  decoding,
  quantization,
  row_batches,
  sampling,
)
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import base_model, build
from encdec_adapt.models import kv_cache as caches

# Added to scores of excluded hypotheses, below every score. Same value as in
# transformers: comparisons with it determine when a search ends.
_NEVER = -1e9


class Beams(NamedTuple):
  """Hypotheses of b prompts, n each.

  Attributes:
    tokens: generated tokens, [b, n, T].
    log_probs: log-probabilities of the tokens, [b, n, T].
    scores: sum of the log-probabilities, divided by the length penalty for
      finished hypotheses, [b, n].
    ended: whether each is finished, [b, n].
    lengths: number of tokens, [b, n].
  """

  tokens: Int[Array, 'b n T']
  log_probs: Float[Array, 'b n T']
  scores: Float[Array, 'b n']
  ended: Bool[Array, 'b n']
  lengths: Int[Array, 'b n']

  def take(self, indices: Int[Array, 'b m']) -> 'Beams':
    """Gathers hypotheses of each prompt."""
    return Beams(
      *(
        jnp.take_along_axis(x, jnp.expand_dims(indices, range(2, x.ndim)), 1)
        for x in self
      )
    )


class _Loop(NamedTuple):
  """State of the search.

  `improving` marks prompts with an unfinished search, `limit` is the maximum
  number of generated tokens, [b] each.
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
  """Finds the best completion of each prompt.

  Args:
    engine: the engine; it searches rows / beams prompts at a time, at least 1
      per shard.
    prompts: framed token ids of each prompt.
    beams: beams per prompt, at least 1.
    max_tokens: maximum tokens to generate, EOS included.
    length_penalty: exponent of the length; above 0 favours long completions.

  Yields:
    Index of a prompt and its completion, longest prompts first.

  Raises:
    UserError: `beams` is below 1 or above half of the vocabulary size, or a
      prompt has tokens outside the vocabulary.
  """
  if not 1 <= beams <= engine.vocab_size // 2:
    raise errors.UserError(
      f'beams is {beams}; it must be 1 to {engine.vocab_size // 2}, half of the'
      ' vocabulary.'
    )
  for tokens in prompts:
    engine.require_tokens(tokens)
  shards = engine.shards
  # A multiple of the shards: cache rows are sharded.
  at_once = max(1, engine.rows // beams // shards) * shards
  requests = [engine_lib.Request(ids, max_tokens) for ids in prompts]
  # Groups prompts of similar length: they are padded to the longest.
  order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))

  def run(chosen: Sequence[int]) -> Beams:
    group = [requests[i] for i in chosen]
    arguments = engine.prefill_arguments(group, at_once)
    return engine.programs.run(
      _search,
      engine.params,
      engine.programs.run(decoding.prefill, *arguments),
      np.array(engine.ids.eos, np.int32),
      np.float32(length_penalty),
      np.arange(at_once) < len(chosen),
      beams=beams,
      **engine.choice,
    )

  for i, best in row_batches.outputs(run, order, at_once):
    count = best.lengths[0]
    tokens, log_probs = best.tokens[0, :count], best.log_probs[0, :count]
    yield i, engine.complete(tokens, log_probs)


def _search(
  model: build.Model,
  params: base_model.Params,
  state: decoding.State,
  eos: Int[Array, 'k'],
  penalty: Float[Array, ''],
  real: Bool[Array, 'b'],
  *,
  beams: int,
  vocab_size: int,
  forced: int | None,
) -> Beams:
  """Searches prefilled prompts; returns the best hypothesis of each, n = 1.

  `model` comes from `build.unroll`, `params` and `state` from the engine;
  `real` marks rows with a prompt.
  """
  choice = vocab_size, forced
  loop = jax.lax.while_loop(
    lambda loop: jnp.any((loop.step < state.limit) & loop.improving),
    functools.partial(_advance, model, params, eos, penalty, choice),
    _start(state, real, beams),
  )
  # Finished hypotheses are sorted by descending score. At least one exists,
  # since hypotheses finish at the limit.
  return jax.tree.map(lambda x: x[:, :1], loop.finished)


def _start(state: decoding.State, real: Bool[Array, 'b'], beams: int) -> _Loop:
  batch, length = state.tokens.shape
  rows = jnp.repeat(jnp.arange(batch), beams)
  empty = Beams(
    tokens=jnp.zeros((batch, beams, length), jnp.int32),
    log_probs=jnp.zeros((batch, beams, length), jnp.float32),
    scores=jnp.full((batch, beams), _NEVER),
    ended=jnp.zeros((batch, beams), bool),
    lengths=jnp.zeros((batch, beams), jnp.int32),
  )
  return _Loop(
    step=jnp.zeros((), jnp.int32),
    last=state.last[rows],
    cache=caches.take_rows(state.cache, rows),
    # A prompt's beams start out equal. Only the first counts; otherwise all
    # would be extended with the same token.
    open=empty._replace(scores=empty.scores.at[:, 0].set(0.0)),
    finished=empty,
    # Padding rows must not keep the loop running.
    improving=real,
    limit=state.limit,
  )


def _advance(
  model: build.Model,
  params: base_model.Params,
  eos: Int[Array, 'k'],
  penalty: Float[Array, ''],
  choice: tuple[int, int | None],
  loop: _Loop,
) -> _Loop:
  batch, beams, _ = loop.open.tokens.shape
  # Inside the loop, so dequantized kernels are not kept in memory along with
  # the integers.
  weights = quantization.dequantize(params, model.compute.dtype)
  hidden, cache = model.decode_step(weights, loop.last, loop.cache)
  logits = model.logits(weights, hidden[:, None])[:, 0]
  log_probs = jax.nn.log_softmax(logits).reshape(batch, beams, -1)
  source, extended = _extend(loop, log_probs, eos, *choice)
  # Ended hypotheses are chosen only if nothing else remains, at the limit; they
  # score below any open hypothesis.
  scores = extended.scores + jnp.where(extended.ended, _NEVER, 0.0)
  _, chosen = sampling.top_k(scores, beams)
  still_open = extended._replace(scores=scores).take(chosen)
  length = (loop.step + 1).astype(jnp.float32) ** penalty
  finished = _finish(loop, extended, length)
  # The likeliest open hypothesis may still win if it beats the worst finished
  # hypothesis, or if fewer than n have finished: free slots score `_NEVER`. As
  # in transformers, its score is divided by the present length, although it may
  # rise with the length.
  worst = jnp.where(
    finished.ended, finished.scores.min(axis=1, keepdims=True), _NEVER
  )
  may_win = jnp.any(still_open.scores[:, :1] / length > worst, axis=1)
  # Each hypothesis takes over the cache of its origin. Rows of different
  # prompts never mix, so the encoder's entries stay in place.
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
  loop: _Loop,
  log_probs: Float[Array, 'b n V'],
  eos: Int[Array, 'k'],
  vocab_size: int,
  forced: int | None,
) -> tuple[Int[Array, 'b m'], Beams]:
  """Returns the likeliest one-token extensions and their origins."""
  batch, beams, size = log_probs.shape
  kept = sampling.keep_vocabulary(log_probs, vocab_size)
  if forced is not None:  # With probability 1, as in transformers.
    certain = jnp.where(jnp.arange(size) == forced, 0.0, -jnp.inf)
    kept = jnp.where(loop.step == 0, certain, kept)
  total = (kept + loop.open.scores[:, :, None]).reshape(batch, -1)
  # At most `len(eos)` extensions of each of n hypotheses end, so at least n
  # stay open. The minimum of 2 n is transformers'.
  scores, indices = sampling.top_k(total, max(2, 1 + len(eos)) * beams)
  source, tokens = indices // size, indices % size  # [b, m]
  token_log_probs = jnp.take_along_axis(
    log_probs.reshape(batch, -1), indices, axis=1
  )
  extended = loop.open.take(source)
  return source, Beams(
    tokens=extended.tokens.at[:, :, loop.step].set(tokens),
    log_probs=extended.log_probs.at[:, :, loop.step].set(token_log_probs),
    scores=scores,
    ended=jnp.isin(tokens, eos) | (loop.step + 1 >= loop.limit[:, None]),
    lengths=extended.lengths + 1,
  )


def _finish(loop: _Loop, extended: Beams, length: Float[Array, '']) -> Beams:
  beams = loop.finished.ended.shape[1]
  # Only the n likeliest, as in transformers: the other candidates replace
  # ended hypotheses and may not finish themselves.
  eligible = extended.ended & (jnp.arange(extended.ended.shape[1]) < beams)
  # Finished searches keep their results while others continue.
  excluded = ~eligible | ~loop.improving[:, None]
  ended = extended._replace(
    scores=extended.scores / length + jnp.where(excluded, _NEVER, 0.0),
    ended=eligible,
  )
  merged = jax.tree.map(
    lambda *x: jnp.concatenate(x, axis=1), loop.finished, ended
  )
  return merged.take(sampling.top_k(merged.scores, beams)[1])
