"""Where parameters, optimizer state and batches live on a mesh."""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from encdec_adapt.sharding import rules as rules_lib

Tree = Any


def spec(rules: rules_lib.Rules, *names: str | None) -> PartitionSpec:
  """PartitionSpec of an array with these logical axes."""
  mapping = rules.as_dict()
  axes = (mapping[name] if name else () for name in names)
  return PartitionSpec(*(a or None for a in axes))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
  """The sharding of a scalar."""
  return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(
  table: Mapping[str, Any],
  mesh: Mesh | AbstractMesh,
  rules: rules_lib.Rules,
) -> dict[str, NamedSharding]:
  """Sharding of every parameter.

  Args:
    table: path to an object with `shape` and `axes` (logical, one per
      dimension): `models.parameters.parameter_table`.
    mesh: the device mesh.
    rules: meaning of the logical axes.

  Returns:
    Path to NamedSharding.

  Raises:
    ValueError: a dimension does not divide, or a mesh axis is used twice:
      names the parameter; or the vocabulary is in too many pieces.
  """
  rules.check({path: info.axes for path, info in table.items()})
  if any('vocab' in info.axes for info in table.values()):
    rules.check_vocabulary(mesh.shape)
  mapping = rules.as_dict()
  shardings = {}
  for path, info in table.items():
    for size, logical in zip(info.shape, info.axes, strict=True):
      axes = mapping[logical]
      shards = math.prod(mesh.shape[axis] for axis in axes)
      if size % shards:
        raise ValueError(
          f'{path}: dimension {logical!r} of {size} does not divide into'
          f' {shards} shards (mesh axes {axes}).'
        )
    shardings[path] = NamedSharding(mesh, spec(rules, *info.axes))
  return shardings


def axes_like_parameters(tree: Tree, table: Mapping[str, Any]) -> Tree:
  """Logical axes of a tree that holds parameters, or leaves made from them.

  A leaf below a parameter's path has the parameter's axes where it has its
  shape (a moment), and those that are left where it lacks one dimension
  (Adafactor's rows and columns; of two dimensions of one size, the first is
  taken to be the one that it lacks). Any other leaf (a count) has no names.

  Args:
    tree: shaped leaves; parameter paths as keys, nested or joined with '/'.
    table: parameter path to an object with `shape` and `axes`.

  Returns:
    A tuple of names, or None, for every leaf.
  """

  def name(path, leaf):
    """Axes of one leaf."""
    keys = path_string(path).split('/')
    tails = ('/'.join(keys[start:]) for start in range(len(keys)))
    info = next((table[tail] for tail in tails if tail in table), None)
    if info is None:
      return (None,) * len(leaf.shape)
    if leaf.shape == info.shape:
      return tuple(info.axes)
    for i in range(len(info.shape)):
      if leaf.shape == info.shape[:i] + info.shape[i + 1 :]:
        return tuple(info.axes[:i] + info.axes[i + 1 :])
    return (None,) * len(leaf.shape)

  return jax.tree_util.tree_map_with_path(name, tree)


def shardings(
  tree: Tree, axes: Tree, mesh: Mesh | AbstractMesh, rules: rules_lib.Rules
) -> Tree:
  """Shardings of a tree by the logical axes of its leaves.

  Args:
    tree: shaped leaves.
    axes: a tuple of names, or None, for every leaf.
    mesh: the device mesh.
    rules: meaning of the logical axes.

  Returns:
    The tree with a NamedSharding for every leaf, scalars included: a leaf
    without one would be restored onto one device per process.

  Raises:
    ValueError: a leaf does not divide over the mesh; names it.
  """

  def place(path, leaf, names):
    """The sharding of one leaf."""
    what, parts = path_string(path), spec(rules, *names)
    return _dividing(what, leaf.shape, mesh, parts, f', of axes {names}')

  return jax.tree_util.tree_map_with_path(place, tree, axes)


def path_string(path: Any) -> str:
  """A leaf's path in a tree, joined with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def batch_axes(shape: tuple[int, ...]) -> tuple[str, ...]:
  """Logical axes of a field of a batch: rows, and where it has them, tokens."""
  return ('batch', 'length')[: len(shape)]


def batch_sharding(
  mesh: Mesh | AbstractMesh,
  rules: rules_lib.Rules,
  batch: Mapping[str, Any],
) -> dict[str, NamedSharding]:
  """Sharding of a batch: rows over `batch`, lengths over `length`.

  Raises:
    ValueError: a field's rows or length do not divide over the mesh.
  """
  more = '; change config.train.batch_size or config.mesh'
  return {
    name: _dividing(
      f'batch field {name}',
      value.shape,
      mesh,
      spec(rules, *batch_axes(value.shape)),
      more,
    )
    for name, value in batch.items()
  }


def _dividing(what, shape, mesh, parts, more) -> NamedSharding:
  """The sharding of an array that divides.

  Raises:
    ValueError: it does not; says `what` it is, and `more`.
  """
  sharding = NamedSharding(mesh, parts)
  try:
    sharding.shard_shape(shape)
  except ValueError as error:
    raise ValueError(
      f'{what} of shape {shape} does not divide over the mesh'
      f' {dict(mesh.shape)} (spec {parts}){more}.'
    ) from error
  return sharding


@dataclasses.dataclass(frozen=True)
class RowShards:
  """Which rows of every batch the devices of one process hold.

  Processes hold the same rows where a `tensor` or `sequence` group crosses
  them, and the rows of one need not be contiguous: that is up to the order
  of the devices in the mesh.

  Attributes:
    total: shards of a batch's rows over the mesh.
    held: those on this process's devices, ascending, 0 to total - 1.
  """

  total: int
  held: tuple[int, ...]

  def rows(self, batch_size: int) -> list[int]:
    """Places in a global batch that the process reads, ascending.

    Args:
      batch_size: rows of the global batch.

    Raises:
      ValueError: they do not divide over the shards.
    """
    size, rest = divmod(batch_size, self.total)
    if rest:
      raise ValueError(
        f'a batch of {batch_size} rows does not divide into the'
        f' {self.total} shards of the mesh.'
      )
    return [i for s in self.held for i in range(s * size, (s + 1) * size)]

  def shard_rows(self, count: int) -> int:
    """Rows of one shard, where this process read `count` for a batch.

    Raises:
      ValueError: they do not divide over the shards held.
    """
    size, rest = divmod(count, len(self.held))
    if rest:
      raise ValueError(
        f'{count} rows of a batch do not divide into the {len(self.held)} of'
        f' {self.total} shards that this process holds; change'
        ' config.train.batch_size or config.mesh.'
      )
    return size


@functools.cache
def row_shards(
  mesh: Mesh, rules: rules_lib.Rules, process: int | None = None
) -> RowShards:
  """Says which rows of a batch are a process's to read.

  Args:
    mesh: the device mesh.
    rules: meaning of the logical axes.
    process: index of the process, by default this one.
  """
  process = jax.process_index() if process is None else process
  total = math.prod(mesh.shape[axis] for axis in rules.as_dict()['batch'])
  sharding = NamedSharding(mesh, spec(rules, 'batch'))
  held = {
    rows.indices(total)[0]
    for device, (rows,) in sharding.devices_indices_map((total,)).items()
    if device.process_index == process
  }
  return RowShards(total, tuple(sorted(held)))
