"""Embedding lookup in a table sharded over the vocabulary.

Batch and vocabulary usually share the `fsdp` axis: a device holds some tokens,
and table rows for other devices. There are two ways to exchange them:

- exchange rows: gather the (small) tokens over the shared axes, look them up in
  every device's piece, with zeros elsewhere, and reduce-scatter the rows to the
  tokens' owners; the cost grows with the tokens of all devices;
- exchange the table: gather some columns at a time and look up each device's
  tokens; the cost grows with the table.

Exchanging rows holds the rows of all devices at once. It is chosen, from shapes
alone, if it sends less than a quarter of the bytes of the other way.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import partition


def lookup(
  table: Float[Array, 'V D'],
  tokens: Int[Array, 'B L'],
  dtype: jnp.dtype | type | str | None = None,
) -> Float[Array, 'B L D']:
  """Looks up rows of `table` at `tokens`.

  Args:
    table: embedding table; sharded by ('vocab', 'table_embed').
    tokens: ids in [0, V); other ids give rows of NaN, also on meshes.
    dtype: dtype of the result; by default the table's. Only the rows are cast,
      so gradients accumulate in the table's dtype.

  Returns:
    Embeddings, sharded as ('batch', 'length', 'table_embed').

  Raises:
    ValueError: shapes are not divisible over the mesh.
  """
  dtype = table.dtype if dtype is None else jnp.dtype(dtype)
  active = partition.active()
  if active.size('vocab', 'table_embed') == 1:
    exists = _in_range(tokens, table.shape[0])
    return _take(table, tokens, exists, exists).astype(dtype)
  return jax.shard_map(
    _Lookup(active, table.shape[0], dtype),
    mesh=active.mesh,
    in_specs=(
      active.spec('vocab', 'table_embed'),
      active.spec(*partition.TOKENS),
    ),
    out_specs=active.spec(*partition.TOKENS, 'table_embed'),
  )(table, tokens)


def _in_range(index: jax.Array, rows: int) -> jax.Array:
  return (index >= 0) & (index < rows)


def _take(
  table: jax.Array, index: jax.Array, is_local: jax.Array, exists: jax.Array
) -> jax.Array:
  """Looks up rows of a piece of the table.

  Args:
    table: [rows of the piece, D].
    index: [B, L] rows of the piece, arbitrary where not `is_local`.
    is_local: [B, L] whether the piece has the token's row.
    exists: [B, L] whether any piece has it.

  Returns:
    [B, L, D]: zeros where another piece has the row, NaN where none has.
  """
  # 'fill' leaves no mask [B, L, D] for the backward pass to save.
  index = jnp.where(is_local, index, table.shape[0])
  taken = table.at[index].get(mode='fill', fill_value=0)
  # Adds NaN instead of filling it in, so that sums over pieces keep it.
  return taken + jnp.where(exists, 0.0, jnp.nan).astype(table.dtype)[..., None]


class _Lookup:
  """The lookup of a device, inside `shard_map`.

  Attributes:
    active: the active partition.
    rows: V.
    dtype: dtype of the result.
    vocab: mesh axes of the table's rows.
    shared: mesh axes along which both tokens and rows differ, with the
      dimension of `tokens` each axis shards.
    vocab_only: mesh axes along which rows differ but not tokens.
  """

  def __init__(self, active: partition.Partition, rows: int, dtype: jnp.dtype):
    self.active, self.rows, self.dtype = active, rows, dtype
    self.vocab = active.mesh_axes('vocab')
    self.shared = {
      axis: dimension
      for dimension, name in enumerate(partition.TOKENS)
      for axis in active.common([name], ['vocab'])
    }
    self.vocab_only = active.only(['vocab'], partition.TOKENS)

  def __call__(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up the tokens of this device.

    Args:
      table: [V / vocab shards, D / table_embed shards], this device's piece.
      tokens: [B / batch shards, L / length shards].

    Returns:
      [B / batch shards, L / length shards, D / table_embed shards].
    """
    if self.active.devices(self.shared) == 1:
      return self._sum(self._in_piece(table, tokens))
    # Bytes sent, without the common factors width and number of shards.
    bytes_of_rows = tokens.size * self.dtype.itemsize
    bytes_of_table = table.shape[0] * table.dtype.itemsize
    if 4 * bytes_of_rows > bytes_of_table:
      return self._sum(self._move_table(table, tokens))
    return self._move_rows(table, tokens)

  def _sum(self, x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, self.vocab_only) if self.vocab_only else x

  def _in_piece(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    first = 0
    if self.vocab:
      first = jax.lax.axis_index(self.vocab) * table.shape[0]
    index = tokens - first
    is_local = _in_range(index, table.shape[0])
    exists = _in_range(tokens, self.rows)
    return _take(table, index, is_local, exists).astype(self.dtype)

  def _move_rows(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    shared = self.shared
    # Innermost first, to keep the order of a dimension split by two axes.
    for axis, dimension in reversed(shared.items()):
      tokens = jax.lax.all_gather(tokens, axis, axis=dimension, tiled=True)
    shards = self.active.devices(shared)
    if tokens.shape[0] % shards == 0:
      # The tokens of one device at a time: otherwise the rows of all devices,
      # and in the backward pass their gradients in the table's dtype, would
      # exist at once.
      pieces = tokens.reshape(shards, -1, tokens.shape[1])
      out = jax.lax.map(functools.partial(self._in_piece, table), pieces)
      out = out.reshape(*tokens.shape, table.shape[1])
    else:
      out = self._in_piece(table, tokens)
    out = self._sum(out)
    for axis, dimension in shared.items():
      out = jax.lax.psum_scatter(
        out, axis, scatter_dimension=dimension, tiled=True
      )
    return out

  def _move_table(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    gathered = tuple(a for a in self.vocab if a in self.shared)
    # Decomposes the owner of a token's row into its coordinate on every axis,
    # innermost first.
    owner, coordinates = tokens // table.shape[0], {}
    for axis in reversed(self.vocab):
      size = self.active.mesh.shape[axis]
      coordinates[axis], owner = owner % size, owner // size
    is_local = exists = _in_range(tokens, self.rows)
    for axis in self.vocab_only:
      is_local &= coordinates[axis] == jax.lax.axis_index(axis)
    # The gather excludes the axes in `vocab_only`, so rows get new indices.
    index = 0
    for axis in gathered:
      index = index * self.active.mesh.shape[axis] + coordinates[axis]
    index = index * table.shape[0] + tokens % table.shape[0]

    def take(columns):
      rows = jax.lax.all_gather(columns, gathered, axis=0, tiled=True)
      return _take(rows, index, is_local, exists).astype(self.dtype)

    count = _parts(table, self.active.devices(gathered))
    columns = table.reshape(table.shape[0], count, -1).swapaxes(0, 1)
    out = jax.lax.map(take, columns)  # [parts, B, L, D / parts]
    return jnp.moveaxis(out, 0, 2).reshape(*tokens.shape, table.shape[1])


def _parts(table: jax.Array, shards: int) -> int:
  """Returns the number of column parts in which a table is gathered.

  The smallest number for which a gathered part is at most 128 MiB.
  """
  size, width = shards * table.size * table.dtype.itemsize, table.shape[1]
  fits = (
    n for n in range(1, width + 1) if width % n == 0 and size <= n * 2**27
  )
  return next(fits, width)
