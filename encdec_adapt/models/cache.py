"""Key/value caches of incremental decoding.

A cache mirrors the parameter tree of its stack ('blocks/layer_j' with a
leading R, 'lead/layer_j' and 'tail/layer_j' without), so that it is scanned
along with it. Which entries are visible is decided by their segments and
positions alone: an entry never written has segment 0.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from encdec_adapt.models import layers_index, model_config
from encdec_adapt.ops import partition

# Logical axes of keys and values, and of segments and positions.
_ENTRIES = ('batch', 'kv_length', 'kv_heads', 'head_dim')
_ROWS = ('batch', 'kv_length')


@flax.struct.dataclass
class KeyValues:
  """Keys and values of one layer, [B, S, K, H]; [R, B, S, K, H] if scanned."""

  key: Any
  value: Any


@flax.struct.dataclass
class Cache:
  """Keys and values of self-attention.

  Attributes:
    layers: KeyValues by layer.
    segments: segment of every entry, int32 [B, length].
    positions: position of every entry, int32 [B, length].
    index: entries written so far, int32 scalar.
  """

  layers: dict[str, Any]
  segments: Any
  positions: Any
  index: Any


@flax.struct.dataclass
class CrossCache:
  """Keys and values of cross-attention, made once from an encoding.

  Attributes:
    layers: KeyValues by layer.
    segments: segments of the encoder's tokens, int32 [B, S].
  """

  layers: dict[str, Any]
  segments: Any


def empty(
  config: model_config.StackConfig, batch: int, length: int, dtype: jnp.dtype
) -> Cache:
  """Makes a cache of `length` entries per row, none of them visible."""
  shape = (batch, length, config.kv_heads, config.head_dim)

  def zeros(prefix: str, repeats: int | None) -> KeyValues:
    del prefix
    full = shape if repeats is None else (repeats, *shape)
    return KeyValues(key=jnp.zeros(full, dtype), value=jnp.zeros(full, dtype))

  cache = Cache(
    layers=layers_index.map_blocks(config, zeros),
    segments=jnp.zeros((batch, length), jnp.int32),
    positions=jnp.zeros((batch, length), jnp.int32),
    index=jnp.zeros((), jnp.int32),
  )
  return shard(cache, axes(config))


def axes(config: model_config.StackConfig) -> Cache:
  """Returns the logical axes of every leaf of a cache made by `empty`."""
  return Cache(
    layers=layers_index.map_blocks(config, _entry_axes),
    segments=_ROWS,
    positions=_ROWS,
    index=(),
  )


def cross_axes(config: model_config.StackConfig) -> CrossCache:
  """Returns the axes of a cross-attention cache; None for layers without."""

  def entry(prefix: str, repeats: int | None) -> KeyValues | None:
    kind = layers_index.block_kind(config, prefix)
    reads = config.reads_encoder(kind)
    return _entry_axes(prefix, repeats) if reads else None

  return CrossCache(
    layers=layers_index.map_blocks(config, entry), segments=_ROWS
  )


def _entry_axes(prefix: str, repeats: int | None) -> KeyValues:
  del prefix
  names = _ENTRIES if repeats is None else ('layers', *_ENTRIES)
  return KeyValues(key=names, value=names)


def shard(cache: Any, names: Any) -> Any:
  """Constrains every leaf of a cache by its logical axes."""
  return jax.tree.map(lambda x, axes: partition.shard(x, *axes), cache, names)


def write(entries: Any, new: Any, index: jax.Array) -> Any:
  """Writes `new` at `index` along axis 1 of every leaf of `entries`."""
  return jax.tree.map(
    lambda old, x: jax.lax.dynamic_update_slice_in_dim(
      old, x.astype(old.dtype), index, axis=1
    ),
    entries,
    new,
  )
