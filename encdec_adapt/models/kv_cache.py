"""Key/value caches of incremental decoding.

Every row has an index, so that rows of a batch may be at different positions.
The slots of a layer form a ring: the entry of position p is at slot p modulo
the number of slots, which is the length of a row in global layers and at least
the window in local layers. The row's index alone determines the contents of a
slot.

Keys and values are [B, K, slots, H], the layout of a query's products, so no
product transposes a cache. In merged attention the encoder's keys and values
follow in the same array.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from encdec_adapt.models import layers_index, model_config
from encdec_adapt.ops import partition, products

# Slots of a local layer are a multiple of this, to divide over the devices of a
# sequence axis.
_MULTIPLE = 16
_AXES = ('batch', 'kv_heads', 'kv_length', 'head_dim')


@flax.struct.dataclass
class KeyValues:
  """Keys and values of a layer.

  [B, S, K, H] as projected, [B, K, slots, H] in a cache.
  """

  # Any: tree maps put shapes and shardings in the place of arrays.
  key: Any
  value: Any


@flax.struct.dataclass
class Cache:
  """Keys and values of a decoder.

  Attributes:
    layers: KeyValues of self-attention by layer.
    cross: KeyValues of cross-attention by layer, None for layers without it;
      None without an encoder and in merged attention.
    encoder_segments: 1 at the encoder's tokens, 0 at padding, int32 [B,
      source]; None without an encoder.
    index: position of the next token of each row, int32 [B].
    length: maximum positions of a row.
  """

  layers: dict[str, Any]
  cross: Any
  encoder_segments: Any
  index: Any
  # Static, since shapes follow from it; the array of a stack with local layers
  # only does not show it.
  length: int = flax.struct.field(pytree_node=False)

  @property
  def source(self) -> int:
    """Maximum tokens of the encoder per row; 0 without an encoder."""
    segments = self.encoder_segments
    return 0 if segments is None else segments.shape[1]


def slots(
  config: model_config.StackConfig, kind: model_config.LayerKind, length: int
) -> int:
  """Returns the slots per row in layers of a kind, for `length` positions."""
  if kind == 'global':
    return length
  # A query sees itself and the W - 1 tokens before it, so that W slots suffice;
  # the mask hides the older entries of a ring that was rounded up. A row
  # shorter than the ring never wraps around.
  return min(length, -(-config.window // _MULTIPLE) * _MULTIPLE)


def slot_positions(last: Int[Array, 'B'], count: int) -> Int[Array, 'B slots']:
  """Returns the position stored in each slot.

  Args:
    last: newest position of each row.
    count: number of slots.

  Returns:
    The newest position up to `last` of each slot; negative for unused slots.
  """
  last = last[:, None]
  # The remainder of a negative number is positive in jnp, as in Python: slots
  # ahead of a row that has not wrapped around yet get `slot - count`.
  return last - (last - jnp.arange(count)) % count


def empty(
  config: model_config.StackConfig,
  batch: int,
  length: int,
  source: int,
  dtype: str,
) -> Cache:
  """Returns an empty cache of a decoder.

  Args:
    config: the decoder's stack; its layers are not scanned.
    batch: rows.
    length: positions of a row.
    source: tokens of the encoder per row; 0 without an encoder.
    dtype: dtype of keys and values.
  """

  def zeros(count: int) -> KeyValues:
    shape = (batch, config.kv_heads, count, config.head_dim)
    return KeyValues(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

  def make_self(prefix: str, _: int | None) -> KeyValues:
    kind = layers_index.block_kind(config, prefix)
    # Behind the ring, out of reach of every position's slot.
    memory = source if config.cross_merged and config.reads_encoder(kind) else 0
    return zeros(slots(config, kind, length) + memory)

  def make_cross(prefix: str, _: int | None) -> KeyValues | None:
    kind = layers_index.block_kind(config, prefix)
    return zeros(source) if config.reads_encoder(kind) else None

  cross = segments = None
  if config.cross_width is not None:
    segments = jnp.zeros((batch, source), jnp.int32)
    if not config.cross_merged:
      cross = layers_index.map_blocks(config, make_cross)
  return shard(
    Cache(
      layers=layers_index.map_blocks(config, make_self),
      cross=cross,
      encoder_segments=segments,
      index=jnp.zeros(batch, jnp.int32),
      length=length,
    )
  )


def axes(cache: Any) -> Any:
  """Returns the logical axes of every leaf of a cache (arrays or shapes)."""
  # Ranks differ: `index`, `encoder_segments`, keys and values.
  names = {1: ('batch',), 2: ('batch', 'kv_length'), 4: _AXES}
  return jax.tree.map(lambda x: names[x.ndim], cache)


def shard(cache: Any) -> Any:
  """Constrains every leaf of a cache by its logical axes."""
  # `cache` comes first, so that the map ends at its leaves.
  return jax.tree.map(
    lambda x, names: partition.shard(x, *names), cache, axes(cache)
  )


def write(
  entries: KeyValues, new: KeyValues, slot: Int[Array, 'B']
) -> KeyValues:
  """Writes a token's keys and values [B, 1, K, H] at each row's slot."""

  def write_rows(rows: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    if len(i) > 1:
      # Every row has another position, and so another slot.
      return jax.vmap(write_row)(rows, x, i)
    if not products.on_cpu():
      # Mapped over one row, XLA:GPU would select the values in a kernel first.
      return write_row(rows[0], x[0], i[0])[None]
    # By heads: XLA:CPU turns a scatter of one index into an update that it
    # fuses with each reader, and copies the cache for all but one of them.
    heads = jnp.arange(rows.shape[1])
    return rows.at[0, heads, i].set(x[0, :, 0], mode='promise_in_bounds')

  def write_row(row: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(row, x, i, axis=1)

  return jax.tree.map(
    lambda old, x: write_rows(old, x.swapaxes(1, 2).astype(old.dtype), slot),
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
  """Replaces rows of a cache by the entries of prompts.

  Args:
    config: the decoder's stack; its layers are not scanned.
    cache: the cache.
    rows: rows to replace; those beyond the batch are dropped.
    prompt: keys and values of a decoder's prompts by layer, [b, L, K, H]; None
      if the decoder has read nothing.
    lengths: tokens of each prompt, at least 1; the first decoding step writes
      the last entry again, at index `lengths - 1`.
    cross: keys and values of an encoding by layer, [b, S, K, H].
    encoder_segments: segments of the encoder's tokens; S is at most the
      cache's source.
  """

  def put(old: jax.Array, new: jax.Array, start: int = 0) -> jax.Array:
    """Replaces n slots from `start` by [b, n, K, H]."""
    new = new.swapaxes(1, 2).astype(old.dtype)
    # Rows beyond the batch pad a group of prompts to the size of its compiled
    # program (`inference.decoding.Group`).
    return old.at[rows, :, start : start + new.shape[2]].set(new, mode='drop')

  # Slots behind the entries that are put keep those of the row's last prompt:
  # the new index makes their positions negative, and the new segments are 0
  # there, so that masks hide them.
  def put_layer(prefix: str, _: int | None) -> KeyValues:
    entries = layers_index.get_block(cache.layers, prefix)
    kind = layers_index.block_kind(config, prefix)
    count = slots(config, kind, cache.length)
    if prompt is not None:
      # Gathered by slot, not scattered by position: in a prompt longer than the
      # ring several positions share a slot, and the newest must win.
      positions = slot_positions(lengths - 1, count)[:, :, None, None]
      new = jax.tree.map(
        # A slot without a position gets any entry; masks hide it.
        lambda x: jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=1),
        layers_index.get_block(prompt, prefix),
      )
      entries = jax.tree.map(put, entries, new)
    if config.cross_merged and config.reads_encoder(kind):
      memory = layers_index.get_block(cross, prefix)
      entries = jax.tree.map(lambda o, n: put(o, n, count), entries, memory)
    return entries

  replaced = {'layers': layers_index.map_blocks(config, put_layer)}
  # A prompt leaves only keys and values: its last token is read again, to
  # predict the first generated token.
  start = jnp.zeros_like(rows) if lengths is None else lengths - 1
  replaced['index'] = cache.index.at[rows].set(start, mode='drop')
  if cache.cross is not None:
    replaced['cross'] = jax.tree.map(put, cache.cross, cross)
  if encoder_segments is not None:
    # Written to the full width, so that the end of a longer source that the row
    # had before becomes padding.
    padding = cache.source - encoder_segments.shape[1]
    segments = jnp.pad(encoder_segments, [(0, 0), (0, padding)])
    replaced['encoder_segments'] = cache.encoder_segments.at[rows].set(
      segments, mode='drop'
    )
  return shard(cache.replace(**replaced))


def resize(
  config: model_config.StackConfig, cache: Cache, length: int, source: int
) -> Cache:
  """Changes the lengths of a cache; rows in use must fit the new lengths.

  Args:
    config: the decoder's stack; its layers are not scanned.
    cache: the cache.
    length: positions of a row.
    source: tokens of the encoder per row.
  """

  def fit(x: jax.Array, size: int, axis: int = 2) -> jax.Array:
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis], 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), padding)

  # The number of slots changes only if the shorter row fits into its ring. Rows
  # in use fit the shorter row, so that none has wrapped around: position p has
  # slot p before and after, and a cut removes slots that no row uses.
  def fit_layer(prefix: str, _: int | None) -> KeyValues:
    kind = layers_index.block_kind(config, prefix)
    old, new = (slots(config, kind, n) for n in (cache.length, length))

    def fit_slots(x: jax.Array) -> jax.Array:
      ring = fit(x[:, :, :old], new)
      if x.shape[2] == old:
        return ring
      # The entries of the encoder follow the end of the ring.
      return jnp.concatenate([ring, fit(x[:, :, old:], source)], axis=2)

    return jax.tree.map(fit_slots, layers_index.get_block(cache.layers, prefix))

  segments = cache.encoder_segments
  return shard(
    cache.replace(
      layers=layers_index.map_blocks(config, fit_layer),
      cross=jax.tree.map(lambda x: fit(x, source), cache.cross),
      encoder_segments=None if segments is None else fit(segments, source, 1),
      length=length,
    )
  )


def take_rows(cache: Cache, rows: Int[Array, 'b']) -> Cache:
  """Returns a cache of these rows."""
  return shard(jax.tree.map(lambda x: x[rows], cache))


def reorder(cache: Cache, rows: Int[Array, 'B']) -> Cache:
  """Exchanges the generated entries of rows with equal prompts and lengths."""
  # Rows with equal prompts and lengths have equal cross-attention, segments and
  # indices: no copies needed.
  layers = jax.tree.map(lambda x: x[rows], cache.layers)
  return shard(cache.replace(layers=layers))


def transposed(entries: KeyValues) -> KeyValues:
  """Returns the entries of a cache in attention's layout, [B, S, K, H]."""
  return jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
