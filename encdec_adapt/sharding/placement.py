"""Where parameters, optimizer state and batches live on a mesh."""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from encdec_adapt.sharding import rules as rules_lib

Tree = Any


def spec(rules: rules_lib.Rules, *names: str | None) -> PartitionSpec:
  """PartitionSpec of an array with these logical axes."""
  mapping = rules.as_dict()
  axes = (mapping[name] if name else () for name in names)
  return PartitionSpec(*(a or None for a in axes))


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of a scalar."""
  return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(
  table: Mapping[str, Any], mesh: Mesh, rules: rules_lib.Rules
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
    ValueError: a dimension does not divide, or a mesh axis is used twice;
      names the parameter.
  """
  rules.check({path: info.axes for path, info in table.items()})
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


def like_parameters(
  abstract: Tree,
  table: Mapping[str, Any],
  shardings: Mapping[str, NamedSharding],
  mesh: Mesh,
) -> Tree:
  """Shardings of a tree that holds leaves made from parameters.

  A leaf under a parameter's path and of its shape (a moment) is placed like
  the parameter. Everything else (counts, Adafactor's factored rows and
  columns, which are small) is replicated.

  Args:
    abstract: tree of shaped leaves, parameter paths as flat dictionary keys.
    table: parameter path to an object with `shape`.
    shardings: parameter path to sharding.
    mesh: the device mesh.

  Returns:
    The tree with a NamedSharding for every leaf, scalars included: a leaf
    without one would be restored onto one device per process.
  """

  def place(path, leaf):
    """The sharding of the parameter that the leaf is made from, if any."""
    for key in reversed(path):
      name = getattr(key, 'key', None)
      if isinstance(name, str) and name in shardings:
        if leaf.shape == table[name].shape:
          return shardings[name]
    return replicated(mesh)

  return jax.tree_util.tree_map_with_path(place, abstract)


def batch_sharding(
  mesh: Mesh, rules: rules_lib.Rules, batch: Mapping[str, Any]
) -> dict[str, NamedSharding]:
  """Sharding of a batch: rows over `batch`, lengths over `length`.

  Raises:
    ValueError: a field's rows or length do not divide over the mesh.
  """
  result = {}
  for name, value in batch.items():
    names = ('batch', 'length')[: len(value.shape)]
    sharding = NamedSharding(mesh, spec(rules, *names))
    try:
      sharding.shard_shape(value.shape)
    except ValueError as error:
      raise ValueError(
        f'batch field {name} of shape {value.shape} does not divide over the'
        f' mesh {dict(mesh.shape)} (spec {sharding.spec}); change'
        ' config.train.batch_size or config.mesh.'
      ) from error
    result[name] = sharding
  return result
