"""What is sharded how: every array, its logical axes, its bytes per device."""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from encdec_adapt.sharding import memory, placement

# Bytes from which an array that every device holds whole is pointed out.
LARGE = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Row:
  """One array.

  Attributes:
    name: what the array is a part of, and its path there.
    shape: of the whole array.
    dtype: of its elements.
    axes: logical name of every dimension, None where it has none.
    spec: mesh axes of every dimension.
    bytes: of one device's share.
    copied: mesh axes along which devices hold the same.
    replicated: every device holds all of it, though there are several.
    host: it lies in the host's memory.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str | None, ...]
  spec: PartitionSpec
  bytes: int
  copied: tuple[str, ...]
  replicated: bool
  host: bool

  @property
  def wasteful(self) -> bool:
    """Large, and on every device."""
    return self.replicated and self.bytes >= LARGE


def device_bytes(tree: Any, *, host: bool = False) -> float:
  """Bytes in one device's memory of a sharded tree, abstract or not.

  Args:
    tree: of arrays, or of their shapes with shardings.
    host: those of the device's shards in its host's memory instead.
  """
  return float(
    sum(
      _bytes(leaf)
      for leaf in jax.tree.leaves(tree)
      if (leaf.sharding.memory_kind == memory.HOST) == host
    )
  )


def _bytes(leaf) -> int:
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def describe(
  arguments: Mapping[str, Any], axes: Mapping[str, Any]
) -> list[Row]:
  """A row for every array.

  Args:
    arguments: trees of shapes with shardings, by what they are.
    axes: trees of their logical axes, a tuple for each leaf.
  """
  rows = []
  for part, tree in arguments.items():
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = structure.flatten_up_to(axes[part])
    for (path, leaf), logical in zip(leaves, names, strict=True):
      shard = leaf.sharding.shard_shape(leaf.shape)
      rows.append(
        Row(
          name=f'{part}/{placement.path_string(path)}'.rstrip('/'),
          shape=tuple(leaf.shape),
          dtype=str(leaf.dtype),
          axes=tuple(logical),
          spec=leaf.sharding.spec,
          bytes=_bytes(leaf),
          copied=_copied(leaf.sharding),
          replicated=shard == tuple(leaf.shape) and _devices(leaf) > 1,
          host=leaf.sharding.memory_kind == memory.HOST,
        )
      )
  return rows


def _copied(sharding: jax.NamedSharding) -> tuple[str, ...]:
  splits = [
    (axes,) if isinstance(axes, str) else axes for axes in sharding.spec
  ]
  used = {axis for axes in splits for axis in axes or ()}
  sizes = sharding.mesh.shape
  return tuple(a for a in sizes if sizes[a] > 1 and a not in used)


def copies(rows: Iterable[Row]) -> list[dict[str, Any]]:
  """What devices along a mesh axis hold the same of, where it is much.

  Returns:
    `part` of the arguments, mesh `axes`, number of `arrays`, and their `bytes`
    on one device, at least `LARGE`; the most bytes first.
  """
  found: dict[tuple[str, str], list[int]] = {}
  for row in rows:
    if row.copied and not row.host:
      key = row.name.partition('/')[0], '+'.join(row.copied)
      found.setdefault(key, []).append(row.bytes)
  listed = [
    {'part': part, 'axes': axes, 'arrays': len(sizes), 'bytes': sum(sizes)}
    for (part, axes), sizes in found.items()
    if sum(sizes) >= LARGE
  ]
  return sorted(listed, key=lambda one: -one['bytes'])


def copies_text(found: Iterable[Mapping[str, Any]]) -> list[str]:
  """A line for each of `copies`."""
  return [
    f'{one["part"]}: {one["bytes"] / 2**20:,.1f} MiB per device'
    f' ({one["arrays"]} arrays) are the same along {one["axes"]}'
    for one in found
  ]


def text(rows: Iterable[Row]) -> str:
  """The rows for people, and the sums of every part.

  What devices along an axis hold the same of, and arrays that are large and on
  every device, have lines of their own at the end.
  """
  rows = list(rows)
  width = max((len(row.name) for row in rows), default=0)
  lines = [
    f'{row.name:<{width}}  {row.dtype:<9}{_dimensions(row):<66}'
    f'{row.bytes / 2**20:>12,.3f} MiB{"  on the host" if row.host else ""}'
    for row in rows
  ]
  sums: dict[str, int] = {}
  for row in rows:
    part = row.name.partition('/')[0] + (' on the host' if row.host else '')
    sums[part] = sums.get(part, 0) + row.bytes
  lines += [
    f'{part}: {size / 2**20:,.1f} MiB per device' for part, size in sums.items()
  ]
  lines += copies_text(copies(rows))
  lines += [
    f'REPLICATED: {row.name}, {row.bytes / 2**20:,.1f} MiB on every device'
    for row in rows
    if row.wasteful
  ]
  return '\n'.join(lines)


def _devices(leaf: jax.ShapeDtypeStruct) -> int:
  return leaf.sharding.mesh.size


def _dimensions(row: Row) -> str:
  """`embed 2304/fsdp, mlp 9216`, a dimension with the axes that split it."""
  parts = []
  spec = [*row.spec, *[None] * (len(row.shape) - len(row.spec))]
  for size, logical, axes in zip(row.shape, row.axes, spec, strict=True):
    axes = (axes,) if isinstance(axes, str) else axes or ()
    split = '/' + '.'.join(axes) if axes else ''
    parts.append(f'{logical or "-"} {size}{split}')
  return ', '.join(parts) or 'scalar'
