"""FLOPs of attention kernels, which XLA does not count.

Splash attention on TPUs and tokamax's kernels on GPUs compute whole blocks and
skip fully masked blocks. The blocks follow from the model, the number of runs
from the compiled program. This module must not import chips or jobs.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math

import numpy as np

from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import attention_splash
from encdec_adapt.planner import hlo

# Matmuls [block, H] x [H, block] per block. fwd: scores, values; dq: scores,
# gradients of scores and queries; dkv: scores, gradients of scores, keys and
# values. A fused backward kernel also computes the gradient of queries.
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}
_FUSED_PRODUCTS = 5
# Matmuls of tokamax's kernels, by a part of their names.
_GPU_PRODUCTS = {'flash_attention_sm': 2, 'attention_dq': 3, 'attention_dkv': 4}
_GPU_PRODUCTS |= {'sm100_dq': 3, 'sm100_dkv': 4}
_GPU_BLOCK = 128
# A fused backward kernel returns gradients of queries, keys and values; jax
# 0.10 adds an accumulator for each.
_FUSED_RESULTS = 3, 6


@dataclasses.dataclass(frozen=True)
class Attention:
  """Attention of a layer, as computed by a kernel.

  Attributes:
    queries, keys: lengths on one device.
    behind, ahead: visible keys before and after a query; None for all.
    offset: position of the first query among the keys.
    key_block: keys per block; None for the default of `attention_splash.block`.
    query_block: queries per block, likewise.
  """

  queries: int
  keys: int
  behind: int | None
  ahead: int | None
  offset: int = 0
  key_block: int | None = None
  query_block: int | None = None

  @property
  def sizes(self) -> tuple[int, int]:
    """Queries and keys per block."""
    return (
      self.query_block or attention_splash.block(self.queries),
      self.key_block or attention_splash.block(self.keys),
    )

  @property
  def lengths(self) -> tuple[int, int]:
    """Queries and keys, padded to whole blocks."""
    block_q, block_kv = self.sizes
    return _padded(self.queries, block_q), _padded(self.keys, block_kv)

  def visited(self) -> np.ndarray:
    """Returns whether each block has a visible pair: [query, key] blocks."""
    (block_q, block_kv), (queries, keys) = self.sizes, self.lengths
    first = self.offset + np.arange(0, queries, block_q)[:, None]
    key = np.arange(0, keys, block_kv)[None]
    # Largest and smallest distance query - key in the block. A single visible
    # pair is enough: kernels compute whole blocks.
    largest, smallest = first + block_q - 1 - key, first - key - block_kv + 1
    visible = np.ones(largest.shape, bool)
    if self.behind is not None:
      visible &= smallest <= self.behind
    if self.ahead is not None:
      visible &= largest >= -self.ahead
    return visible

  @property
  def blocks(self) -> tuple[int, int]:
    """Number of visited blocks, in total and at most per row of blocks."""
    visited = self.visited()
    return int(visited.sum()), int(visited.sum(axis=1).max())

  def pairs(self) -> int:
    """Returns the number of (query, key) pairs in all visited blocks."""
    block_q, block_kv = self.sizes
    return self.blocks[0] * block_q * block_kv

  def on_shard(self, shards: int) -> 'Attention':
    """Returns the attention on the busiest device of a sharded sequence.

    Keys are gathered in full or as a halo: see `ops.attention_shards`.

    Args:
      shards: number of shards of the length.
    """
    if shards == 1:
      return self
    block_q, block_kv = (
      attention_splash.block(-(-n // shards)) for n in (self.queries, self.keys)
    )
    queries = _padded(self.queries, block_q * shards) // shards
    keys = _padded(self.keys, block_kv * shards)
    sides = self.behind, self.ahead
    # Without a mask, the shards have equal work.
    offsets = [0]
    if None not in sides and sum(sides) < keys - keys // shards:
      # A halo: the shard's first query has `behind` keys before it.
      keys = _padded(keys // shards + sum(sides), block_kv)
      offsets = [self.behind]
    elif sides != (None, None):
      # A one-sided mask leaves some shards fewer blocks; the slowest device
      # determines the step time.
      offsets = [i * queries for i in range(shards)]
    return max(
      (Attention(queries, keys, *sides, i, block_kv) for i in offsets),
      key=lambda attention: attention.blocks,
    )


def attentions(
  models: Iterable[model_config.ModelConfig],
  lengths: framing.Lengths,
  shards: int = 1,
) -> list[Attention]:
  """Returns the per-device attentions in one layer pattern of each stack.

  Args:
    models: configs of the program's models.
    lengths: tokens per row.
    shards: number of shards of the length.
  """
  calls = []
  for model in models:
    for name, side in model.architecture.sides(lengths.encoder > 0).items():
      stack, length = model.stacks[name], getattr(lengths, side)
      # `flops` only matches shapes, so one pattern represents all layers.
      calls += [
        Attention(length, length, *stack.mask(kind).reach)
        for kind in stack.pattern
      ]
      if stack.cross_width is not None:
        cross = Attention(length, lengths.encoder, None, None)
        calls += [cross] * len(stack.pattern)
  return [call.on_shard(shards) for call in calls]


def flops(
  calls: Iterable[hlo.Kernel], attentions: Sequence[Attention]
) -> float:
  """Returns per-device FLOPs of all kernel calls.

  Calls are matched to attentions by their lengths and by the number of blocks
  in the grid.

  Raises:
    UnknownProgramError: a kernel is unknown, or matches no attention of the
      model.
  """
  total = 0.0
  for call in calls:
    products = [n for name, n in _GPU_PRODUCTS.items() if name in call.name]
    if products:
      total += _gpu_flops(call, products[0], attentions)
      continue
    parts = [part for part in _PRODUCTS if f'_{part}_' in f'{call.name}_']
    if not parts or 'splash' not in call.name:
      raise hlo.UnknownProgramError(f'kernel {call.name!r} is not known')
    # The grid comes first, then queries and keys; operands such as segment ids
    # have fewer dimensions, or a last dimension of size 1.
    states = [shape for shape in call.operands if len(shape) >= 3]
    grid = states[0]
    query, key = [s for s in states[1:] if s[-1] > 1 and s != grid][:2]
    heads, queries, head_dim = query[-3:]
    matches = [a for a in attentions if a.lengths == (queries, key[-2])]
    # The grid is [1, queries, keys]. It has the maximum number of visited
    # blocks: of queries for gradients of keys, else of keys.
    axis, blocks = (0, grid[-2]) if parts[0] == 'dkv' else (1, grid[-1])
    exact = [a for a in matches if a.visited().sum(axis).max() == blocks]
    matches = exact or matches
    if not matches:
      raise hlo.UnknownProgramError(
        f'kernel {call.name!r} reads {queries} queries and {key[-2]} keys,'
        ' which no attention of the model does'
      )
    # Averages over matching attentions: the program does not tell them apart.
    pairs = sum(a.pairs() for a in matches) / len(matches)
    products = _PRODUCTS[parts[0]]
    if parts[0] == 'dkv' and call.results in _FUSED_RESULTS:
      products = _FUSED_PRODUCTS
    rows = math.prod(query[:-3])
    work = products * 2 * heads * head_dim * pairs
    total += rows * work * call.times
  return total


def head_dim(call: hlo.Kernel) -> int:
  """Returns the head dimension of a kernel: the last dimension of queries."""
  return [shape for shape in call.operands if len(shape) >= 3][0][-1]


def _gpu_flops(
  call: hlo.Kernel, products: int, attentions: Sequence[Attention]
) -> float:
  """Returns FLOPs of a call of a tokamax kernel.

  This is an upper bound for packed rows: the forward kernel skips keys of other
  segments, which depend on the data.
  """
  # Queries [..., T, N, H] and keys [..., S, K, H] come first.
  query, key = [shape for shape in call.operands if len(shape) >= 3][:2]
  queries, heads, head_dim = query[-3:]
  blocks = {'query_block': _GPU_BLOCK, 'key_block': _GPU_BLOCK}
  # Averages over attentions of the same lengths, as on TPUs.
  pairs = [
    dataclasses.replace(a, **blocks).pairs()
    for a in attentions
    if (a.queries, a.keys) == (queries, key[-3])
  ] or [queries * key[-3]]
  work = products * 2 * heads * head_dim * sum(pairs) / len(pairs)
  return math.prod(query[:-3]) * work * call.times


def _padded(length: int, multiple: int) -> int:
  return -(-length // multiple) * multiple
