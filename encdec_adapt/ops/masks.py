"""Attention masks as data.

A `MaskSpec` describes the visible keys of each query with a few vectors per row
instead of a dense [T, S] array. A backend of `ops.attention` supports a spec or
refuses it. `dense_mask` defines its meaning; the XLA backends apply it to a
block of queries.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WINDOW_RULES = ('exclusive', 'inclusive', 'centered')

Keys = tuple[Int[Array, 'B S'], Int[Array, 'B S']]


@flax.struct.dataclass(kw_only=True)
class MaskSpec:
  """Defines which keys are visible to each query.

  Key k is visible to query q iff all of these hold:
    - q_segments[q] == kv_segments[k] and neither is 0 (padding);
    - kind 'causal': kv_positions[k] <= q_positions[q];
    - kind 'prefix': the same, or kv_prefix[k] is set: the prefix of a segment
      is bidirectional and the remainder causal;
    - a window W: for 'causal', kv position > q position - W (W keys, including
      the query's position); for 'prefix', |q - k| < W; for 'full',
      |q - k| < W ('exclusive', the rule of the T5Gemma authors' code),
      |q - k| <= W ('inclusive', transformers 5.23 eager), or the W keys from
      q - ceil(W/2) + 1 to q + floor(W/2) ('centered', T5Gemma 2).
  Only segments apply to the last `memory` keys: they are visible from every
  position (encoder keys next to the decoder's).
  Positions are compared, not indices, so packed rows with restarting positions
  and caches in any order need no special case.

  Attributes:
    kind: 'causal', 'prefix' or 'full'.
    window: W in positions, at least 1, or None for no window.
    window_rule: one of WINDOW_RULES; only for kind 'full'.
    memory: number of keys, at the end, visible from any position.
    aligned: queries and keys are the same tokens, and positions increase by 1
      per token within a segment, so that kernels may compare indices instead of
      positions. The creator of the mask guarantees this.
    q_segments: [B, T] int32, 0 for padding.
    kv_segments: [B, S] int32, 0 for padding.
    q_positions: [B, T] int32; may be None where positions are not used (kind
      'full' without a window).
    kv_positions: [B, S] int32; None as `q_positions`.
    kv_prefix: [B, S] int32, 1 at keys of a prefix; only for kind 'prefix'.
    offset: index of the first query among the keys, where both are consecutive
      but unaligned tokens; else None. Only relative biases use it.
  """

  kind: str = flax.struct.field(pytree_node=False)
  window: int | None = flax.struct.field(pytree_node=False, default=None)
  window_rule: str = flax.struct.field(pytree_node=False, default='exclusive')
  memory: int = flax.struct.field(pytree_node=False, default=0)
  aligned: bool = flax.struct.field(pytree_node=False, default=False)
  # Any: tree maps put specs, shapes and shardings in the place of arrays.
  q_segments: Any
  kv_segments: Any
  q_positions: Any = None
  kv_positions: Any = None
  kv_prefix: Any = None
  offset: Any = None

  @property
  def needs_positions(self) -> bool:
    """Whether visibility depends on positions."""
    return self.kind != 'full' or self.window is not None

  @property
  def first_query(self) -> Any:
    """Index of the first query among the keys; None if unknown."""
    return 0 if self.aligned and self.offset is None else self.offset

  @property
  def reach(self) -> tuple[int | None, int | None]:
    """Number of visible positions before and after a query; None for all."""
    if self.kind == 'causal':
      return None if self.window is None else self.window - 1, 0
    rule = self.window_rule if self.kind == 'full' else 'exclusive'
    return sides(self.window, rule)


def sides(window: int | None, rule: str) -> tuple[int | None, int | None]:
  """Returns the `reach` of a bidirectional window."""
  if window is None:
    return None, None
  return {
    'exclusive': (window - 1, window - 1),
    'inclusive': (window, window),
    'centered': ((window + 1) // 2 - 1, window // 2),
  }[rule]


def causal(
  segments: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  *,
  window: int | None = None,
  keys: Keys | None = None,
  aligned: bool = False,
) -> MaskSpec:
  """Returns the mask of causal self-attention, with a window of `window` keys.

  `keys` are segments and positions of cache entries, None if queries and keys
  are the same tokens; `aligned` as in `MaskSpec`.
  """
  kv_segments, kv_positions = keys or (segments, positions)
  return MaskSpec(
    kind='causal',
    window=window,
    aligned=aligned,
    q_segments=segments,
    kv_segments=kv_segments,
    q_positions=positions,
    kv_positions=kv_positions,
  )


def bidirectional(
  segments: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  *,
  window_rule: str = 'exclusive',
  **options: Any,
) -> MaskSpec:
  """Returns the mask of bidirectional self-attention.

  `window_rule` is one of WINDOW_RULES; `options` as in `causal`.
  """
  spec = causal(segments, positions, **options)
  return spec.replace(kind='full', window_rule=window_rule)


def prefix(
  segments: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  kv_prefix: Int[Array, 'B S'],
  **options: Any,
) -> MaskSpec:
  """Returns the mask of a prefix decoder; `options` as in `causal`.

  `kv_prefix` is 1 at keys visible to every query of their segment.
  """
  spec = causal(segments, positions, **options)
  return spec.replace(kind='prefix', kv_prefix=kv_prefix)


def cross(
  q_segments: Int[Array, 'B T'], kv_segments: Int[Array, 'B S']
) -> MaskSpec:
  """Returns the mask of cross-attention: all keys of the query's segment."""
  return MaskSpec(kind='full', q_segments=q_segments, kv_segments=kv_segments)


def with_memory(spec: MaskSpec, memory_segments: Int[Array, 'B M']) -> MaskSpec:
  """Extends a mask by M keys without a position."""
  extend = functools.partial(jnp.concatenate, axis=1)
  zeros = jnp.zeros_like(memory_segments)  # Never compared, given `memory`.
  return spec.replace(
    kv_segments=extend([spec.kv_segments, memory_segments]),
    kv_positions=extend([spec.kv_positions, zeros]),
    # Queries and keys are no longer the same tokens.
    aligned=False,
    memory=memory_segments.shape[1],
  )


def pad_length(x: jax.Array, multiple: int) -> jax.Array:
  """Pads dimension 1 with zeros; segment 0 is padding."""
  padding = [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, padding)


def dense_mask(spec: MaskSpec) -> Bool[Array, 'B T S']:
  """Expands a mask to a dense array; defines its meaning.

  Args:
    spec: a mask with arrays [B, T] and [B, S].

  Returns:
    [B, T, S] bool, True where the key is visible to the query.
  """
  q_segments = spec.q_segments[:, :, None]  # [B, T, 1]
  kv_segments = spec.kv_segments[:, None, :]  # [B, 1, S]
  visible = (q_segments == kv_segments) & (q_segments != 0)  # [B, T, S]
  if not spec.needs_positions:
    return visible
  # Distance from the key to the query; negative for later keys.
  behind = spec.q_positions[:, :, None] - spec.kv_positions[:, None, :]
  past, future = spec.reach
  near = jnp.ones_like(visible)
  if past is not None:
    near &= behind <= past
  if future is not None:
    near &= -behind <= future
  # The reach of a prefix mask is two-sided: hide later keys of the causal part.
  if spec.kind == 'prefix':
    near &= (behind >= 0) | (spec.kv_prefix[:, None, :] > 0)
  if spec.memory:
    keys = spec.kv_segments.shape[1]
    near |= jnp.arange(keys) >= keys - spec.memory
  return visible & near


def zero_queries_without_keys(
  x: Float[Array, 'B T N H'], spec: MaskSpec
) -> Float[Array, 'B T N H']:
  """Zeroes outputs of queries without keys, which kernels leave undefined.

  Args:
    x: outputs of attention.
    spec: an aligned mask, or a full mask without a window.

  Returns:
    The outputs, [B, T, N, H].
  """
  sees = spec.q_segments > 0  # [B, T]
  if not spec.aligned:  # Otherwise a query sees itself.
    sees &= jnp.any(dense_mask(spec), axis=-1)
  return jnp.where(sees[:, :, None, None], x, 0)
