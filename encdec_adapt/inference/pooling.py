"""Embeddings and labels of texts.

Embeddings are outputs of an embedding model, or pooled encoder states, after
the encoder's final norm. Uses neither engine nor KV cache.
"""

from collections.abc import Callable, Iterator, Sequence
import functools

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
import numpy as np

from encdec_adapt.inference import lengths, row_batches
from encdec_adapt.models import base_model, build, embedding_head, heads
from encdec_adapt.ops import partition
from encdec_adapt.sharding import rules as rules_lib


def embed(
  model: build.Model,
  params: base_model.Params,
  texts: Sequence[Int[np.ndarray, 'n']],
  *,
  mesh: Mesh,
  rules: rules_lib.Rules,
  pooling: str | None,
  rows: int,
) -> Iterator[tuple[int, Float[np.ndarray, 'E']]]:
  """Embeds texts, longest first.

  Args:
    model: an embedding model, an encoder-decoder or an encoder-only model.
    params: its parameters.
    texts: token ids of each text, BOS first.
    mesh: mesh of the parameters.
    rules: logical axis rules.
    pooling: one of `heads.POOLINGS`; None for the embedding model's, or else
      'mean'.
    rows: batch size.

  Yields:
    Index of a text and its embedding, float32.

  Raises:
    UserError: the model has no encoder, or the pooling is unknown or differs
      from the embedding model's.
  """
  pooling = heads.resolve_pooling(model.config.decoder.head, pooling)
  model.architecture.require_encoder()
  for text in texts:
    model.config.prompt_reader.passages.require_fits(text)
  fn = functools.partial(_pool, model, mesh, rules, pooling, params)
  yield from _in_batches(fn, texts, rows)


def classify(
  model: build.Model,
  params: base_model.Params,
  texts: Sequence[Int[np.ndarray, 'n']],
  *,
  mesh: Mesh,
  rules: rules_lib.Rules,
  tail: int,
  rows: int,
) -> Iterator[tuple[int, Int[np.ndarray, '']]]:
  """Classifies texts, longest first.

  Args:
    model: a classifier of texts.
    params: parameters of the model.
    texts: token ids of each text with their framing.
    mesh: mesh of the parameters.
    rules: logical axis rules.
    tail: number of ids that the framing puts behind a text.
    rows: batch size.

  Yields:
    Index of a text, and the number of its label.
  """
  fn = functools.partial(_classify, model, mesh, rules, tail, params)
  yield from _in_batches(fn, texts, rows)


def _in_batches(
  fn: Callable[..., jax.Array],
  texts: Sequence[Int[np.ndarray, 'n']],
  rows: int,
) -> Iterator[tuple[int, np.ndarray]]:
  # Sorted by length to reduce padding. The longest come first, so running out
  # of memory fails early.
  order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))

  def run(chosen: Sequence[int]) -> jax.Array:
    return fn(*lengths.pad([texts[i] for i in chosen], rows))

  yield from row_batches.outputs(run, order, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _pool(
  model: build.Model,
  mesh: Mesh,
  rules: rules_lib.Rules,
  pooling: str,
  params: base_model.Params,
  tokens: Int[Array, 'B S'],
  counts: Int[Array, 'B'],
) -> Float[Array, 'B E']:
  with partition.use(mesh, rules.as_dict()):
    positions, real = lengths.positions_and_mask(tokens, counts)
    states = model.architecture.encode(model, params, (tokens, real, positions))
    # An encoder of a pair has no head of embeddings.
    vectors = embedding_head.vectors(
      model.config.decoder.head, params['decoder'], states, real, 1, pooling
    )[:, 0]
    return partition.shard(vectors, None, None)  # Every process reads it.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _classify(
  model: build.Model,
  mesh: Mesh,
  rules: rules_lib.Rules,
  tail: int,
  params: base_model.Params,
  tokens: Int[Array, 'B S'],
  counts: Int[Array, 'B'],
) -> Int[Array, 'B']:
  with partition.use(mesh, rules.as_dict()):
    positions, real = lengths.positions_and_mask(tokens, counts)
    text = {'tokens': tokens, 'segments': real, 'positions': positions}
    batch = {f'encoder_{name}': x for name, x in text.items()}
    states = model.architecture.predict(model, params, batch)
    # Rows of padding have no last token.
    last = jnp.maximum(counts - tail - 1, 0)[:, None, None]
    states = jnp.take_along_axis(states, last, axis=1)
    labels = jnp.argmax(model.logits(params, states)[:, 0], axis=-1)
    return partition.shard(labels, None)
