"""Attention on GPUs by `flash_kernels`, in Pallas for Triton.

Segments and positions are compared token by token, so every `MaskSpec` is
supported without conversion. The blocks of keys that a block of queries visits
are computed before the kernels run, from the least and the greatest segment
and position of each block: blocks outside a causal or windowed range, and
blocks of other examples in a packed row, are skipped. On a mesh the kernels
run under `attention_shards`.
"""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from encdec_adapt.ops import attention_shards, flash_kernels, masks

_FAR = 2**29  # Farther than any position, and above any segment.


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Blocks of the forward kernel and of the two backward ones."""

  forward: flash_kernels.Tile
  queries: flash_kernels.Tile
  keys: flash_kernels.Tile


# By head dimension, for 16-bit numbers: (queries, keys, warps, stages).
# Shared memory holds the block that a kernel keeps and `stages` of the two
# that its loop loads: 192 KiB at a head dimension of 256, of the 227 KiB that
# a block has on Hopper and Blackwell. Not timed on a GPU yet;
# `tests.benchmarks.gpu_kernels` compares them with candidates of three stages.
_TILES = {
  64: [(128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)],
  128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 2)],
  256: [(128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)],
}
MAX_HEAD_DIM = max(_TILES)


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
  """Attention by flash kernels; see `attention.attention`.

  Args:
    q: queries; H is at most `MAX_HEAD_DIM`.
    k: keys.
    v: values.
    spec: any mask.
    scale: factor of the scores.
    softcap: cap of the scores.
    interpret: run the kernels as ordinary operations, on any platform.

  Raises:
    ValueError: heads or lengths do not divide over the active mesh.
  """
  local = functools.partial(
    _attend, scale=scale, softcap=softcap, interpret=interpret
  )
  if spec.aligned and spec.needs_positions:
    # Tighter than positions, which start again with every segment.
    spec = masks.by_index(spec)
  return attention_shards.run(local, q, k, v, spec)


def choose_tiles(head_dim: int, itemsize: int) -> Tiles:
  """Returns the tiles for a head dimension and the bytes of a number."""
  chosen = next(_TILES[size] for size in sorted(_TILES) if head_dim <= size)
  # Half of each side for 32-bit numbers, which take twice the shared memory.
  ratio = 1 if itemsize <= 2 else 2
  return Tiles(
    *(
      flash_kernels.Tile(queries // ratio, keys // ratio, warps, stages)
      for queries, keys, warps, stages in chosen
    )
  )


def _attend(q, k, v, spec, *, scale, softcap, interpret):
  """Computes `attend` on a single device."""
  queries, head_dim = q.shape[1], q.shape[3]
  tiles = choose_tiles(head_dim, q.dtype.itemsize)
  sizes = [tiles.forward, tiles.queries, tiles.keys]
  # Sizes are powers of two, so lengths that the largest divides suit all.
  whole_q = max(tile.queries for tile in sizes)
  whole_kv = max(tile.keys for tile in sizes)
  call = flash_kernels.Call(
    spec.reach, k.shape[1], spec.memory, scale, softcap, interpret
  )
  out = _flash(
    _pad(q, whole_q),
    _pad(k, whole_kv),
    _pad(v, whole_kv),
    _tokens(spec.q_segments, spec.q_positions, whole_q),
    _tokens(spec.kv_segments, spec.kv_positions, whole_kv),
    tiles,
    call,
  )
  return out[:, :queries, :, :head_dim]


def _pad(x: jax.Array, multiple: int) -> jax.Array:
  """Pads [B, L, N, H] to whole blocks, and H to a power of two."""
  # Triton's blocks have power-of-two sides, and its products at least 16.
  head = max(16, pl.next_power_of_2(x.shape[3])) - x.shape[3]
  x = masks.pad_length(x, multiple)
  return jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, head)])


def _tokens(segments, positions, multiple: int) -> jax.Array:
  """Stacks segments and positions to [B, 2, L], padded with segment 0."""
  if positions is None:
    positions = jnp.zeros_like(segments)
  tokens = [masks.pad_length(x, multiple) for x in (segments, positions)]
  return jnp.stack(tokens, axis=1)


def visited(
  q_tokens: Int[Array, 'B 2 T'],
  kv_tokens: Int[Array, 'B 2 S'],
  tile: flash_kernels.Tile,
  call: flash_kernels.Call,
) -> Bool[Array, 'B Q K']:
  """Returns whether some query of a block may see some key of another.

  May be True for a pair of blocks that see nothing, but is never False for a
  pair that sees something.
  """
  past, future = call.reach
  q_low, q_high = (
    x[..., None] for x in _extremes(q_tokens, tile.queries)
  )  # [B, 2, Q, 1]
  kv_low, kv_high = (
    x[:, :, None] for x in _extremes(kv_tokens, tile.keys)
  )  # [B, 2, 1, K]
  # Blocks of padding have no low and no high.
  same = (q_low[:, 0] <= kv_high[:, 0]) & (kv_low[:, 0] <= q_high[:, 0])
  near = jnp.ones_like(same)
  if past is not None:
    near &= q_low[:, 1] - kv_high[:, 1] <= past
  if future is not None:
    near &= kv_low[:, 1] - q_high[:, 1] <= future
  if call.memory:
    ends = tile.keys * jnp.arange(1, same.shape[2] + 1)
    near |= ends > call.keys - call.memory
  return same & near


def _extremes(
  tokens: Int[Array, 'B 2 L'], size: int
) -> tuple[jax.Array, jax.Array]:
  """Returns each block's least and greatest segment and position."""
  tokens = tokens.reshape(*tokens.shape[:2], -1, size)
  real = tokens[:, :1] > 0
  return (
    jnp.min(jnp.where(real, tokens, _FAR), axis=-1),
    jnp.max(jnp.where(real, tokens, -_FAR), axis=-1),
  )


