"""The active mesh with its logical axis rules, and `shard()`.

Models and losses name the axes of their arrays logically ('batch', 'mlp'), and
their caller maps the names to a mesh with `use` while tracing. Rule sets are in
`encdec_adapt.sharding`. Constraints apply on every platform, including CPUs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import functools
import math

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]

# Logical axes of an array of tokens.
TOKENS = ('batch', 'length')


@dataclasses.dataclass(frozen=True)
class Partition:
  """A mesh with the mapping of logical axis names to its axes.

  Attributes:
    mesh: the device mesh; None for a single device, without sharding.
    rules: mesh axes of each logical axis.
  """

  mesh: Mesh | AbstractMesh | None
  rules: Mapping[str, MeshAxes]

  @property
  def device(self) -> jax.Device | None:
    """A device of the mesh, possibly missing here (compiled ahead of time)."""
    return None if self.mesh is None else self.mesh.devices.flat[0]

  @property
  def platform(self) -> str | None:
    """Platform of the mesh."""
    return None if self.mesh is None else self.device.platform

  def mesh_axes(self, *names: str | None) -> tuple[str, ...]:
    """Returns the mesh axes of these logical axes; () without sharding."""
    if self.mesh is None:
      return ()
    return tuple(axis for name in names if name for axis in self.rules[name])

  def spec(self, *names: str | None) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these logical axes."""
    return _spec(self.mesh_axes(name) for name in names)

  def split(
    self, shape: Sequence[int], names: Sequence[str | None]
  ) -> list[MeshAxes]:
    """Returns the mesh axes of each dimension of an array.

    An adapter's rank is sharded over the axes of its rule not used by other
    dimensions of the matrix, if divisible: one of an adapter's two matrices has
    the model's width, sharded over the same mesh axes.

    Args:
      shape: global shape of the array.
      names: logical axis of each dimension.
    """
    axes = [self.mesh_axes(name) for name in names]
    if 'rank' in names:
      i = names.index('rank')
      taken = {axis for split in axes[:i] + axes[i + 1 :] for axis in split}
      free = tuple(axis for axis in axes[i] if axis not in taken)
      axes[i] = () if shape[i] % self.devices(free) else free
    return axes

  def devices(self, axes: Iterable[str]) -> int:
    """Returns the number of devices along these mesh axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def size(self, *names: str | None) -> int:
    """Returns the number of shards along these logical axes."""
    return self.devices(self.mesh_axes(*names))

  def common(self, names: Sequence[str], required: Sequence[str]) -> MeshAxes:
    """Returns the mesh axes that shard both `names` and `required`."""
    shared = self.mesh_axes(*required)
    return tuple(axis for axis in self.mesh_axes(*names) if axis in shared)

  def only(self, names: Sequence[str], excluded: Sequence[str]) -> MeshAxes:
    """Returns the mesh axes that shard `names` and not `excluded`."""
    shared = self.common(names, excluded)
    return tuple(axis for axis in self.mesh_axes(*names) if axis not in shared)

  def check(
    self, label: str, shape: Sequence[int], names: Sequence[str | None]
  ) -> None:
    """Checks that an array can be sharded.

    Args:
      label: name of the array in errors.
      shape: global shape of the array.
      names: logical axis of each dimension.

    Raises:
      ValueError: a dimension is not divisible over the mesh.
    """
    split = self.split(shape, names)
    for size, name, axes in zip(shape, names, split, strict=True):
      if size % self.devices(axes):
        raise ValueError(
          f'{label} of shape {tuple(shape)} with axes {tuple(names)}: {name!r}'
          f' of size {size} does not divide over mesh axes {axes} of'
          f' {self.devices(axes)} devices.'
        )

  def sharding(
    self, label: str, shape: Sequence[int], names: Sequence[str | None]
  ) -> NamedSharding:
    """Returns the sharding of an array; raises as `check` does."""
    self.check(label, shape, names)
    return NamedSharding(self.mesh, _spec(self.split(shape, names)))


def _spec(axes: Iterable[MeshAxes]) -> PartitionSpec:
  return PartitionSpec(
    *(a if len(a) > 1 else a[0] if a else None for a in axes)
  )


ONE_DEVICE = Partition(None, {})
# Each thread has its own partition: servers trace their programs in threads.
_ACTIVE: contextvars.ContextVar[Partition] = contextvars.ContextVar(
  'encdec_adapt_partition', default=ONE_DEVICE
)


@contextlib.contextmanager
def use(
  mesh: Mesh | AbstractMesh, rules: Mapping[str, MeshAxes]
) -> Iterator[Partition]:
  """Activates `mesh` and `rules` for code traced inside the context.

  Enter it inside the jitted function: the cache of `jit` ignores this context.
  """
  partition = Partition(mesh, rules)
  token = _ACTIVE.set(partition)
  try:
    yield partition
  finally:
    _ACTIVE.reset(token)


def active() -> Partition:
  """Returns the active partition; `ONE_DEVICE` outside of `use`."""
  return _ACTIVE.get()


def shard(x: jax.Array, *names: str | None) -> jax.Array:
  """Constrains the sharding of `x`, with a logical axis per dimension.

  Args:
    x: any array.
    *names: logical axis (or None) of each dimension.

  Returns:
    `x`, unchanged on one device.

  Raises:
    ValueError: a dimension, named in the error, is not divisible over the mesh.
  """
  partition = active()
  if partition.mesh is None:
    return x
  return jax.lax.with_sharding_constraint(
    x, partition.sharding('array', x.shape, names)
  )


def split_rows(x: jax.Array, parts: int) -> jax.Array:
  """Splits rows [B, ..] into parts [parts, B / parts, ..].

  Row i goes to part i % parts, so each device splits its local rows without
  communication.
  """
  return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)


def join_rows(x: jax.Array) -> jax.Array:
  """Inverts `split_rows`: returns the rows [B, ..]."""
  return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def sum_gradient_in_stages(weight: jax.Array, *names: str | None) -> jax.Array:
  """Returns the weight; sums its gradient in two stages.

  The gradient is summed over the axes of the rule `summed_first`, then over the
  weight's other mesh axes: the TPU compiler turns a sum over some chips of a
  slice into a reduce-scatter, but a sum over all chips into an all-reduce of
  the whole array (`tests.benchmarks.gradient_sums`). Axes without tokens, such
  as the axes of heads, need no sum: they shard the gradient in both stages.

  Args:
    weight: operand of a product with activations.
    *names: logical axis (or None) of each dimension.
  """
  partition = active()
  if partition.size('summed_first') == 1:
    return weight
  sizes, first = partition.mesh.shape, partition.mesh_axes('summed_first')
  tokens = partition.mesh_axes(*TOKENS)
  early = {*first, *(a for a in sizes if a not in tokens and sizes[a] > 1)}
  axes = partition.split(weight.shape, names)
  stages = [[tuple(a for a in split if a in early) for split in axes], axes]
  return _summed(
    weight,
    tuple(
      NamedSharding(
        partition.mesh, PartitionSpec(*(split or None for split in stage))
      )
      for stage in stages
    ),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(weight, stages):
  """Returns the weight; `stages` are successive shardings of its gradient."""
  return weight


def _forward(weight, stages):
  return weight, None


def _backward(stages, _, gradient):
  for sharding in stages:
    gradient = jax.lax.with_sharding_constraint(gradient, sharding)
  return (gradient,)


_summed.defvjp(_forward, _backward)
