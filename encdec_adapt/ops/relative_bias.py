"""Positions of a stack, and the relative bias of T5 (arXiv:1910.10683, 2.1).

A learned scalar per head and bucket of distances is added to the scores. It is
computed from positions for the current queries, so chunked attention never
materialises a [T, S] array.
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.base import errors, keys
from encdec_adapt.ops import masks, products

KINDS = ('rotary', 'relative', 'relative_each', 'learned')


@dataclasses.dataclass(frozen=True)
class Positions:
  """Positions in self-attention; keys of `config.model.encoder.positions`."""

  kind: str = keys.key(
    'rotary',
    "Positions in self-attention: 'rotary'; or a bias of the scores by buckets"
    " of distances, 'relative', one table for all layers (T5), or"
    " 'relative_each', a table for each (UMT5); or 'learned', a vector for each"
    " position, added to the embeddings (GPT-2). A relative stack has T5's"
    ' initial values.',
    one_of=KINDS,
  )
  buckets: int = keys.key(
    32,
    'Buckets of distances, even; a bidirectional stack has half of them for'
    ' keys ahead.',
    at_least=4,
  )
  distance: int = keys.key(
    128, 'Distance from which on all are in the last bucket.', at_least=1
  )
  rows: int = keys.key(
    0, "'learned': vectors of positions, at least 1.", at_least=0
  )
  offset: int = keys.key(
    0, "'learned': vectors before that of position 0 (RoBERTa: 2).", at_least=0
  )

  def __post_init__(self):
    keys.check(self, 'positions.')
    is_learned = self.kind == 'learned'
    if self.rows <= self.offset if is_learned else self.rows + self.offset:
      raise errors.UserError(
        f'positions.rows is {self.rows} and positions.offset {self.offset} with'
        f' positions.kind {self.kind!r}; set rows to the longest row plus the'
        " offset with 'learned', else both to 0."
      )
    if self.buckets % 2 or self.distance <= self.buckets // 2:
      raise errors.UserError(
        f'positions.buckets is {self.buckets} and positions.distance'
        f' {self.distance}; the buckets must be even, and the distance above'
        ' half of them.'
      )

  @property
  def limit(self) -> int | float:
    """Number of positions that can be read; infinity unless learned."""
    return self.rows - self.offset if self.rows else math.inf


@flax.struct.dataclass
class RelativeBias:
  """Relative position bias of a layer.

  Attributes:
    table: [N, buckets] float32.
    distance: as in `Positions`.
  """

  # Any: tree maps put specs and rows' gradients in the place of the array.
  table: Any
  distance: int = flax.struct.field(pytree_node=False)


def first_distances(buckets: int, distance: int) -> list[int]:
  """Returns the smallest distance of every bucket except the first.

  Half of the buckets hold a single distance; the others have equal widths in
  log-distance. Computed on the host, so that devices cannot round a logarithm
  across a bucket's edge.

  Args:
    buckets: buckets per direction.
    distance: as in `Positions`.
  """
  exact = buckets // 2
  wide, ratio = buckets - exact, distance / exact
  # Integer powers must not be rounded up.
  powers = [exact * ratio ** (i / wide) - 1e-9 for i in range(1, wide)]
  return [*range(1, exact + 1), *map(math.ceil, powers)]


def bucket(
  ahead: Int[Array, '*L'], buckets: int, distance: int, *, bidirectional: bool
) -> Int[Array, '*L']:
  """Returns the bucket of each distance.

  Args:
    ahead: key position minus query position.
    buckets: as in `Positions`.
    distance: as in `Positions`.
    bidirectional: whether later keys have the second half of the buckets;
      otherwise they are in bucket 0.
  """
  side = buckets // 2 if bidirectional else buckets
  far = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
  edges = jnp.asarray(first_distances(side, distance), jnp.int32)
  number = jnp.sum(far[..., None] >= edges, axis=-1, dtype=jnp.int32)
  return number + side * (ahead > 0) if bidirectional else number


def scores(
  bias: RelativeBias, spec: masks.MaskSpec
) -> Float[Array, '#B N T S']:
  """Computes the bias of the scores of self-attention.

  Rows of consecutive tokens share one result, computed from indices: within a
  segment indices differ by as much as positions, and the mask hides other
  segments.

  Args:
    bias: the table.
    spec: the mask; kind 'full' has bidirectional buckets.
  """

  def read(ahead: Int[Array, '*L']) -> Float[Array, '*L N']:
    """Looks up the values of distances with a matmul.

    On GPUs the gradient of indexing is summed in no fixed order, so a resumed
    run would differ.
    """
    buckets = bias.table.shape[1]
    numbers = bucket(
      ahead, buckets, bias.distance, bidirectional=spec.kind == 'full'
    )
    return jnp.matmul(
      jax.nn.one_hot(numbers, buckets, dtype=jnp.float32),
      bias.table.astype(jnp.float32).T,
      precision=jax.lax.Precision.HIGHEST,
    )

  if spec.first_query is None:
    ahead = spec.kv_positions[:, None, :] - spec.q_positions[:, :, None]
    return jnp.moveaxis(read(ahead), -1, 1)
  # The ring holds the values of the T + S - 1 distances: key s and query t read
  # slot (s - t) modulo its size. Concatenated copies of the ring, reshaped to
  # rows shorter by 1, shift by 1 per query.
  queries, keys = spec.q_segments.shape[1], spec.kv_segments.shape[1]
  size = queries + keys
  slot = jnp.arange(size)
  ahead = jnp.where(slot < keys, slot, slot - size)
  rings = read(ahead - spec.first_query).T  # [N, T + S]

  def of_head(ring):
    rows = jnp.broadcast_to(ring, (queries, size)).reshape(-1)
    rows = rows[: queries * (size - 1)].reshape(queries, size - 1)
    return rows[:, :keys]

  # XLA:CPU would fuse this indexing into the softmax and not vectorise its
  # exponentials; it fuses nothing into a loop.
  each = jax.lax.map if products.on_cpu() else jax.vmap
  return each(of_head, rings)[None]
