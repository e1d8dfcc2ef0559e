"""Attention without kernels, by blocks of queries and tiles of keys.

The queries of a row are split into blocks and its keys into tiles. A pair of a
block and a tile is computed only if some query sees some key: tiles with only
keys of other examples, later keys or keys outside the window are skipped. The
scores of a single pair are in memory at a time.

`attention_chunked` and `attention_gradients` build on this module. They run
inside `attention_shards.run`: a loop over sharded rows would gather them.
"""

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from encdec_adapt.ops import activations, masks, products, relative_bias

# Loop over the pairs of a row. 'while' takes one turn per pair with work, a
# number that depends on the data: XLA:GPU reads the condition on the host once
# per turn, and once more per row. 'cond' takes a turn for every pair and skips
# pairs without work: XLA:GPU also reads each predicate on the host. So 'while'
# waits less if more than one pair of a row has no work: 5 times per row against
# 16, for 8 examples of 512 tokens in tiles of 1024.
# `tests.benchmarks.gpu_kernels` measures both; the slower loop will be removed.
LOOP = 'while'
# Below every score, and far enough from the largest fp32 number that
# differences stay finite.
_HIDDEN = -1e30
# Maximum of no scores: above hidden scores, so that their exponentials are 0.
LOWEST = _HIDDEN / 2
_OF_QUERIES = 'q_segments', 'q_positions'
_OF_KEYS = 'kv_segments', 'kv_positions', 'kv_prefix'


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Attention computed pair by pair.

  Letters besides the package's: Q = G * queries of a block, W keys of a tile.

  Attributes:
    size: maximum queries of a block, and maximum keys of a tile.
    scale: factor of the scores, applied before the soft-cap.
    softcap: positive cap of the scores; None for no cap.
  """

  size: int
  scale: float
  softcap: float | None

  def cut(
    self, x: Float[Array, 'B L N H'], kv_heads: int
  ) -> Float[Array, 'B parts K Q H']:
    """Splits an array of queries into blocks, or of keys into tiles."""
    x = split(x, self.size)
    x = x.reshape(*x.shape[:3], kv_heads, -1, x.shape[4])
    x = x.transpose(0, 1, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], -1, x.shape[5])

  def join(
    self, x: Float[Array, 'B parts K Q H'], length: int, heads: int
  ) -> Float[Array, 'B L N H']:
    """Inverts `cut`: returns [.., L = length, N = heads, ..]."""
    x = x.reshape(*x.shape[:3], heads // x.shape[2], -1, x.shape[4])
    x = x.transpose(0, 1, 4, 2, 3, 5)
    return x.reshape(x.shape[0], -1, heads, x.shape[5])[:, :length]

  def work(self, spec: masks.MaskSpec) -> Bool[Array, 'B blocks tiles']:
    """Returns the pairs in which a query sees a key."""

    def of_block(arrays):
      visible = masks.dense_mask(spec.replace(**arrays))
      return jnp.any(split(jnp.any(visible, 1), self.size), 2)  # [B, tiles]

    # Block by block: compilers may store a mask before they reduce it.
    blocks = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0), _split(spec, _OF_QUERIES, self.size)
    )
    return jnp.moveaxis(jax.lax.map(of_block, blocks), 0, 1)

  def accumulate(
    self,
    add: Callable[..., Any],
    finish: Callable[..., Any],
    blocks: Any,
    tiles: Any,
    sums: tuple[Any, Any, Any],
    spec: masks.MaskSpec,
  ) -> Any:
    """Sums over the pairs with work, row by row.

    A turn updates its parts of the sums in place; under `vmap` it would copy
    the sums of all rows.

    Args:
      add: adds a pair to the sums of the block, the tile and the row, and
        returns them. Its arguments are the arrays of the block and of the tile
        [1, ..], the mask of the pair, dense [1, size, W] and as data, and the
        sums.
      finish: computes a row's results from its sums.
      blocks: arrays [B, blocks, ..].
      tiles: arrays [B, tiles, ..].
      sums: initial sums of a row: [blocks, ..], [tiles, ..] and [..].
      spec: the mask.

    Returns:
      The results of all rows.
    """
    work = self.work(spec)
    rows, per_query, per_key = work.shape
    pairs = per_query * per_key
    # Keep all rows together: a turn slices its pair's arrays and copies no row.
    blocks, tiles = jax.tree.map(
      lambda x: x.reshape(-1, *x.shape[2:]),
      (
        (blocks, _split(spec, _OF_QUERIES, self.size)),
        (tiles, _split(spec, _OF_KEYS, self.size)),
      ),
    )

    def row(arrays):
      row, work = arrays
      order = jnp.argsort(~work, stable=True)

      def turn(n, sums):
        pair = order[n] if LOOP == 'while' else n
        i, j = jax.lax.div(pair, per_key), jax.lax.rem(pair, per_key)

        def added(sums):
          block, q_mask = _take(blocks, row * per_query + i)
          tile, kv_mask = _take(tiles, row * per_key + j)
          mask = self._mask(spec, q_mask | kv_mask, i, j)
          return add(block, tile, *mask, sums)

        parts = _take(sums[0], i), _take(sums[1], j), sums[2]
        if LOOP == 'while':
          parts = added(parts)
        else:
          parts = jax.lax.cond(work[pair], added, lambda x: x, parts)
        return _put(sums[0], parts[0], i), _put(sums[1], parts[1], j), parts[2]

      turns = jnp.sum(work) if LOOP == 'while' else pairs
      # `planner.hlo` reads the maximum number of turns from the name.
      with jax.named_scope(f'at_most_{pairs}_turns'):
        return finish(*jax.lax.fori_loop(0, turns, turn, sums))

    return jax.lax.map(row, (jnp.arange(rows), work.reshape(rows, pairs)))

  def _mask(self, spec, arrays, block, tile):
    keys = spec.kv_segments.shape[1]
    size, width = (arrays[x].shape[1] for x in ('q_segments', 'kv_segments'))
    part = spec.replace(aligned=False, memory=0, **arrays)
    if spec.first_query is not None:
      part = part.replace(offset=spec.first_query + block * size - tile * width)
    visible = masks.dense_mask(part)
    if spec.memory:
      is_memory = tile * width + jnp.arange(width) >= keys - spec.memory
      anywhere = part.replace(kind='full', window=None)
      visible |= is_memory & masks.dense_mask(anywhere)
    return visible, part

  def scores(
    self,
    q: Float[Array, '1 K Q H'],
    k: Float[Array, '1 W K H'],
    visible: Bool[Array, '1 size W'],
    part: masks.MaskSpec,
    bias: relative_bias.RelativeBias | None,
  ) -> tuple[Float[Array, '1 K Q W'], Any]:
    """Returns the scores of a pair and their derivative in the products."""
    scores, slope = products.scores(q, k) * self.scale, 1.0
    if self.softcap is not None:
      scores = activations.softcap(scores, self.softcap)
      slope = 1 - (scores / self.softcap) ** 2
    by_head = scores.reshape(-1, *visible.shape[1:])  # [N, size, W]
    if bias is not None:
      by_head += relative_bias.scores(bias, part)[0]
    return jnp.where(visible, by_head, _HIDDEN).reshape(scores.shape), slope


def even(length: int, most: int) -> int:
  """Returns the size of equal parts of a length, at most `most`."""
  return -(-length // -(-length // most))


def split(x: Array, most: int) -> Array:
  """Splits [B, L, ..] into equal parts [B, parts, size, ..], padded with zeros.

  Padding has segment 0, so it neither sees nor is seen.
  """
  size = even(x.shape[1], most)
  x = masks.pad_length(x, size)
  return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _split(spec: masks.MaskSpec, names: Iterable[str], most: int) -> Any:
  arrays = {name: getattr(spec, name) for name in names}
  return jax.tree.map(lambda x: split(x, most), arrays)


def _take(arrays: Any, index: jax.Array) -> Any:
  """Slices part [1, ..] from arrays [parts, ..]."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1), arrays
  )


def _put(arrays: Any, parts: Any, index: jax.Array) -> Any:
  return jax.tree.map(
    lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, index, 0),
    arrays,
    parts,
  )
