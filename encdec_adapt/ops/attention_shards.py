"""Attention on a mesh: each device has some rows, heads and queries.

Queries are those of the device's part of the length. Keys and values are
sharded in the same way; a device gathers those that its queries may see: all
of them, or where a window says by index what is seen, the few beside its own
(a halo). A ring of keys, which passes their gradients on too, sends nearly
twice as much to keep one copy less of the few key heads, and no kernel of
ours works in one: `tests/benchmarks/sequence_parallel.py` has the numbers.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from encdec_adapt.ops import masks, partition

SAVED = 'attention_saved'  # See `attention.SAVED`.


@dataclasses.dataclass(frozen=True)
class Shards:
  """How the active partition splits rows, lengths and heads.

  Attributes:
    mesh: None for one device.
    row_axes, length_axes, head_axes: mesh axes.
    rows, length, heads: number of shards.
  """

  mesh: Mesh | None = None
  row_axes: tuple[str, ...] = ()
  length_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  rows: int = 1
  length: int = 1
  heads: int = 1

  @classmethod
  def active(cls) -> 'Shards':
    """Those of the active partition."""
    active = partition.active()
    if active is None:
      return cls()
    return cls(
      mesh=active.mesh,
      row_axes=active.mesh_axes('batch'),
      length_axes=active.mesh_axes('length'),
      head_axes=active.mesh_axes('act_heads'),
      rows=active.size('batch'),
      length=active.size('length'),
      heads=active.size('act_heads'),
    )

  def spec(self, *dimensions: str | None) -> PartitionSpec:
    """Of an array whose dimensions are 'rows', 'length', 'heads' or None."""
    axes = {
      'rows': self.row_axes,
      'length': self.length_axes,
      'heads': self.head_axes,
      None: (),
    }
    return PartitionSpec(*(axes[name] or None for name in dimensions))

  def halo(self, spec: masks.MaskSpec, keys: int) -> tuple[int, int] | None:
    """Keys before and after its own that a shard needs.

    Args:
      spec: the mask.
      keys: S.

    Returns:
      None where it needs all, or fewer would not be less to send.
    """
    left, right = spec.reach
    if not spec.aligned or left is None or right is None:
      return None
    others = keys - keys // self.length
    return (left, right) if left + right < others else None

  def check(self, q: jax.Array, k: jax.Array) -> None:
    """Refuses what does not divide over the mesh.

    Raises:
      ValueError: names what, its size and the mesh axes.
    """
    for what, size, axes, shards in (
      ('rows', q.shape[0], self.row_axes, self.rows),
      ('queries', q.shape[1], self.length_axes, self.length),
      ('keys', k.shape[1], self.length_axes, self.length),
      ('query heads', q.shape[2], self.head_axes, self.heads),
      ('key/value heads', k.shape[2], self.head_axes, self.heads),
    ):
      if size % shards:
        raise ValueError(
          f'{size} {what} do not divide over mesh axes {axes} of {shards}'
          ' devices; change them or config.mesh'
        )


def run(
  attend: Callable[..., jax.Array],
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  operands: Sequence[Any] = (),
  operand_specs: Sequence[Any] = (),
) -> Float[Array, 'B T N H']:
  """Attention by `attend(q, k, v, spec, *operands)` on each device's share.

  Args:
    attend: attention on one device.
    q: queries [B, T, N, H].
    k: keys [B, S, K, H].
    v: values.
    spec: the mask.
    operands: what else `attend` takes.
    operand_specs: their partition specs.

  Returns:
    [B, T, N, H].

  Raises:
    ValueError: rows, lengths or heads do not divide over the active mesh.
  """
  shards = Shards.active()
  if shards.mesh is None:
    return attend(q, k, v, spec, *operands)
  shards.check(q, k)
  halo = shards.halo(spec, k.shape[1])

  def share(q, k, v, spec, *operands):
    if shards.length > 1:
      k, v, spec = _gather_keys(k, v, spec, shards, halo)
    return attend(q, k, v, spec, *operands)

  states = shards.spec('rows', 'length', 'heads')
  tokens = shards.spec('rows', 'length')
  return jax.shard_map(
    share,
    mesh=shards.mesh,
    in_specs=(
      states,
      states,
      states,
      jax.tree.map(lambda _: tokens, spec),
      *operand_specs,
    ),
    out_specs=states,
    # Kernels do not say over which axes their results vary.
    check_vma=False,
  )(q, k, v, spec, *operands)


def _gather_keys(k, v, spec, shards: Shards, halo: tuple[int, int] | None):
  """Keys and values that a device's queries may see, and the mask of them."""
  if halo is None:
    gather = functools.partial(
      jax.lax.all_gather, axis_name=shards.length_axes, axis=1, tiled=True
    )
  else:
    gather = functools.partial(_with_halo, shards=shards, halo=halo)
  spec = spec.replace(
    aligned=False,
    **{
      name: jax.tree.map(gather, getattr(spec, name))
      for name in ('kv_segments', 'kv_positions')
    },
  )
  return gather(k), gather(v), spec


def _with_halo(
  x: jax.Array, shards: Shards, halo: tuple[int, int]
) -> jax.Array:
  """A shard's part of dimension 1 between its neighbours' nearest tokens.

  Zeros, which are padding by their segment, stand before the first shard and
  after the last.
  """
  own, count = x.shape[1], shards.length
  left, right = halo

  def receive(distance: int, part: jax.Array) -> jax.Array:
    """The part that the shard so far behind (or ahead) has."""
    pairs = [
      (i, i + distance) for i in range(count) if 0 <= i + distance < count
    ]
    return jax.lax.ppermute(part, shards.length_axes, pairs)

  before, after = [], []
  for hop in range(1, math.ceil(left / own) + 1):
    before.insert(0, receive(hop, x[:, -min(own, left - (hop - 1) * own) :]))
  for hop in range(1, math.ceil(right / own) + 1):
    after.append(receive(-hop, x[:, : min(own, right - (hop - 1) * own)]))
  return jnp.concatenate([*before, x, *after], axis=1)
