"""Embedding lookup in a table that is sharded over the vocabulary.

Batch and vocabulary usually share the `fsdp` axis: a device holds some tokens,
and table rows that other devices need. There are two ways to exchange them:

- rows travel: tokens (small) are gathered over the shared axes, every device
  looks all of them up in its piece, zeros elsewhere, and a reduction scatters
  the rows to the tokens' owners; in proportion to the tokens of all devices;
- the table travels, some columns at a time, and every device looks its own
  tokens up; in proportion to the table.

The first holds the rows of all devices at once. It is chosen, from shapes
alone, where it sends less than a quarter of the bytes of the second.
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
    tokens: ids in [0, V); any other id gives a row of NaN, on one device and
      on meshes.
    dtype: dtype of the result, that of the table where None. The rows are
      cast, not the table, so gradients add up in the table's dtype.

  Returns:
    Embeddings, sharded as ('batch', 'length', 'table_embed').

  Raises:
    ValueError: shapes do not divide over the mesh.
  """
  dtype = table.dtype if dtype is None else jnp.dtype(dtype)
  active = partition.active()
  if active.size('vocab', 'table_embed') == 1:
    exists = (tokens >= 0) & (tokens < table.shape[0])
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


def _take(
  table: jax.Array, index: jax.Array, here: jax.Array, exists: jax.Array
) -> jax.Array:
  """Rows of a piece of the table.

  Args:
    table: [rows of the piece, D].
    index: [B, L] rows of the piece, anything where not `here`.
    here: [B, L] whether the piece has the token's row.
    exists: [B, L] whether any piece has it.

  Returns:
    [B, L, D]: zeros where another piece has the row, NaN where none has.
  """
  # What is filled in leaves no mask [B, L, D] for the backward pass to keep.
  index = jnp.where(here, index, table.shape[0])
  taken = table.at[index].get(mode='fill', fill_value=0)
  return taken + jnp.where(exists, 0.0, jnp.nan).astype(table.dtype)[..., None]


class _Lookup:
  """What one device does inside `shard_map`.

  Attributes:
    active: the active partition.
    rows: V.
    dtype: dtype of the result.
    vocab: mesh axes that shard the table's rows.
    shared: mesh axes along which devices hold other tokens and other rows,
      each with the dimension of `tokens` that it shards.
    alone: mesh axes along which devices hold other rows but the same tokens.
  """

  def __init__(self, active: partition.Partition, rows: int, dtype: jnp.dtype):
    self.active, self.rows, self.dtype = active, rows, dtype
    self.vocab = active.mesh_axes('vocab')
    self.shared = {
      axis: dimension
      for dimension, name in enumerate(partition.TOKENS)
      for axis in active.common([name], ['vocab'])
    }
    self.alone = active.only(['vocab'], partition.TOKENS)

  def __call__(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks this device's tokens up.

    Args:
      table: [V / vocab shards, D / table_embed shards], this device's piece.
      tokens: [B / batch shards, L / length shards].

    Returns:
      [B / batch shards, L / length shards, D / table_embed shards].
    """
    shards = self.active.devices(self.shared)
    if shards == 1:
      out = self._in_piece(table, tokens)
    else:
      bytes_of_rows = shards * tokens.size * self.dtype.itemsize
      bytes_of_table = shards * table.shape[0] * table.dtype.itemsize
      if 4 * bytes_of_rows > bytes_of_table:
        out = self._move_table(table, tokens)
      else:
        return self._move_rows(table, tokens)
    return self._sum(out)

  def _sum(self, x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, self.alone) if self.alone else x

  def _in_piece(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows that this device's piece has of any tokens."""
    first = 0
    if self.vocab:
      first = jax.lax.axis_index(self.vocab) * table.shape[0]
    index = tokens - first
    here = (index >= 0) & (index < table.shape[0])
    return _take(table, index, here, self._exists(tokens)).astype(self.dtype)

  def _exists(self, tokens: jax.Array) -> jax.Array:
    return (tokens >= 0) & (tokens < self.rows)

  def _move_rows(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
    shared = self.shared
    for axis, dimension in reversed(shared.items()):  # innermost first
      tokens = jax.lax.all_gather(tokens, axis, axis=dimension, tiled=True)
    shards = self.active.devices(shared)
    if tokens.shape[0] % shards == 0:
      # The share of one device at a time: their rows, and in the backward
      # pass their gradients in the table's dtype, would exist at once.
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
    # Where a token's row lies: the device's place on every axis, from the
    # innermost, then the row in its piece.
    owner, places = tokens // table.shape[0], {}
    for axis in reversed(self.vocab):
      size = self.active.mesh.shape[axis]
      places[axis], owner = owner % size, owner // size
    exists = self._exists(tokens)
    here = exists
    for axis in self.alone:
      here &= places[axis] == jax.lax.axis_index(axis)
    index = 0
    for axis in gathered:
      index = index * self.active.mesh.shape[axis] + places[axis]
    index = index * table.shape[0] + tokens % table.shape[0]

    def take(columns):
      """Looks the tokens up in some columns of the gathered table."""
      whole = jax.lax.all_gather(columns, gathered, axis=0, tiled=True)
      return _take(whole, index, here, exists).astype(self.dtype)

    count = _parts(table, self.active.devices(gathered))
    columns = table.reshape(table.shape[0], count, -1).swapaxes(0, 1)
    out = jax.lax.map(take, columns)  # [parts, B, L, D / parts]
    return jnp.moveaxis(out, 0, 2).reshape(*tokens.shape, table.shape[1])


def _parts(table: jax.Array, shards: int) -> int:
  """Returns in how many parts of its columns a table is gathered.

  The fewest that keep one part of all shards together below 128 MiB.
  """
  size, width = shards * table.size * table.dtype.itemsize, table.shape[1]
  fits = (
    n for n in range(1, width + 1) if width % n == 0 and size <= n * 2**27
  )
  return next(fits, width)
