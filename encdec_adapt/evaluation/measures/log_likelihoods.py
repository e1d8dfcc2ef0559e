"""Log-likelihoods of continuations, the base of all likelihood tasks.

An encoder-decoder reads the context with its encoder and the continuation with
its decoder, after BOS; a decoder-only model reads both, a prefix decoder the
context from both sides. EOS is not scored. Requests are scored from the longest
on, in batches that are padded to a few lengths (`inference.lengths`); the
encoder reads a context once for all its continuations in a batch.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory
from encdec_adapt.inference import lengths
from encdec_adapt.ops import partition
from encdec_adapt.training import state as state_lib

# Continuation tokens whose logits are in memory at once, per row.
_CHUNK = 16


class Pair(NamedTuple):
  """Token ids of a context, BOS first, and of its continuation."""

  context: Sequence[int]
  continuation: Sequence[int]


class Scored(NamedTuple):
  """Score of a continuation.

  Attributes:
    log_prob: sum of the natural log-probabilities of its tokens.
    greedy: whether greedy decoding gives the continuation.
  """

  log_prob: float
  greedy: bool


class Batch(NamedTuple):
  """A padded batch.

  Attributes:
    encoder: tokens of the contexts, each once, where an encoder reads them.
    encoder_counts: number of them per context.
    contexts: index of each row's context.
    decoder: tokens that the decoder reads.
    prefix_counts: number of the decoder's tokens that are context.
    targets: tokens of the continuations.
    counts: number of them per row.
  """

  encoder: Int[Array, 'c S']
  encoder_counts: Int[Array, 'c']
  contexts: Int[Array, 'B']
  decoder: Int[Array, 'B T']
  prefix_counts: Int[Array, 'B']
  targets: Int[Array, 'B n']
  counts: Int[Array, 'B']


def score(
  loaded: model_in_memory.LoadedModel,
  pairs: Sequence[Pair],
  *,
  batch_size: int = 8,
  bos: int,
) -> Iterator[tuple[int, Scored]]:
  """Scores continuations and yields them with their index, long ones first.

  Args:
    loaded: a model with a decoder.
    pairs: contexts and continuations, neither empty.
    batch_size: rows of a batch, rounded up to divide over the devices.
    bos: first token of an encoder-decoder's decoder.

  Raises:
    UserError: the model is encoder-only, or a side is empty.
  """
  if not loaded.config.architecture.generates:
    raise errors.UserError(
      'an encoder-only model predicts masked tokens and scores no'
      ' continuations; use a decoder or an encoder-decoder.'
    )
  for pair in pairs:
    if not len(pair.context) or not len(pair.continuation):
      raise errors.UserError(
        f'nothing to score: {len(pair.context)} tokens of context and'
        f' {len(pair.continuation)} of continuation; both need one.'
      )
  rows = loaded.rows(batch_size)

  def sort_key(i: int) -> tuple[int, ...]:
    """Returns the sort key of a pair: those of one context are adjacent."""
    context, continuation = pairs[i]
    # Hashes of integers are the same in all processes.
    return -len(context), hash(tuple(context)), -len(continuation)

  order = sorted(range(len(pairs)), key=sort_key)
  for start in range(0, len(order), rows):
    chosen = order[start : start + rows]
    batch = _frame(loaded, [pairs[i] for i in chosen], rows, bos)
    sums, greedy = jax.device_get(_score(loaded.where, loaded.params, batch))
    for row, i in enumerate(chosen):
      yield i, Scored(float(sums[row]), bool(greedy[row]))


def _frame(
  loaded: model_in_memory.LoadedModel,
  pairs: Sequence[Pair],
  rows: int,
  bos: int,
) -> Batch:
  """Pads pairs to a batch, and its contexts to a power of two of them."""
  targets, counts = lengths.pad([pair.continuation for pair in pairs], rows)
  fill = [0] * (rows - len(pairs))
  framed = [loaded.config.architecture.frame(*pair, bos) for pair in pairs]
  # Without encoder all rows share the one context without tokens.
  numbers: dict[tuple[int, ...], int] = {}
  owners = [numbers.setdefault(row.source, len(numbers)) for row in framed]
  count = min(rows, loaded.rows(1 << (len(numbers) - 1).bit_length()))
  return Batch(
    *lengths.pad(list(numbers), count),
    np.array(owners + fill, np.int32),
    lengths.pad([row.tokens for row in framed], rows)[0],
    np.array([row.prefix for row in framed] + fill, np.int32),
    targets,
    counts,
  )


@functools.partial(jax.jit, static_argnums=0)
def _score(
  place: state_lib.Placement,
  params: Any,
  batch: Batch,
) -> tuple[Float[Array, 'B'], Bool[Array, 'B']]:
  """Returns the log-probability of each continuation, and whether greedy."""
  model = place.model
  with partition.use(place.mesh, place.rules.as_dict()):
    where, real = lengths.frame(batch.encoder, batch.encoder_counts)
    source = model.architecture.source(
      model, params, (batch.encoder, real, where)
    )
    inputs = [x[batch.contexts] for x in source]
    # The decoder's position that predicts the first token.
    first = jnp.maximum(batch.prefix_counts - 1, 0)
    where, real = lengths.frame(batch.decoder, first + batch.counts)
    _, prefix = lengths.frame(batch.decoder, batch.prefix_counts)
    hidden = model.decode(
      params, batch.decoder, real, where, *inputs, prefix=prefix
    )
    width = batch.targets.shape[1]
    places = jnp.minimum(
      first[:, None] + jnp.arange(width), hidden.shape[1] - 1
    )
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    real = jnp.arange(width) < batch.counts[:, None]

    def add_chunk(
      sums: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
      """Adds a chunk of tokens: hidden [B, c, D], targets and real [B, c]."""
      total, greedy = sums
      states, targets, counts = chunk
      logits = model.logits(params, states)
      chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[..., 0]
      log_probs = chosen - jax.nn.logsumexp(logits, axis=2)
      is_best = jnp.argmax(logits, axis=2) == targets
      total += jnp.sum(jnp.where(counts, log_probs, 0), axis=1)
      return (total, greedy & jnp.all(is_best | ~counts, axis=1)), None

    def chunks(x: jax.Array) -> jax.Array:
      """[B, n, ...] -> [n / c, B, c, ...]."""
      return jnp.moveaxis(
        x.reshape(len(x), width // _CHUNK, _CHUNK, *x.shape[2:]), 1, 0
      )

    start = jnp.zeros(len(real), jnp.float32), jnp.ones(len(real), bool)
    (total, greedy), _ = jax.lax.scan(
      add_chunk, start, (chunks(hidden), chunks(batch.targets), chunks(real))
    )
    return partition.shard(total, None), partition.shard(greedy, None)
