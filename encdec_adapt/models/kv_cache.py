"""Key/value caches for incremental decoding.

Every row has its own index, so rows of a batch may be at different positions.
The slots of a layer form a ring buffer: position p is at slot p modulo the
number of slots, which is the length of a row in global layers and at least the
window in local layers. A row's index alone determines the position in each
slot.

Keys and values are [B, K, slots, H], the layout of a query's products: no
product transposes a cache. In merged attention the encoder's keys and values
follow in the same array.

The modules that read caches (`attention_layer`, `stack`) import this module.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from encdec_adapt.models import layers_index, model_config
from encdec_adapt.ops import partition, products

# Local layers have a multiple of this many slots, to be divisible over the
# devices of a sequence axis.
_MULTIPLE = 16
_AXES = ('batch', 'kv_heads', 'kv_length', 'head_dim')


@flax.struct.dataclass
class KeyValues:
  """Keys and values of a layer.

  [B, S, K, H] after projection, [B, K, slots, H] in a cache.
  """

  # Any: tree maps put shapes and shardings in the place of arrays.
  key: Any
  value: Any


@flax.struct.dataclass
class Cache:
  """Keys and values of a decoder.

  Attributes:
    layers: KeyValues of self-attention by layer, None for layers that share
      those of others.
    cross: KeyValues of cross-attention by layer, None for layers without it;
      None without an encoder, and in merged attention.
    encoder_segments: 1 at the encoder's tokens, 0 at padding, int32 [B,
      source]; None without an encoder.
    index: position of the next token of each row, int32 [B].
    length: maximum positions per row.
  """

  layers: dict[str, Any]
  cross: Any
  encoder_segments: Any
  index: Any
  # Static: shapes depend on it, and shapes of local layers do not determine it.
  length: int = flax.struct.field(pytree_node=False)

  @property
  def source(self) -> int:
    """Maximum encoder tokens per row; 0 without an encoder."""
    segments = self.encoder_segments
    return 0 if segments is None else segments.shape[1]


def slots(
  config: model_config.StackConfig, kind: model_config.LayerKind, length: int
) -> int:
  """Returns the slots per row in layers of a kind, for `length` positions."""
  if kind == 'global':
    return length
  # A query sees itself and the W - 1 tokens before it, so W slots suffice; the
  # mask hides older entries of a ring rounded up. Rows shorter than the ring
  # never wrap around.
  return min(length, -(-config.window // _MULTIPLE) * _MULTIPLE)


def slot_positions(last: Int[Array, 'B'], count: int) -> Int[Array, 'B slots']:
  """Returns the position in each slot.

  Args:
    last: newest position of each row.
    count: number of slots.

  Returns:
    The newest position of each slot up to `last`; negative for empty slots.
  """
  last = last[:, None]
  # Remainders of negative numbers are positive in jnp, as in Python: slots
  # ahead of a row that has not wrapped around yet get `slot - count`.
  return last - (last - jnp.arange(count)) % count


def empty(
  config: model_config.StackConfig,
  batch: int,
  length: int,
  source: int,
  dtype: str,
) -> Cache:
  """Returns an empty cache.

  Args:
    config: the decoder's stack, unscanned.
    batch: number of rows.
    length: positions per row.
    source: encoder tokens per row; 0 without an encoder.
    dtype: dtype of keys and values.
  """

  def zeros(kind: model_config.LayerKind, count: int) -> KeyValues:
    stack = config.of_kind(kind)
    shape = (batch, stack.kv_heads, count, stack.head_dim)
    return KeyValues(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

  def make_self(prefix: str, _: int | None) -> KeyValues | None:
    if layers_index.shares(prefix):
      return None
    kind = layers_index.block_kind(config, prefix)
    # After the ring, beyond the slot of any position.
    memory = source if config.cross_merged and config.reads_encoder(kind) else 0
    return zeros(kind, slots(config, kind, length) + memory)

  def make_cross(prefix: str, _: int | None) -> KeyValues | None:
    kind = layers_index.block_kind(config, prefix)
    has_keys = config.reads_encoder(kind) and not layers_index.shares(prefix)
    return zeros(kind, source) if has_keys else None

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
  # Leaves differ in rank: `index`, `encoder_segments`, keys and values.
  names = {1: ('batch',), 2: ('batch', 'kv_length'), 4: _AXES}
  return jax.tree.map(lambda x: names[x.ndim], cache)


def shard(cache: Any) -> Any:
  """Constrains the sharding of every leaf to its logical axes."""
  # `names` arrives as a tuple: the map stops at the leaves of `cache`.
  return jax.tree.map(
    lambda x, names: partition.shard(x, *names), cache, axes(cache)
  )


def write(
  entries: KeyValues, new: KeyValues, slot: Int[Array, 'B']
) -> KeyValues:
  """Writes a token's keys and values [B, 1, K, H] at each row's slot."""

  def write_rows(rows: jax.Array, x: jax.Array, i: jax.Array) -> jax.Array:
    if len(i) > 1:
      # Each row has its own position, hence its own slot.
      return jax.vmap(write_row)(rows, x, i)
    if not products.on_cpu():
      # With vmap over one row, XLA:GPU would first select values in a kernel.
      return write_row(rows[0], x[0], i[0])[None]
    # Scatters by head: XLA:CPU would turn a scatter with a single index into an
    # update fused with each reader, and copy the cache for all but one reader.
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
    config: the decoder's stack, unscanned.
    cache: the cache.
    rows: rows to replace; rows beyond the batch are dropped.
    prompt: keys and values of the decoder's prompts by layer, [b, L, K, H];
      None if the decoder starts empty.
    lengths: tokens per prompt, at least 1; the first decoding step rewrites the
      last entry, at index `lengths - 1`.
    cross: keys and values of an encoding by layer, [b, S, K, H].
    encoder_segments: segments of the encoder's tokens; S is at most the
      cache's source.
  """

  def put(old: jax.Array, new: jax.Array, start: int = 0) -> jax.Array:
    """Replaces n slots from `start` on by [b, n, K, H]."""
    new = new.swapaxes(1, 2).astype(old.dtype)
    # Rows beyond the batch pad a group of prompts to the compiled size
    # (`inference.decoding.Group`).
    return old.at[rows, :, start : start + new.shape[2]].set(new, mode='drop')

  # Later slots keep entries of the row's previous prompt. Masks hide them: the
  # new index makes their positions negative, and the new segments are 0 there.
  def put_layer(prefix: str, _: int | None) -> KeyValues | None:
    entries = layers_index.get_block(cache.layers, prefix)
    if entries is None:
      return None
    kind = layers_index.block_kind(config, prefix)
    count = slots(config, kind, cache.length)
    if prompt is not None:
      # Gathers by slot instead of scattering by position: in prompts longer
      # than the ring, positions share slots, and the newest must win.
      positions = slot_positions(lengths - 1, count)[:, :, None, None]
      new = jax.tree.map(
        # Empty slots get arbitrary entries; masks hide them.
        lambda x: jnp.take_along_axis(x, jnp.maximum(positions, 0), axis=1),
        layers_index.get_block(prompt, prefix),
      )
      entries = jax.tree.map(put, entries, new)
    if config.cross_merged and config.reads_encoder(kind):
      memory = layers_index.get_block(cross, prefix)
      entries = jax.tree.map(lambda o, n: put(o, n, count), entries, memory)
    return entries

  replaced = {'layers': layers_index.map_blocks(config, put_layer)}
  # The prefill keeps only keys and values: the last token is read again for its
  # states, which predict the first generated token.
  start = jnp.zeros_like(rows) if lengths is None else lengths - 1
  replaced['index'] = cache.index.at[rows].set(start, mode='drop')
  if cache.cross is not None:
    replaced['cross'] = jax.tree.map(put, cache.cross, cross)
  if encoder_segments is not None:
    # Writes the full width, so that the end of a longer previous source becomes
    # padding.
    padding = cache.source - encoder_segments.shape[1]
    segments = jnp.pad(encoder_segments, [(0, 0), (0, padding)])
    replaced['encoder_segments'] = cache.encoder_segments.at[rows].set(
      segments, mode='drop'
    )
  return shard(cache.replace(**replaced))


