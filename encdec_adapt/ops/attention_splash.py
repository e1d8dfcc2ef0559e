"""Attention on TPU: JAX's splash attention kernels.

The kernels mask by index, which equals masking by position where
`MaskSpec.aligned` holds; other masks are refused.
Lengths are padded to whole blocks with keys of a segment that no query has.
On a mesh the kernels run under `attention_shards`.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as kernel_masks,
)
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from encdec_adapt.ops import attention_shards, masks, partition

# Queries and keys of a kernel block. With head_dim 256, 1024 overflows the
# vector memory of TPU v4, v5e and v5p in the backward pass.
_BLOCK = 512
_LANES = 128  # A block is a multiple of a vector register's lanes.
# Where every query may see every key, the backward pass is a single kernel,
# which computes the scores once and writes partial query gradients for every
# part of the keys. Limits on the number of parts and on the bytes of keys in
# each: they fit the vector memory that the compiler grants kernels on TPU v5e.
_PARTS = 8
_PART_BYTES = 2**19
# Segments of padded queries and keys; they differ, so nothing is visible.
_NO_QUERY, _NO_KEY = -1, -2


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
    ValueError: rows, heads or lengths do not divide over the active mesh.
  """
  queries, keys = q.shape[1], k.shape[1]
  active = partition.active()
  heads, lengths = active.size('act_heads'), active.size('length')
  block_q, block_kv = block(-(-queries // lengths)), block(-(-keys // lengths))
  whole_q, whole_kv = block_q * lengths, block_kv * lengths
  padded = spec.replace(
    q_segments=masks.pad_length(spec.q_segments, whole_q),
    kv_segments=masks.pad_length(spec.kv_segments, whole_kv),
    # Not read by the kernels, which mask by index.
    q_positions=None,
    kv_positions=None,
  )
  # The kernels do not scale, and soft-cap the product as it is.
  q = masks.pad_length((q * scale).astype(q.dtype), whole_q)
  k, v = masks.pad_length(k, whole_kv), masks.pad_length(v, whole_kv)
  kernel, q_shards = _kernel(
    padded, q, k, (block_q, block_kv), softcap, (heads, lengths), interpret
  )
  kernel_spec = None
  if active.mesh is not None:
    axes = active.spec('act_heads', 'length' if q_shards > 1 else None)
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(active.mesh, axes))
  local = functools.partial(_rows, block_kv=block_kv)
  out = attention_shards.run(
    local, q, k, v, padded, operands=[kernel], operand_specs=[kernel_spec]
  )
  return masks.zero_queries_without_keys(out[:, :queries].astype(q.dtype), spec)


def block(length: int) -> int:
  """Returns the block size in tokens; short lengths are a single block."""
  return min(_BLOCK, -(-length // _LANES) * _LANES)


def _blocks_per_part(blocks: int, block_bytes: int) -> int:
  """Returns the blocks of keys in a part of the fused backward pass.

  1 means that the backward pass is not fused.

  Args:
    blocks: total number of blocks of keys.
    block_bytes: bytes of a block for a single head.
  """
  # Parts are wide because the partial gradients of all of them are summed. A
  # causal mask or a window leaves blocks out, which wide parts would compute.
  for count in (4, 2):
    fits = blocks <= count * _PARTS and count * block_bytes <= _PART_BYTES
    if fits and blocks % count == 0:
      return count
  return 1


def _kernel(spec, q, k, blocks, softcap, shards, interpret):
  """Makes the kernel of all heads, forward and backward.

  Mask, queries and keys are padded to whole blocks. `blocks` has the queries
  and keys of a block, `shards` the shards of heads and of the length.

  Returns:
    The kernel, and the number of shards of its mask along the queries.
  """
  (block_q, block_kv), (heads, lengths) = blocks, shards
  halo = attention_shards.halo(spec, k.shape[1], lengths)
  queries, keys, q_shards = q.shape[1], k.shape[1], lengths
  if halo is not None:
    # All shards are alike: queries begin a halo after their keys.
    keys = keys // lengths + sum(halo)
    keys -= keys % -block_kv
  # A window may reach everything; such a mask cannot be sharded, and need not.
  if halo is not None or _sees_all(spec, queries, keys):
    queries, q_shards = queries // lengths, 1
  joint = 1
  if _sees_all(spec, queries, keys):  # On a device, after the lines above.
    block_bytes = block_kv * k.shape[-1] * k.dtype.itemsize
    joint = _blocks_per_part(keys // block_kv, block_bytes)
  fused = joint > 1
  mask = _mask(spec.reach, (queries, keys), 0 if halo is None else halo[0])
  if q_shards > 1:
    # A mask as blocks in memory: JAX cannot shard those that it computes
    # inside the kernels (up to 0.12 it joins a list of none of them).
    mask &= kernel_masks.FullMask((queries, keys))
  kernel = kernels.make_splash_mha(
    kernel_masks.MultiHeadMask([mask] * q.shape[2]),
    block_sizes=kernels.BlockSizes(
      block_q=block_q,
      block_kv=block_kv,
      block_kv_compute=block_kv,
      block_q_dkv=block_q,
      block_kv_dkv=joint * block_kv,
      block_kv_dkv_compute=block_kv,
      use_fused_bwd_kernel=fused,
      # The library refuses blocks of the pass that the fused kernel replaces.
      block_q_dq=None if fused else block_q,
      block_kv_dq=None if fused else block_kv,
    ),
    head_shards=heads,
    q_seq_shards=q_shards,
    attn_logits_soft_cap=softcap,
    residual_checkpoint_name=attention_shards.SAVED,
    interpret=interpret,
  )
  return kernel, q_shards


def _sees_all(spec: masks.MaskSpec, queries: int, keys: int) -> bool:
  """Returns whether every query sees every key, apart from segments."""
  farthest = max(queries, keys) - 1
  return all(side is None or side >= farthest for side in spec.reach)


def _mask(
  reach: tuple[int | None, int | None], shape: tuple[int, int], offset: int
) -> kernel_masks.Mask:
  if reach == (None, None):
    return kernel_masks.FullMask(shape)
  if reach == (None, 0):
    return kernel_masks.CausalMask(shape)
  return kernel_masks.LocalMask(shape, reach, offset)


def _rows(q, k, v, spec, kernel, *, block_kv):
  """Runs the kernel, which takes [N, T, H], on each row of [B, T, N, H]."""
  k, v = masks.pad_length(k, block_kv), masks.pad_length(v, block_kv)
  kv_segments = masks.pad_length(spec.kv_segments, block_kv)
  # The kernels compare segments without an exception for 0.
  q_segments = jnp.where(spec.q_segments > 0, spec.q_segments, _NO_QUERY)
  kv_segments = jnp.where(kv_segments > 0, kv_segments, _NO_KEY)

  def row(q, k, v, q_segments, kv_segments):
    segments = kernels.SegmentIds(q_segments, kv_segments)
    return kernel(*(x.swapaxes(0, 1) for x in (q, k, v)), segments)

  return jax.vmap(row)(q, k, v, q_segments, kv_segments).swapaxes(1, 2)
