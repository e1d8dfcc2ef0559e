"""Attention on TPU: JAX's splash attention kernels.

The kernels know masks by index. Positions are compared by index here, which
is the same thing where `MaskSpec.aligned` holds; other masks are refused.
Lengths are padded to whole blocks with keys of a segment that nobody has.
On a mesh the kernels run under `shard_map`: rows over 'batch', heads over
'act_heads', queries over 'length'; every shard of queries reads all keys.
"""

import dataclasses

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as kernel_masks,
)
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from encdec_adapt.ops import masks, partition

# Queries and keys of one kernel block. With head_dim 256, 1024 overflows the
# vector memory of TPU v4, v5e and v5p in the backward pass.
_BLOCK = 512
_LANES = 128  # A block is a multiple of a vector register's lanes.
# Segments of padding; unlike, so that padding sees nothing.
_NO_QUERY, _NO_KEY = -1, -2
SAVED = 'attention_saved'  # See `attention.SAVED`.


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None,
  interpret: bool = False,
) -> Float[Array, 'B T N H']:
  """Attention by splash kernels; see `attention.attention`.

  Args:
    q: queries.
    k: keys.
    v: values.
    spec: a mask that is aligned, or a full one without a window.
    scale: factor of the scores.
    softcap: cap of the scores.
    interpret: run the kernels as ordinary operations, on any platform.

  Raises:
    ValueError: heads or queries do not divide over the active mesh.
  """
  queries, keys = q.shape[1], k.shape[1]
  shards = _Shards.active()
  block_q = block(-(-queries // shards.length))
  block_kv = block(keys)
  seen = _sees_a_key(spec)  # [B, T]
  q_segments = jnp.where(spec.q_segments > 0, spec.q_segments, _NO_QUERY)
  kv_segments = jnp.where(spec.kv_segments > 0, spec.kv_segments, _NO_KEY)
  whole_q, whole_kv = block_q * shards.length, block_kv
  q = _pad((q * scale).astype(q.dtype), whole_q)
  k, v = _pad(k, whole_kv), _pad(v, whole_kv)
  q_segments = _pad(q_segments, whole_q, _NO_QUERY)
  kv_segments = _pad(kv_segments, whole_kv, _NO_KEY)
  kernel = _kernel(
    _mask(spec, q.shape[1], k.shape[1]),
    q.shape[2],
    (block_q, block_kv),
    softcap,
    shards,
    interpret,
  )
  out = shards.run(kernel, q, k, v, q_segments, kv_segments)
  out = out[:, :queries].astype(q.dtype)
  return jnp.where(seen[:, :, None, None], out, 0)


def block(length: int) -> int:
  """Block size in tokens: one block for short lengths, else `_BLOCK`."""
  return min(_BLOCK, -(-length // _LANES) * _LANES)


def _pad(x: jax.Array, multiple: int, value: int = 0) -> jax.Array:
  padding = [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, padding, constant_values=value)


def _sees_a_key(spec: masks.MaskSpec) -> jax.Array:
  """[B, T] whether a query sees any key."""
  real = spec.q_segments > 0
  if spec.aligned:
    return real  # Itself.
  same = spec.q_segments[:, :, None] == spec.kv_segments[:, None, :]
  return real & jnp.any(same, axis=-1)


def _mask(spec: masks.MaskSpec, queries: int, keys: int) -> kernel_masks.Mask:
  """The kernels' own mask, by index."""
  shape = (queries, keys)
  window = spec.window
  if spec.kind == 'causal':
    if window is None:
      return kernel_masks.CausalMask(shape)
    return kernel_masks.LocalMask(shape, (window - 1, 0), 0)
  if window is None:
    return kernel_masks.FullMask(shape)
  return kernel_masks.LocalMask(shape, sides(window, spec.window_rule), 0)


def sides(window: int | None, rule: str) -> tuple[int | None, int | None]:
  """Keys before and after its own that a bidirectional query sees."""
  if window is None:
    return None, None
  return {
    'exclusive': (window - 1, window - 1),
    'inclusive': (window, window),
    'centered': ((window + 1) // 2 - 1, window // 2),
  }[rule]


def _kernel(mask, heads, blocks, softcap, shards, interpret):
  """The kernel for all heads, forward and backward."""
  block_q, block_kv = blocks
  return kernels.make_splash_mha(
    kernel_masks.MultiHeadMask([mask] * heads),
    block_sizes=kernels.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=block_kv,
      block_q_dkv=block_q,
      block_kv_dkv=block_kv,
      block_kv_dkv_compute=block_kv,
      # Not fused: the fused kernel writes partial query gradients for every
      # block of keys, a gigabyte at 8192 tokens.
      block_q_dq=block_q,
      block_kv_dq=block_kv,
    ),
    head_shards=shards.heads,
    q_seq_shards=shards.length,
    attn_logits_soft_cap=softcap,
    residual_checkpoint_name=SAVED,
    interpret=interpret,
  )


@dataclasses.dataclass(frozen=True)
class _Shards:
  """How the active partition splits rows, queries and heads.

  Attributes:
    mesh: None for one device.
    batch, queries, head_axes: mesh axes.
    length, heads: number of shards.
  """

  mesh: Mesh | None = None
  batch: tuple[str, ...] = ()
  queries: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  length: int = 1
  heads: int = 1

  @classmethod
  def active(cls) -> '_Shards':
    """Those of the active partition."""
    active = partition.active()
    if active is None:
      return cls()
    return cls(
      mesh=active.mesh,
      batch=active.mesh_axes('batch'),
      queries=active.mesh_axes('length'),
      head_axes=active.mesh_axes('act_heads'),
      length=active.size('length'),
      heads=active.size('act_heads'),
    )

  def run(self, kernel, q, k, v, q_segments, kv_segments):
    """The kernel on every device's share: [B, T, N, H]."""
    if self.mesh is None:
      return _rows(kernel, q, k, v, q_segments, kv_segments)
    for what, size in (('query', q.shape[2]), ('key/value', k.shape[2])):
      if size % self.heads:
        raise ValueError(
          f'{size} {what} heads do not divide over mesh axes {self.head_axes}'
          f' of {self.heads} devices; change config.mesh.tensor'
        )
    spec = PartitionSpec
    batch, heads = self.batch or None, self.head_axes or None
    queries = self.queries or None
    masked = kernel.manual_sharding_spec(
      NamedSharding(self.mesh, spec(heads, queries))
    )
    return jax.shard_map(
      _rows,
      mesh=self.mesh,
      in_specs=(
        masked,
        spec(batch, queries, heads),
        spec(batch, None, heads),
        spec(batch, None, heads),
        spec(batch, queries),
        spec(batch),
      ),
      out_specs=spec(batch, queries, heads),
      # The kernels do not say over which axes their results vary.
      check_vma=False,
    )(kernel, q, k, v, q_segments, kv_segments)


def _rows(kernel, q, k, v, q_segments, kv_segments):
  """The kernel, which takes [N, T, H], for each row of [B, T, N, H]."""

  def row(q, k, v, q_segments, kv_segments):
    segments = kernels.SegmentIds(q_segments, kv_segments)
    return kernel(*(x.swapaxes(0, 1) for x in (q, k, v)), segments)

  return jax.vmap(row)(q, k, v, q_segments, kv_segments).swapaxes(1, 2)
