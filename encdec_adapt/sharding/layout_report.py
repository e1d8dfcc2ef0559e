"""Report of shardings: every array, its logical axes, its bytes per device."""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

from jax import tree_util

from encdec_adapt.sharding import memory, placement

# Minimum bytes of replicated arrays to report.
LARGE = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Row:
  """Layout of an array.

  Attributes:
    name: part of the arguments and path in it, such as 'parameters/a/b'.
    dimensions: 'embed 2304/fsdp, mlp 9216': logical name, size and mesh axes.
    dtype: dtype of the elements.
    bytes: bytes per device.
    replicated: whether each of several devices holds the whole array.
    host: whether the array is in host memory.
  """

  name: str
  dimensions: str
  dtype: str
  bytes: int
  replicated: bool
  host: bool

  @property
  def part(self) -> str:
    """Part of the arguments: the first component of `name`."""
    return self.name.partition('/')[0]


def device_bytes(tree: Any, *, host: bool = False) -> float:
  """Returns a tree's bytes per device; its leaves may be abstract.

  Args:
    tree: arrays, or shapes with shardings.
    host: count host memory instead of device memory.
  """
  return float(
    sum(
      _bytes(leaf)
      for leaf in tree_util.tree_leaves(tree)
      if (leaf.sharding.memory_kind == memory.HOST) == host
    )
  )


def _bytes(leaf) -> int:
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def describe(
  arguments: Mapping[str, Any], axes: Mapping[str, Any]
) -> list[Row]:
  """Returns a row for every array.

  Args:
    arguments: part to tree of shapes with shardings.
    axes: part to tree of logical axes, a tuple for each leaf.
  """
  rows = []
  for part, tree in arguments.items():
    leaves, structure = tree_util.tree_flatten_with_path(tree)
    names = structure.flatten_up_to(axes[part])
    for (path, leaf), logical in zip(leaves, names, strict=True):
      mesh = leaf.sharding.mesh.shape
      # A PartitionSpec may be shorter than the shape, and may name an axis
      # without a tuple.
      spec = [
        (split,) if isinstance(split, str) else split or ()
        for split in (*leaf.sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
      ]
      # Mesh axes of size 1 split nothing.
      used = {axis for split in spec for axis in split if mesh[axis] > 1}
      dimensions = [
        f'{name or "-"} {size}' + ('/' + '.'.join(split) if split else '')
        for size, name, split in zip(leaf.shape, logical, spec, strict=True)
      ]
      rows.append(
        Row(
          name=f'{part}/{placement.path_string(path)}'.rstrip('/'),
          dimensions=', '.join(dimensions) or 'scalar',
          dtype=str(leaf.dtype),
          bytes=_bytes(leaf),
          replicated=not used and math.prod(mesh.values()) > 1,
          host=leaf.sharding.memory_kind == memory.HOST,
        )
      )
  return rows


def replicated(rows: Iterable[Row]) -> list[dict[str, Any]]:
  """Returns fully replicated arrays of at least `LARGE` bytes.

  Returns:
    `name` and `bytes` of each.
  """
  return [
    {'name': row.name, 'bytes': row.bytes}
    for row in rows
    if row.replicated and row.bytes >= LARGE
  ]


def replicated_text(arrays: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns a line for each entry of `replicated`."""
  return [
    f'REPLICATED: {array["name"]}, {array["bytes"] / 2**20:,.1f} MiB on every'
    ' device'
    for array in arrays
  ]


def text(rows: Iterable[Row]) -> str:
  """Returns a line for every row, sums by part, and large replicas."""
  rows = list(rows)
  width = max((len(row.name) for row in rows), default=0)
  lines, sums = [], {}
  for row in rows:
    host = ' on the host' if row.host else ''
    lines.append(
      f'{row.name:<{width}}  {row.dtype:<9}{row.dimensions:<66}'
      f'{row.bytes / 2**20:>12,.3f} MiB{host}'
    )
    sums[row.part + host] = sums.get(row.part + host, 0) + row.bytes
  lines += [
    f'{part}: {size / 2**20:,.1f} MiB per device' for part, size in sums.items()
  ]
  return '\n'.join([*lines, *replicated_text(replicated(rows))])
