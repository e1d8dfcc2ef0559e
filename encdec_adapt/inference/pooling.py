"""Embeddings of texts: vectors of an embedding model, or pooled states.

The states are those of an encoder after its final norm. Needs neither the
engine nor a cache: nothing is generated.
"""

from collections.abc import Iterator, Sequence
import functools

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.inference import lengths
from encdec_adapt.models import base_model, build, embedding_head, heads
from encdec_adapt.ops import partition
from encdec_adapt.sharding import rules as rules_lib

POOLINGS = heads.POOLINGS


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
  """Embeds texts, long ones first.

  Args:
    model: an embedding model, an encoder-decoder or an encoder-only model.
    params: its parameters.
    texts: token ids of each, BOS first.
    mesh: mesh of the parameters.
    rules: meaning of logical axes on it.
    pooling: one of `POOLINGS`; None for that of the embedding model, or else
      'mean'.
    rows: texts at a time.

  Yields:
    Index of a text and its embedding, float32.

  Raises:
    UserError: the model has no encoder, or there is no such pooling.
  """
  head = model.config.decoder.head
  trained = head.pooling if isinstance(head, heads.Embedding) else ''
  pooling = pooling or trained or 'mean'
  if trained and trained != pooling:
    raise errors.UserError(
      f'pooling is {pooling!r}, and the embedding model pools by'
      f' {trained!r}; leave it out.'
    )
  if pooling not in POOLINGS:
    raise errors.UserError(
      f'pooling is {pooling!r}; it must be {" or ".join(POOLINGS)}.'
    )
  model.architecture.require_encoder()
  # By length: the texts of a batch are padded to its longest. The longest come
  # first, so that a batch that does not fit into memory fails at once.
  order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
  for start in range(0, len(order), rows):
    chosen = order[start : start + rows]
    tokens, counts = lengths.pad([texts[i] for i in chosen], rows)
    states = _pool(model, mesh, rules, pooling, params, tokens, counts)
    states = jax.device_get(states)
    # The last batch is filled up with rows of padding, which have no text.
    yield from zip(chosen, states, strict=False)


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
    positions, real = lengths.frame(tokens, counts)
    states = model.architecture.encode(model, params, (tokens, real, positions))
    pooled = embedding_head.pool(states, real, 1, pooling)[:, 0]
    if isinstance(head := model.config.decoder.head, heads.Embedding):
      pooled = embedding_head.project(head, params['decoder'], pooled)
    return partition.shard(pooled, None, None)  # Every process reads it.
