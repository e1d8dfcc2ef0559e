"""Log-likelihoods of continuations, the base of all likelihood tasks.

An encoder-decoder reads the context with its encoder and the continuation with
its decoder, after BOS and the opening of targets; a decoder-only model reads
both, a prefix LM with bidirectional attention over the context. EOS and the
opening, which generation may force, are not scored. Requests are scored in
descending order of length, in batches padded to a few lengths
(`inference.lengths`); the encoder reads a context once for all its
continuations in a batch. Uses neither engine nor KV cache.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import lengths, row_batches
from encdec_adapt.models import base_model, build
from encdec_adapt.ops import attention_chunked, partition
from encdec_adapt.sharding import rules as rules_lib

# Continuation tokens per row with logits in memory at once: 16 MiB for a
# vocabulary of 256 k. All length buckets are multiples of it.
_CHUNK = 16


class Pair(NamedTuple):
  """Token ids of a framed context, and of its continuation."""

  context: Sequence[int]
  continuation: Sequence[int]


class Scored(NamedTuple):
  """Score of a continuation.

  Attributes:
    log_prob: sum of the tokens' log-probabilities.
    greedy: whether greedy decoding yields the continuation.
  """

  log_prob: float
  greedy: bool


class Batch(NamedTuple):
  """A padded batch.

  Attributes:
    encoder: encoder tokens: the distinct contexts.
    encoder_counts: number of tokens per context.
    contexts: index of each row's context.
    decoder: decoder input tokens.
    prefix_counts: number of context tokens in the decoder's input.
    firsts: decoder position that predicts each continuation's first token.
    targets: tokens of the continuations.
    counts: number of tokens per continuation.
  """

  encoder: Int[Array, 'c S']
  encoder_counts: Int[Array, 'c']
  contexts: Int[Array, 'B']
  decoder: Int[Array, 'B T']
  prefix_counts: Int[Array, 'B']
  firsts: Int[Array, 'B']
  targets: Int[Array, 'B n']
  counts: Int[Array, 'B']


def score(
  model: build.Model,
  params: base_model.Params,
  pairs: Sequence[Pair],
  *,
  mesh: Mesh,
  rules: rules_lib.Rules,
  rows: int,
  start: Sequence[int],
) -> Iterator[tuple[int, Scored]]:
  """Scores continuations and yields scores by index, longest contexts first.

  Args:
    model: a model with a decoder.
    params: parameters of the model.
    pairs: contexts and continuations, neither empty.
    mesh: mesh of the parameters.
    rules: logical axis rules.
    rows: batch size, divisible by the batch shards.
    start: BOS of an encoder-decoder's decoder, and the opening of targets.

  Raises:
    UserError: the model predicts no next tokens, or a side is empty.
  """
  model.architecture.require_generation('the model', 'use a language model')
  for pair in pairs:
    if not len(pair.context) or not len(pair.continuation):
      raise errors.UserError(
        f'nothing to score: {len(pair.context)} tokens of context and'
        f' {len(pair.continuation)} of continuation; both need one.'
      )
    model.config.prompt_reader.passages.require_fits(pair.context)
  shards = rules.on(mesh).size('batch')

  def sort_key(i: int) -> tuple[int, ...]:
    context, continuation = pairs[i]
    # Batches similar lengths, to save padding, and equal contexts, which the
    # encoder reads once. All processes must form the same batches: hashes of
    # integers do not depend on the process.
    return -len(context), hash(tuple(context)), -len(continuation)

  def run(chosen: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    batch = _frame(model, [pairs[i] for i in chosen], rows, shards, start)
    return _score(model, mesh, rules, params, batch)

  order = sorted(range(len(pairs)), key=sort_key)
  for i, (total, greedy) in row_batches.outputs(run, order, rows):
    yield i, Scored(float(total), bool(greedy))


def _frame(
  model: build.Model,
  pairs: Sequence[Pair],
  rows: int,
  shards: int,
  start: Sequence[int],
) -> Batch:
  bos, *opening = start
  targets, counts = lengths.pad([pair.continuation for pair in pairs], rows)
  fill = [0] * (rows - len(pairs))
  framed = [
    model.architecture.scoring_input(
      x.context, [*opening, *x.continuation], bos
    )
    for x in pairs
  ]
  firsts = [max(row.prefix - 1, 0) + len(opening) for row in framed]
  # Without an encoder all rows share an empty context.
  numbers: dict[tuple[int, ...], int] = {}
  owners = [numbers.setdefault(row.source, len(numbers)) for row in framed]
  # Powers of two limit the shapes to compile.
  count = 1 << (len(numbers) - 1).bit_length()
  count = min(rows, -(-count // shards) * shards)
  return Batch(
    *lengths.pad(list(numbers), count),
    np.array(owners + fill, np.int32),
    lengths.pad([row.tokens for row in framed], rows)[0],
    np.array([row.prefix for row in framed] + fill, np.int32),
    np.array(firsts + fill, np.int32),
    targets,
    counts,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
  model: build.Model,
  mesh: Mesh,
  rules: rules_lib.Rules,
  params: base_model.Params,
  batch: Batch,
) -> tuple[Float[Array, 'B'], Bool[Array, 'B']]:
  """Returns each continuation's log-probability and whether it is greedy."""
  with partition.use(mesh, rules.as_dict()):
    positions, segments = lengths.positions_and_mask(
      batch.encoder, batch.encoder_counts
    )
    source = model.architecture.source(
      model, params, (batch.encoder, segments, positions)
    )
    # Copies encoder states to the rows of a context, which is read only once.
    inputs = [x[batch.contexts] for x in source]
    positions, segments = lengths.positions_and_mask(
      batch.decoder, batch.firsts + batch.counts
    )
    _, prefix = lengths.positions_and_mask(batch.decoder, batch.prefix_counts)
    hidden = model.decode(
      params, batch.decoder, segments, positions, *inputs, prefix=prefix
    )
    width = batch.targets.shape[1]
    # Padded targets would exceed the row; `real` masks them.
    indices = jnp.minimum(
      batch.firsts[:, None] + jnp.arange(width), hidden.shape[1] - 1
    )
    hidden = jnp.take_along_axis(hidden, indices[:, :, None], axis=1)
    real = jnp.arange(width) < batch.counts[:, None]

    def add_chunk(sums, chunk):
      total, greedy = sums
      states, targets, is_token = chunk  # [B, c, D], [B, c], [B, c]
      logits = model.logits(params, states)
      chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[..., 0]
      log_probs = chosen - jax.nn.logsumexp(logits, axis=2)
      is_best = jnp.argmax(logits, axis=2) == targets
      total += jnp.sum(jnp.where(is_token, log_probs, 0), axis=1)
      return (total, greedy & jnp.all(is_best | ~is_token, axis=1)), None

    chunks = [
      attention_chunked.split_queries(x, _CHUNK)
      for x in (hidden, batch.targets, real)
    ]
    start = jnp.zeros(len(real), jnp.float32), jnp.ones(len(real), bool)
    (total, greedy), _ = jax.lax.scan(add_chunk, start, chunks)
    # Replicated: every process yields the scores of all rows.
    return partition.shard(total, None), partition.shard(greedy, None)
