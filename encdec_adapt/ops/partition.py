"""The active mesh and its logical axis rules, and `shard()`.

Models and losses name the axes of their arrays logically ('batch', 'mlp');
what those names mean on a mesh is decided by whoever traces the program,
with `use`. Nothing here knows which rules exist (`encdec_adapt.sharding`
does). Constraints are active on every platform, CPU included.
"""

from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import dataclasses
import functools
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Partition:
  """A mesh and the meaning of logical axis names on it."""

  mesh: Mesh
  rules: Mapping[str, MeshAxes]

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """Mesh axes of one logical axis; () where it is not sharded.

    Raises:
      ValueError: no rule speaks of `name`.
    """
    if name is None:
      return ()
    if name not in self.rules:
      known = ', '.join(sorted(self.rules))
      raise ValueError(
        f'no sharding rule for logical axis {name!r}; known axes: {known}'
      )
    axes = self.rules[name]
    return (axes,) if isinstance(axes, str) else tuple(axes or ())

  def spec(self, *names: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions have these names."""
    axes = [self.mesh_axes(name) for name in names]
    return PartitionSpec(
      *(a if len(a) > 1 else a[0] if a else None for a in axes)
    )

  def size(self, name: str | None) -> int:
    """Number of shards along one logical axis."""
    size = 1
    for axis in self.mesh_axes(name):
      size *= self.mesh.shape[axis]
    return size


_ACTIVE: contextvars.ContextVar[Partition | None] = contextvars.ContextVar(
  'encdec_adapt_partition', default=None
)


@contextlib.contextmanager
def use(mesh: Mesh, rules: Mapping[str, MeshAxes]) -> Iterator[Partition]:
  """Makes `mesh` and `rules` active for what is traced inside.

  Enter it inside the function that is jitted: jit caches by arguments and
  does not know about this context.
  """
  partition = Partition(mesh, rules)
  token = _ACTIVE.set(partition)
  try:
    yield partition
  finally:
    _ACTIVE.reset(token)


def active() -> Partition | None:
  """The active partition, or None (one device, no constraints)."""
  return _ACTIVE.get()


def shard(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains `x`, one logical name (or None) per dimension.

  Raises:
    ValueError: a dimension does not divide over the active mesh, or two of
      them are mapped to one mesh axis; names them.
  """
  partition = active()
  if partition is None:
    return x
  if len(names) != x.ndim:
    raise ValueError(
      f'shard() got {len(names)} axis names {names} for an array of shape'
      f' {x.shape}'
    )
  _check(partition, x.shape, names)
  return jax.lax.with_sharding_constraint(
    x, NamedSharding(partition.mesh, partition.spec(*names))
  )


def summed_in_stages(weight: jax.Array, *names: str | None) -> jax.Array:
  """The same weight, whose gradient is summed over some mesh axes first.

  Over those of `summed_first`, and then over the others that the weight is
  sharded over: a TPU's compiler scatters what it sums over some of a slice's
  chips, but not what it sums over all of them, which it sends whole instead
  (`tests.benchmarks.gradient_sums`). Nothing is summed over axes that split no
  tokens, such as those of heads: they shard the gradient all along.

  Args:
    weight: that a product reads.
    *names: logical name (or None) of each dimension.
  """
  partition = active()
  first = partition.mesh_axes('summed_first') if partition else ()
  sizes = partition.mesh.shape if partition else {}
  if math.prod(sizes[axis] for axis in first) == 1:
    return weight
  tokens = partition.mesh_axes('batch') + partition.mesh_axes('length')
  kept = [a for a in sizes if a not in tokens and sizes[a] > 1]
  kept += first
  axes = [partition.mesh_axes(name) for name in names]
  stages = [[tuple(a for a in some if a in kept) for some in axes], axes]
  return _summed(
    weight,
    tuple(
      NamedSharding(
        partition.mesh, PartitionSpec(*(some or None for some in stage))
      )
      for stage in stages
    ),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(weight, stages):
  """The weight; `stages` are shardings of its gradient, one after the other."""
  return weight


def _forward(weight, stages):
  return weight, None


def _backward(stages, _, gradient):
  for sharding in stages:
    gradient = jax.lax.with_sharding_constraint(gradient, sharding)
  return (gradient,)


_summed.defvjp(_forward, _backward)


def _check(
  partition: Partition, shape: tuple[int, ...], names: tuple[str | None, ...]
) -> None:
  """Raises ValueError for axes that collide or do not divide, by name."""
  owner: dict[str, str] = {}
  for size, name in zip(shape, names, strict=True):
    axes = partition.mesh_axes(name)
    if size % partition.size(name):
      raise ValueError(
        f'an array of shape {shape} with axes {names} does not divide: its'
        f' {name!r} of {size} is split {partition.size(name)} times, over mesh'
        f' axes {axes}'
      )
    for axis in axes:
      if axis in owner:
        raise ValueError(
          f'sharding rules map both {owner[axis]!r} and {name!r} of an array'
          f' with axes {names} to mesh axis {axis!r}; an array uses a mesh'
          ' axis once'
        )
      owner[axis] = name
