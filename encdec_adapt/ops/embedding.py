"""Embedding lookup that never gathers the table.

Where the active partition shards 'vocab', each device takes the rows that it
holds, zeros elsewhere, and a reduction over the vocabulary's mesh axes
assembles them. Batch and vocabulary usually share the `fsdp` axis: tokens
(small) are gathered over the shared axes, every device looks all of them up,
and the reduction scatters the rows back to the batch's shards.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import partition as partition_lib


def lookup(
  table: Float[Array, 'V D'],
  tokens: Int[Array, 'B L'],
  dtype: jnp.dtype | type | str | None = None,
) -> Float[Array, 'B L D']:
  """Rows of `table` at `tokens`.

  Args:
    table: embedding table; sharded as ('vocab', 'table_embed') says.
    tokens: ids in [0, V); any other id gives a row of NaN, on one device and
      on meshes.
    dtype: dtype of the result, that of the table where None. The rows are
      cast, not the table, so gradients add up in the table's dtype.

  Returns:
    Embeddings, sharded as ('batch', 'length', 'table_embed').

  Raises:
    ValueError: shapes do not divide over the mesh, or 'table_embed' shares a
      mesh axis with 'batch' or 'length'.
  """
  dtype = table.dtype if dtype is None else jnp.dtype(dtype)
  partition = partition_lib.active()
  if partition is None or not _sharded(partition):
    return _take(table, tokens, 0, table.shape[0]).astype(dtype)
  _check(partition, table, tokens)
  look_up = functools.partial(
    _lookup_local, partition=partition, rows=table.shape[0], dtype=dtype
  )
  return jax.shard_map(
    look_up,
    mesh=partition.mesh,
    in_specs=(
      partition.spec('vocab', 'table_embed'),
      partition.spec('batch', 'length'),
    ),
    out_specs=partition.spec('batch', 'length', 'table_embed'),
  )(table, tokens)


def _sharded(partition: partition_lib.Partition) -> bool:
  """Whether the table is in more than one piece."""
  return partition.size('vocab') * partition.size('table_embed') > 1


def _take(
  table: jax.Array, tokens: jax.Array, first: jax.Array | int, rows: int
) -> jax.Array:
  """Rows at `tokens` of a piece of the table.

  Args:
    table: [rows of the piece, D], the table from row `first` on.
    tokens: [B, L] ids of the whole table.
    first: row of the whole table at which the piece starts.
    rows: rows of the whole table.

  Returns:
    [B, L, D]: zeros where another piece has the row, NaN where none has.
  """
  local = tokens - first
  here = (local >= 0) & (local < table.shape[0])
  taken = table.at[jnp.where(here, local, 0)].get(mode='promise_in_bounds')
  nowhere = (tokens < 0) | (tokens >= rows)
  absent = jnp.where(nowhere, jnp.nan, 0.0).astype(table.dtype)
  return jnp.where(here[..., None], taken, absent[..., None])


def _lookup_local(
  table: jax.Array,
  tokens: jax.Array,
  *,
  partition: partition_lib.Partition,
  rows: int,
  dtype: jnp.dtype,
) -> jax.Array:
  """What one device does inside `shard_map`.

  Args:
    table: [V / vocab shards, D / table_embed shards], this device's piece.
    tokens: [B / batch shards, L / length shards].
    partition: the active partition.
    rows: V.
    dtype: dtype of the result.

  Returns:
    [B / batch shards, L / length shards, D / table_embed shards].
  """
  vocab = partition.mesh_axes('vocab')
  # Mesh axes over which other devices hold other tokens but also other rows,
  # with the dimension of `tokens` that they shard.
  shared = [
    (axis, dimension)
    for dimension, name in enumerate(('batch', 'length'))
    for axis in partition.mesh_axes(name)
    if axis in vocab
  ]
  for axis, dimension in reversed(shared):  # the innermost axis first
    tokens = jax.lax.all_gather(tokens, axis, axis=dimension, tiled=True)
  first = jax.lax.axis_index(vocab) * table.shape[0] if vocab else 0

  def take(tokens):
    return _take(table, tokens, first, rows).astype(dtype)

  shards = math.prod(partition.mesh.shape[axis] for axis, _ in shared)
  if shards > 1 and tokens.shape[0] % shards == 0:
    # The share of one device at a time: their rows, and in the backward pass
    # their gradients in the table's dtype, would exist at once.
    pieces = tokens.reshape(shards, -1, tokens.shape[1])
    out = jax.lax.map(take, pieces)
    out = out.reshape(*tokens.shape, table.shape[1])
  else:
    out = take(tokens)
  alone = tuple(a for a in vocab if a not in dict(shared))
  out = jax.lax.psum(out, alone) if alone else out
  for axis, dimension in shared:
    out = jax.lax.psum_scatter(
      out, axis, scatter_dimension=dimension, tiled=True
    )
  return out


def _check(partition: partition_lib.Partition, table, tokens) -> None:
  """Raises ValueError where the shapes or rules do not fit the mesh."""
  sizes = {
    'vocab': table.shape[0],
    'table_embed': table.shape[1],
    'batch': tokens.shape[0],
    'length': tokens.shape[1],
  }
  for name, size in sizes.items():
    if size % partition.size(name):
      raise ValueError(
        f'embedding lookup: {name!r} has size {size}, which the'
        f' {partition.size(name)} shards of mesh axes'
        f' {partition.mesh_axes(name)} do not divide; pad it or shard it less'
      )
  for name in ('batch', 'length'):
    both = set(partition.mesh_axes('table_embed'))
    both &= set(partition.mesh_axes(name))
    if both:
      raise ValueError(
        f"embedding lookup: rules 'table_embed' and {name!r} share mesh axes"
        f" {sorted(both)}; shard the table over them by 'vocab' instead"
      )
