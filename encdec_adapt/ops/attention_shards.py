"""Attention on a mesh: each device computes some rows, heads and queries.

A device has the queries of its shard of the length. Keys and values are sharded
likewise, and a device gathers the keys visible to its queries: all keys, or,
with a window, the few next to its shard (a halo). Ring attention would store
one copy fewer of the key heads, but it also passes on their gradients, which
nearly doubles the traffic, and no kernel here supports a ring.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import masks, partition

# Defined here and not in `attention`, which imports the kernels that use it;
# documented there.
SAVED = 'attention_saved'

# Logical axes of queries, keys and values [B, L, N, H], and of their tokens.
_STATES = ('batch', 'length', 'act_heads', None)


def halo(
  spec: masks.MaskSpec, keys: int, shards: int
) -> tuple[int, int] | None:
  """Returns the number of keys a shard needs from earlier and later shards.

  Args:
    spec: the mask.
    keys: global number of keys S.
    shards: number of shards of the length.

  Returns:
    None where a shard needs all keys, or a halo would not send less.
  """
  # A reach in positions bounds the keys' indices only where indices are
  # positions.
  if not spec.aligned or None in spec.reach:
    return None
  return spec.reach if sum(spec.reach) < keys - keys // shards else None


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
  """Runs `attend(q, k, v, spec, *operands)` on each device's shard.

  Args:
    attend: attention on one device.
    q: queries.
    k: keys.
    v: values.
    spec: the mask.
    operands: further arguments of `attend`.
    operand_specs: partition spec of each operand.

  Returns:
    The outputs [B, T, N, H], sharded like the queries.

  Raises:
    ValueError: rows, lengths or heads do not divide over the active mesh.
  """
  active = partition.active()
  if active.mesh is None:
    return attend(q, k, v, spec, *operands)
  active.check('queries', q.shape, _STATES)
  active.check('keys', k.shape, _STATES)
  shards = active.size('length')
  reach = halo(spec, k.shape[1], shards)

  def on_shard(q, k, v, spec, *operands):
    if shards > 1:
      k, v, spec = _gather_keys(k, v, spec, active, reach)
    return attend(q, k, v, spec, *operands)

  states, tokens = active.spec(*_STATES), active.spec(*partition.TOKENS)
  return jax.shard_map(
    on_shard,
    mesh=active.mesh,
    in_specs=(
      states,
      states,
      states,
      jax.tree.map(lambda _: tokens, spec),
      *operand_specs,
    ),
    out_specs=states,
    # Kernels do not declare over which axes their results vary.
    check_vma=False,
  )(q, k, v, spec, *operands)


def _gather_keys(k, v, spec, active, reach: tuple[int, int] | None):
  axes = active.mesh_axes('length')
  if reach is None:
    gather = functools.partial(
      jax.lax.all_gather, axis_name=axes, axis=1, tiled=True
    )
  else:
    gather = functools.partial(
      _with_halo, axes=axes, count=active.size('length'), reach=reach
    )
  if spec.aligned:
    first = reach[0] if reach else jax.lax.axis_index(axes) * k.shape[1]
    spec = spec.replace(offset=first)
  spec = spec.replace(
    # The gathered keys have other indices than the shard's queries.
    aligned=False,
    **{
      name: jax.tree.map(gather, getattr(spec, name))
      for name in ('kv_segments', 'kv_positions', 'kv_prefix')
    },
  )
  return gather(k), gather(v), spec


def _with_halo(
  x: jax.Array, axes: tuple[str, ...], count: int, reach: tuple[int, int]
) -> jax.Array:
  """Extends a shard along dimension 1 by its neighbours' nearest tokens.

  The first and the last shard get zeros instead: padding, by the segment.
  """
  size, (past, future) = x.shape[1], reach

  def receive(distance: int, part: jax.Array) -> jax.Array:
    """Receives a part from `distance` shards behind (ahead if negative)."""
    # A shard without a sender gets zeros; a ring would deliver tokens of the
    # other end.
    pairs = [
      (i, i + distance) for i in range(count) if 0 <= i + distance < count
    ]
    return jax.lax.ppermute(part, axes, pairs)

  # A halo may be wider than a shard: all hops but the farthest deliver a whole
  # shard, and the farthest delivers the remainder.
  earlier, later = [], []
  for hop in range(1, math.ceil(past / size) + 1):
    earlier.insert(0, receive(hop, x[:, -min(size, past - (hop - 1) * size) :]))
  for hop in range(1, math.ceil(future / size) + 1):
    later.append(receive(-hop, x[:, : min(size, future - (hop - 1) * size)]))
  return jnp.concatenate([*earlier, x, *later], axis=1)
