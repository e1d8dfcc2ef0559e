"""Shardings of parameters, optimizer state and batches on a mesh."""

from collections.abc import Mapping
import dataclasses
import functools
import types
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from encdec_adapt.sharding import rules as rules_lib

Tree = Any
# Logical axes by batch field, for fields other than rows of tokens.
BatchAxes = Mapping[str, tuple[str | None, ...]]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """Returns the fully replicated sharding."""
  return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(
  table: Mapping[str, Any], mesh: Mesh | AbstractMesh, rules: rules_lib.Rules
) -> dict[str, NamedSharding]:
  """Returns the sharding of every parameter by its path.

  Args:
    table: path to an object with `shape` and `axes` (a logical axis per
      dimension): `models.parameters.parameter_table`.
    mesh: device mesh.
    rules: mesh axes of the logical axes.

  Raises:
    ValueError: a parameter's dimension does not divide over the mesh, or the
      vocabulary is split too often.
  """
  if any('vocab' in info.axes for info in table.values()):
    rules.check_vocabulary(mesh.shape)
  partition = rules.on(mesh)
  return {
    path: partition.sharding(path, info.shape, info.axes)
    for path, info in table.items()
  }


def axes_like_parameters(tree: Tree, table: Mapping[str, Any]) -> Tree:
  """Returns logical axes of parameters or of optimizer state.

  A leaf below a parameter's path gets the parameter's axes if the shapes are
  equal (a moment), and the remaining axes if it lacks a dimension (Adafactor's
  rows and columns; the first of two equal dimensions counts as missing). Other
  leaves (counts) get no names.

  Args:
    tree: shaped leaves; parameter paths as keys, nested or joined with '/'.
    table: parameter path to an object with `shape` and `axes`.

  Returns:
    The tree with a tuple of names, or None, for every leaf.
  """

  def name(path, leaf):
    # Optimizers nest parameters below additional keys, so every suffix of the
    # path is tried.
    keys = path_string(path).split('/')
    tails = ('/'.join(keys[start:]) for start in range(len(keys)))
    info = next((table[tail] for tail in tails if tail in table), None)
    if info is not None and leaf.shape == info.shape:
      return tuple(info.axes)
    for i in range(len(info.shape) if info else 0):
      if leaf.shape == info.shape[:i] + info.shape[i + 1 :]:
        return tuple(info.axes[:i] + info.axes[i + 1 :])
    return (None,) * len(leaf.shape)

  return jax.tree_util.tree_map_with_path(name, tree)


def shardings(
  tree: Tree, axes: Tree, mesh: Mesh | AbstractMesh, rules: rules_lib.Rules
) -> Tree:
  """Returns shardings of a tree by the logical axes of its leaves.

  Args:
    tree: shaped leaves.
    axes: tuple of names, or None, for every leaf.
    mesh: device mesh.
    rules: mesh axes of the logical axes.

  Returns:
    The tree with a NamedSharding for every leaf, scalars included: a leaf
    without a sharding would be restored onto one device per process.

  Raises:
    ValueError: a leaf does not divide over the mesh.
  """
  partition = rules.on(mesh)
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf, names: partition.sharding(
      path_string(path), leaf.shape, names
    ),
    tree,
    axes,
  )


def path_string(path: Any) -> str:
  """Returns a leaf's path in a tree, joined with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def batch_axes(
  batch: Mapping[str, Any], declared: BatchAxes = types.MappingProxyType({})
) -> dict[str, tuple[str | None, ...]]:
  """Returns the logical axes of the fields of a batch.

  Args:
    batch: shaped fields.
    declared: axes by field, for fields other than [rows] or [rows, tokens].
  """
  common = ('batch', 'length')
  return {
    name: declared.get(name, common[: len(value.shape)])
    for name, value in batch.items()
  }


def batch_sharding(
  mesh: Mesh | AbstractMesh,
  rules: rules_lib.Rules,
  batch: Mapping[str, Any],
  declared: BatchAxes = types.MappingProxyType({}),
) -> dict[str, NamedSharding]:
  """Returns shardings of a batch, from its `batch_axes`.

  Raises:
    ValueError: the rows or the length of a field do not divide over the mesh.
  """
  return shardings(batch, batch_axes(batch, declared), mesh, rules)


@dataclasses.dataclass(frozen=True)
class RowShards:
  """Shards of a batch's rows on the devices of a process.

  Processes hold the same rows if a `tensor` or `sequence` group spans them,
  and the rows of a process need not be contiguous: both follow from the device
  order of the mesh.

  Attributes:
    total: number of shards of a batch's rows over the mesh.
    indices: shards on this process's devices, ascending, 0 to total - 1.
  """

  total: int
  indices: tuple[int, ...]

  def rows(self, batch_size: int) -> list[int]:
    """Returns the process's rows of a global batch, ascending.

    Args:
      batch_size: rows of the global batch, a multiple of `total`.
    """
    size = batch_size // self.total
    return [i for s in self.indices for i in range(s * size, (s + 1) * size)]

  def shard_rows(self, count: int) -> int:
    """Returns the rows per shard, given the process's `count` rows of a batch.

    Raises:
      ValueError: `count` does not divide over the shards of the process.
    """
    size, remainder = divmod(count, len(self.indices))
    if remainder:
      raise ValueError(
        f'{count} rows for {len(self.indices)} shards of a process'
      )
    return size


# Called for every batch, and slow to build for a large mesh.
@functools.cache
def row_shards(
  mesh: Mesh, rules: rules_lib.Rules, process: int | None = None
) -> RowShards:
  """Returns the row shards of a process.

  Args:
    mesh: device mesh.
    rules: mesh axes of the logical axes.
    process: 0-based index of a process; None for this process.
  """
  process = jax.process_index() if process is None else process
  partition = rules.on(mesh)
  total = partition.size('batch')
  sharding = partition.sharding('rows', (total,), ('batch',))
  # A set: devices of a `tensor` or `sequence` group hold the same rows.
  indices = {
    rows.indices(total)[0]
    for device, (rows,) in sharding.devices_indices_map((total,)).items()
    if device.process_index == process
  }
  return RowShards(total, tuple(sorted(indices)))