def resize(
  config: model_config.StackConfig, cache: Cache, length: int, source: int
) -> Cache:
  """Resizes a cache; rows in use must fit the new lengths.

  Args:
    config: the decoder's stack, unscanned.
    cache: the cache.
    length: positions per row.
    source: encoder tokens per row.
  """

  def fit(x: jax.Array, size: int, axis: int = 2) -> jax.Array:
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis], 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), padding)

  # The number of slots changes only if the shorter row fits into its ring. Rows
  # in use fit the shorter row, so none has wrapped around: position p is in
  # slot p before and after, and shrinking removes only unused slots.
  def fit_layer(prefix: str, _: int | None) -> KeyValues | None:
    kind = layers_index.block_kind(config, prefix)
    old, new = (slots(config, kind, n) for n in (cache.length, length))

    def fit_slots(x: jax.Array) -> jax.Array:
      ring = fit(x[:, :, :old], new)
      if x.shape[2] == old:
        return ring
      # The encoder's entries follow the ring.
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
  """Gathers generated entries of rows with equal prompts; rows may repeat."""
  # Equal prompts and lengths have equal cross-attention entries, segments and
  # indices: no need to copy them.
  layers = jax.tree.map(lambda x: x[rows], cache.layers)
  return shard(cache.replace(layers=layers))


def transposed(entries: KeyValues) -> KeyValues:
  """Transposes cache entries to the layout of attention, [B, S, K, H]."""
  return jax.tree.map(lambda x: x.swapaxes(1, 2), entries)
