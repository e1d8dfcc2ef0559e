"""Key/value caches of incremental decoding.

Every row has an index of its own, so that rows of one batch may be at
different positions. The entry of position p is at slot p modulo the number of
slots of its layer: all positions of a row in global layers, the window in
local ones. What a slot holds follows from the row's index alone.

Keys and values are [B, K, slots, H], as the products of one query read them:
no product transposes a cache. In merged attention the encoder's keys and
values follow in the same array.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from encdec_adapt.models import layers_index, model_config
from encdec_adapt.ops import partition

# Slots of a local layer are a multiple of this, so that they divide over the
# devices of a sequence axis.
_MULTIPLE = 16
_AXES = ('batch', 'kv_heads', 'kv_length', 'head_dim')


@flax.struct.dataclass
class KeyValues:
  """Keys and values of one layer.

  [B, S, K, H] as projected, [B, K, slots, H] in a cache.
  """

  key: Any
  value: Any


@flax.struct.dataclass
class Cache:
  """Keys and values of a decoder.

  Attributes:
    layers: KeyValues of self-attention by layer.
    cross: KeyValues of cross-attention by layer, None for layers without;
      None without an encoder, and in merged attention.
    encoder_segments: 1 at the encoder's tokens, 0 at padding, int32 [B,
      source]; None without an encoder.
    index: position of the next token of each row, int32 [B].
    length: positions that a row may have.
  """

  layers: dict[str, Any]
  cross: Any
  encoder_segments: Any
  index: Any
  length: int = flax.struct.field(pytree_node=False)

  @property
  def source(self) -> int:
    """Tokens of the encoder that a row may have, 0 without an encoder."""
    segments = self.encoder_segments
    return 0 if segments is None else segments.shape[1]


def slots(
  config: model_config.StackConfig, kind: model_config.LayerKind, length: int
) -> int:
  """Returns the slots per row in layers of a kind, for `length` positions."""
  if kind == 'global':
    return length
  return min(length, -(-config.window // _MULTIPLE) * _MULTIPLE)


def slot_positions(last: Int[Array, 'B'], count: int) -> Int[Array, 'B slots']:
  """Returns the position that each slot holds.

  Args:
    last: newest position of each row.
    count: number of slots.

  Returns:
    The newest position up to `last` that belongs into each slot; negative
    where there is none yet.
  """
  last = last[:, None]
  return last - (last - jnp.arange(count)) % count


def empty(
  config: model_config.StackConfig,
  batch: int,
  length: int,
  source: int,
  dtype: str,
) -> Cache:
  """Makes the cache of a decoder that has read nothing.

  Args:
    config: the decoder's stack; its layers are not scanned.
    batch: rows.
    length: positions of a row.
    source: tokens of the encoder per row; 0 without one.
    dtype: dtype of keys and values.
  """

  def zeros(count: int) -> KeyValues:
    """Makes the slots of one layer."""
    shape = (batch, config.kv_heads, count, config.head_dim)
    return KeyValues(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

  def make_self(prefix: str, _: int | None) -> KeyValues:
    """Makes the slots of self-attention, and of merged attention."""
    kind = layers_index.block_kind(config, prefix)
    memory = source if config.cross_merged and config.reads_encoder(kind) else 0
    return zeros(slots(config, kind, length) + memory)

  def make_cross(prefix: str, _: int | None) -> KeyValues | None:
    """Makes the slots of cross-attention."""
    kind = layers_index.block_kind(config, prefix)
    return zeros(source) if config.reads_encoder(kind) else None

  has_cross = config.cross_width is not None and not config.cross_merged
  return shard(
    Cache(
      layers=layers_index.map_blocks(config, make_self),
      cross=layers_index.map_blocks(config, make_cross) if has_cross else None,
      encoder_segments=jnp.zeros((batch, source), jnp.int32)
      if config.cross_width is not None
      else None,
      index=jnp.zeros(batch, jnp.int32),
      length=length,
    )
  )


def axes(cache: Any) -> Any:
  """Returns the logical axes of every leaf of a cache (arrays or shapes)."""
  names = {1: ('batch',), 2: ('batch', 'kv_length'), 4: _AXES}
  return jax.tree.map(lambda x: names[x.ndim], cache)


def shard(cache: Any) -> Any:
  """Constrains every leaf of a cache by its logical axes."""
  names = axes(cache)
  return jax.tree.map(lambda x, name: partition.shard(x, *name), cache, names)


def write(
  entries: KeyValues, new: KeyValues, slot: Int[Array, 'B']
) -> KeyValues:
  """Writes one token's keys and values [B, 1, K, H] at each row's slot."""

  def write_row(row: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    """Writes [K, 1, H] into [K, slots, H]."""
    return jax.lax.dynamic_update_slice_in_dim(row, x, i, axis=1)

  return jax.tree.map(
    lambda old, x: jax.vmap(write_row)(
      old, x.swapaxes(1, 2).astype(old.dtype), slot
    ),
    entries,
    new,
  )


def insert(
  config: model_config.StackConfig,
  cache: Cache,
  rows: Int[Array, 'b'],
  *,
  prompt: Any = None,
  lengths: Int[Array, 'b'] | None = None,
  cross: Any = None,
  encoder_segments: Int[Array, 'b S'] | None = None,
) -> Cache:
  """Replaces rows of a cache by what prompts left.

  Args:
    config: the decoder's stack; its layers are not scanned.
    cache: the cache.
    rows: rows to replace; those beyond the batch are dropped.
    prompt: keys and values of a decoder's prompts by layer, [b, L, K, H]; None
      where the decoder starts from nothing.
    lengths: tokens of each of those prompts, at least 1; the last one's entry
      is written again by the first decoding step, at index `lengths - 1`.
    cross: keys and values of an encoding by layer, [b, S, K, H].
    encoder_segments: segments of the encoder's tokens; S is at most the
      cache's source.
  """

  def put(old: jax.Array, new: jax.Array, start: int) -> jax.Array:
    """Replaces slots from `start` by [b, n, K, H], n of them."""
    new = new.swapaxes(1, 2).astype(old.dtype)
    stop = start + new.shape[2]
    return old.at[rows, :, start:stop].set(new, mode='drop')

  def put_layer(prefix: str, _: int | None) -> KeyValues:
    """Fills one layer of self-attention."""
    entries = layers_index.get_block(cache.layers, prefix)
    kind = layers_index.block_kind(config, prefix)
    count = slots(config, kind, cache.length)
    if prompt is not None:
      source = slot_positions(lengths - 1, count)[:, :, None, None]
      new = jax.tree.map(
        # A slot without a position gets any entry; masks hide it.
        lambda x: jnp.take_along_axis(x, jnp.maximum(source, 0), axis=1),
        layers_index.get_block(prompt, prefix),
      )
      entries = jax.tree.map(lambda o, n: put(o, n, 0), entries, new)
    if config.cross_merged and config.reads_encoder(kind):
      memory = layers_index.get_block(cross, prefix)
      entries = jax.tree.map(lambda o, n: put(o, n, count), entries, memory)
    return entries

  replaced = {'layers': layers_index.map_blocks(config, put_layer)}
  start = jnp.zeros_like(rows) if lengths is None else lengths - 1
  replaced['index'] = cache.index.at[rows].set(start, mode='drop')
  if cache.cross is not None:
    replaced['cross'] = jax.tree.map(
      lambda o, n: put(o, n, 0), cache.cross, cross
    )
  if encoder_segments is not None:
    padding = cache.source - encoder_segments.shape[1]
    segments = jnp.pad(encoder_segments, [(0, 0), (0, padding)])
    replaced['encoder_segments'] = cache.encoder_segments.at[rows].set(
      segments, mode='drop'
    )
  return shard(cache.replace(**replaced))


def resize(
  config: model_config.StackConfig, cache: Cache, length: int, source: int
) -> Cache:
  """Gives a cache other lengths, which its rows in use must fit.

  Args:
    config: the decoder's stack; its layers are not scanned.
    cache: the cache.
    length: positions of a row.
    source: tokens of the encoder per row.
  """

  def fit(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Cuts or pads an axis at its end."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)

  def fit_layer(prefix: str, _: int | None) -> KeyValues:
    """Resizes one layer of self-attention."""
    kind = layers_index.block_kind(config, prefix)
    before, after = (slots(config, kind, n) for n in (cache.length, length))

    def of(x: jax.Array) -> jax.Array:
      """Resizes the slots of tokens and those of the encoder apart."""
      own = fit(x[:, :, :before], after, axis=2)
      if x.shape[2] == before:
        return own
      return jnp.concatenate([own, fit(x[:, :, before:], source, axis=2)], 2)

    return jax.tree.map(of, layers_index.get_block(cache.layers, prefix))

  segments = cache.encoder_segments
  return shard(
    cache.replace(
      layers=layers_index.map_blocks(config, fit_layer),
      cross=jax.tree.map(lambda x: fit(x, source, axis=2), cache.cross),
      encoder_segments=None
      if segments is None
      else fit(segments, source, axis=1),
      length=length,
    )
  )


def take_rows(cache: Cache, rows: Int[Array, 'b']) -> Cache:
  """Returns a cache of these rows."""
  return shard(jax.tree.map(lambda x: x[rows], cache))


def reorder(cache: Cache, rows: Int[Array, 'B']) -> Cache:
  """Exchanges what rows with equal prompts and lengths have generated."""
  layers = jax.tree.map(lambda x: x[rows], cache.layers)
  return shard(cache.replace(layers=layers))


def transposed(entries: KeyValues) -> KeyValues:
  """Returns the entries of a cache as attention takes them, [B, S, K, H]."""
  return jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
