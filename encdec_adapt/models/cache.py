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

_ENTRIES = ('batch', 'kv_length', 'kv_heads', 'head_dim')
# Logical axes of a cache's leaves by their number of dimensions: the index,
# segments and positions, keys and values of a layer, those of scanned layers.
_AXES = {
  0: (),
  2: ('batch', 'kv_length'),
  4: _ENTRIES,
  5: ('layers', *_ENTRIES),
}


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
  config: model_config.StackConfig, batch: int, length: int, dtype: str
) -> Cache:
  """Makes a cache of `length` entries per row, none of them visible."""
  shape = (batch, length, config.kv_heads, config.head_dim)

  def zeros(_: str, repeats: int | None) -> KeyValues:
    """Makes the entries of one layer, or of the scanned ones."""
    full = shape if repeats is None else (repeats, *shape)
    return KeyValues(key=jnp.zeros(full, dtype), value=jnp.zeros(full, dtype))

  cache = Cache(
    layers=layers_index.map_blocks(config, zeros),
    segments=jnp.zeros((batch, length), jnp.int32),
    positions=jnp.zeros((batch, length), jnp.int32),
    index=jnp.zeros((), jnp.int32),
  )
  return shard(cache)


def axes(cache: Any) -> Any:
  """Returns the logical axes of every leaf of caches (arrays or shapes)."""
  return jax.tree.map(lambda x: _AXES[x.ndim], cache)


def shard(cache: Any) -> Any:
  """Constrains every leaf of a cache by its logical axes."""
  return jax.tree.map(lambda x: partition.shard(x, *_AXES[x.ndim]), cache)


def write(entries: Any, new: Any, index: jax.Array) -> Any:
  """Writes `new` at `index` along axis 1 of every leaf of `entries`."""
  return jax.tree.map(
    lambda old, x: jax.lax.dynamic_update_slice_in_dim(
      old, x.astype(old.dtype), index, axis=1
    ),
    entries,
    new,
  )