def _span(blocks: Bool[Array, 'B X Y']) -> Int[Array, 'B X 2']:
  """Returns the index of the first True in Y, and that after the last.

  Blocks between them that see nothing are visited: a kernel loops over a range.
  """
  first = jnp.argmax(blocks, axis=-1)
  last = blocks.shape[-1] - jnp.argmax(blocks[..., ::-1], axis=-1)
  last = jnp.where(jnp.any(blocks, axis=-1), last, first)
  return jnp.stack([first, last], axis=-1).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _flash(q, k, v, q_tokens, kv_tokens, tiles: Tiles, call):
  """Attention of whole blocks: [B, T, N, H]."""
  return _forward(q, k, v, q_tokens, kv_tokens, tiles, call)[0]


def _forward(q, k, v, q_tokens, kv_tokens, tiles, call):
  operands, tile = (q, k, v, q_tokens, kv_tokens), tiles.forward
  visits = _span(visited(q_tokens, kv_tokens, tile, call))
  results = flash_kernels.run('flash_forward', (visits, *operands), tile, call)
  out, sums = (checkpoint_name(x, attention_shards.SAVED) for x in results)
  return out, (*operands, out, sums)


def _backward(tiles, call, saved, d_out):
  *operands, out, sums = saved
  # The softmax's derivative needs the sum of weights times their gradients,
  # which equals this product (FlashAttention, arXiv 2205.14135, appendix B.2):
  # so the kernels can take a block of scores at a time.
  tokens = operands[3:]
  inner = jnp.einsum(
    'BTNH,BTNH->BNT', out, d_out, preferred_element_type=jnp.float32
  )
  operands += [d_out, sums, inner]
  visits = _span(visited(*tokens, tiles.queries, call))
  (d_q,) = flash_kernels.run(
    'flash_backward_queries', (visits, *operands), tiles.queries, call
  )
  visits = _span(visited(*tokens, tiles.keys, call).swapaxes(1, 2))
  d_k, d_v = flash_kernels.run(
    'flash_backward_keys', (visits, *operands), tiles.keys, call
  )
  return d_q, d_k, d_v, None, None


_flash.defvjp(_forward, _backward)
