"""Chunked pass over tokens with a table sharded over the vocabulary.

The sharded part of `vocabulary_loss`. Each device holds some rows of the output
table [V, D] and some tokens. For each chunk of tokens it gathers the hidden
states of all devices sharing the table, computes the logits of its columns
once, and from them the loss terms and the gradients: `dhidden` returns to the
owners of the tokens, `dtable` stays with the rows. No device ever holds the
logits of all its tokens, and automatic differentiation passes through no
collective, because `vocabulary_loss` wraps `shard_map` in a custom derivative.

The active partition gives the mesh axes of tokens ('batch', 'length') and table
rows ('vocab'); without a partition, the same code runs on one device.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from encdec_adapt.ops import partition, products

# A logit without effect on sums; finite, so that zero times it is zero.
EXCLUDED = -1e30

DEFAULT_CHUNK = 512

# A float32 scalar; not a checked type, because tree maps put shardings,
# numpy scalars or nothing in its place.
Sum = Any


@dataclasses.dataclass(frozen=True)
class Columns:
  """The local columns of the logits, with reductions over all columns.

  Attributes:
    ids: [v] int32, the token id of each local column.
    is_token: [v] bool, False for padding columns; None if the table has no
      padding (masking would cost a pass over the logits).
    vocab_size: global number of token columns, without padding.
    axes: mesh axes of the columns.
  """

  ids: jax.Array
  is_token: jax.Array | None
  vocab_size: int
  axes: tuple[str, ...]

  def sum(self, *terms: jax.Array) -> jax.Array:
    """Sums each [rows, v] term over the whole vocabulary: [terms, rows]."""
    local = jnp.stack([jnp.sum(term, axis=-1) for term in terms])
    return jax.lax.psum(local, self.axes) if self.axes else local

  def reduce(
    self, scores: jax.Array, *terms: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the largest scores [rows] and sums of terms [terms, rows]."""
    if partition.active().platform != 'gpu':
      return self.max(scores)[0], self.sum(*terms)
    # A single operation: for several, XLA:GPU would store shared intermediates
    # and read the logits again for each.
    largest, *sums = jax.lax.reduce(
      (scores, *terms),
      (jnp.float32(-math.inf), *[jnp.float32(0)] * len(terms)),
      lambda a, b: (jnp.maximum(a[0], b[0]), *map(jnp.add, a[1:], b[1:])),
      (1,),
    )
    sums = jnp.stack(sums)
    if not self.axes:
      return largest, sums
    return jax.lax.pmax(largest, self.axes), jax.lax.psum(sums, self.axes)

  def max(self, *terms: jax.Array) -> jax.Array:
    """Returns the largest value of each [rows, v] term: [terms, rows]."""
    local = jnp.stack([jnp.max(term, axis=-1) for term in terms])
    return jax.lax.pmax(local, self.axes) if self.axes else local

  def only_tokens(self, values: ArrayLike, otherwise: float) -> ArrayLike:
    """Replaces values [rows, v] in padding columns by `otherwise`."""
    if self.is_token is None:
      return values
    return jnp.where(self.is_token, values, otherwise)


# (columns, token inputs [rows, ...], tables [v, ...]) -> values per row
# (a tree of [rows]) and the gradient [rows, v] of the loss with respect to
# the raw logits `token_inputs[0] @ tables[0].T` (None without gradients).
ChunkStep = Callable[
  [Columns, Sequence[jax.Array], Sequence[jax.Array]],
  tuple[Any, jax.Array | None],
]


class _Layout:
  """Mesh axes of the tokens and of the rows of the table.

  Attributes:
    vocab: axes of the table's rows.
    shared: axes of both, over which hidden states are exchanged.
    vocab_only: axes of the rows but not the tokens.
    tokens_only: axes of the tokens but not the rows.
  """

  def __init__(self, active: partition.Partition):
    self.active = active
    self.vocab = active.mesh_axes('vocab')
    self.shared = active.common(partition.TOKENS, ['vocab'])
    self.vocab_only = active.only(['vocab'], partition.TOKENS)
    self.tokens_only = active.only(partition.TOKENS, ['vocab'])

  def gather(self, x: jax.Array) -> jax.Array:
    """Gathers [c, ...] to [rows, ...] of all devices sharing a table."""
    if not self.shared:
      return x
    return jax.lax.all_gather(x, self.shared, axis=0, tiled=True)

  def local_rows(self, x: jax.Array) -> jax.Array:
    """Slices this device's [c, ...] from replicated [rows, ...]."""
    if not self.shared:
      return x
    count = x.shape[0] // self.active.devices(self.shared)
    start = jax.lax.axis_index(self.shared) * count
    return jax.lax.dynamic_slice_in_dim(x, start, count)

  def return_to_owners(self, x: jax.Array) -> jax.Array:
    """Reduce-scatters partial sums [rows, D] to local tokens [c, D]."""
    if self.shared:
      x = jax.lax.psum_scatter(x, self.shared, scatter_dimension=0, tiled=True)
    return jax.lax.psum(x, self.vocab_only) if self.vocab_only else x


def product(
  x: Float[Array, 'rows D'], table: Float[Array, 'v D']
) -> Float[Array, 'rows v']:
  """Computes float32 logits: hidden states times the rows of a table."""
  return jnp.einsum('nd,vd->nv', x, table, preferred_element_type=jnp.float32)


def soft_cap(
  logits: Float[Array, '*L'], cap: float | None
) -> tuple[Float[Array, '*L'], Float[Array, '*L'] | None]:
  """Computes `cap * tanh(logits / cap)` and its slope (None for no cap)."""
  if cap is None:
    return logits, None
  tanh = jnp.tanh(logits / cap)
  return cap * tanh, 1.0 - jnp.square(tanh)


def fixed_shift(cap: float | None, temperature: float = 1.0) -> float | None:
  """Returns a bound to subtract from soft-capped scores before exponentials.

  None without a cap, or if scores could be too far apart for float32: the sums
  then need the maximum first.
  """
  bound = math.inf if cap is None else cap / temperature
  # exp(-2 * bound), the smallest exponential, is a normal number.
  return bound if bound <= 40 else None


def sweep(
  step: ChunkStep,
  tokens: Sequence[jax.Array],
  tables: Sequence[jax.Array],
  *,
  vocab_size: int,
  chunk: int,
  with_gradients: bool,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
  """Runs `step` over all tokens in chunks.

  Args:
    step: function of a chunk of tokens and the local columns.
    tokens: arrays [B, T, ...]; the first holds the hidden states [B, T, D].
    tables: arrays [V, ...]; the first is the output table [V, D] in the dtype
      of the products.
    vocab_size: number of token rows in the tables; later rows are padding.
    chunk: maximum tokens per device in a step.
    with_gradients: whether `step` returns the gradient of the logits.

  Returns:
    `step`'s values per token, a tree of [B, T]; the gradients of the first
    token array, in its dtype, and of the first table, in float32, or None.

  Raises:
    ValueError: shapes are not divisible over the mesh.
  """
  active = partition.active()
  on_device = functools.partial(
    _sweep_device, step, _Layout(active), vocab_size, chunk, with_gradients
  )
  if active.mesh is None:
    return on_device(tokens, tables)
  active.check('tokens', tokens[0].shape[:2], partition.TOKENS)
  active.check('table', tables[0].shape[:1], ['vocab'])
  token_spec, table_spec = active.spec(*partition.TOKENS), active.spec('vocab')
  gradient_specs = (token_spec, table_spec) if with_gradients else (None, None)
  return jax.shard_map(
    on_device,
    mesh=active.mesh,
    in_specs=(token_spec, table_spec),
    out_specs=(token_spec, *gradient_specs),
  )(tokens, tables)


def _sweep_device(
  step, layout, vocab_size, chunk, with_gradients, tokens, tables
):
  batch, length = tokens[0].shape[:2]
  columns = _local_columns(tables[0].shape[0], vocab_size, layout)

  def chunk_step(dtable, piece):
    gathered = [layout.gather(x) for x in piece]
    rows, dlogits = step(columns, gathered, tables)
    rows = jax.tree.map(layout.local_rows, rows)
    if dlogits is None:
      return dtable, (rows, None)
    x, table = gathered[0], tables[0]
    # Cast like the logits' operands, so that these products run on the matrix
    # units' fast path; they accumulate in float32.
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum(
      'nv,vd->nd', dlogits, table, preferred_element_type=jnp.float32
    )
    dtable += products.sum_over_rows(dlogits, x)
    return dtable, (rows, layout.return_to_owners(dx).astype(x.dtype))

  dtable = None
  if with_gradients:
    dtable = jnp.zeros(tables[0].shape, jnp.float32)
    # A scan needs its carry to vary over the same mesh axes as the summands.
    if varying := layout.vocab + layout.tokens_only:
      dtable = jax.lax.pcast(dtable, varying, to='varying')
  pieces = [_split(x, chunk) for x in tokens]
  dtable, outputs = jax.lax.scan(chunk_step, dtable, pieces)
  if with_gradients and layout.tokens_only:
    dtable = jax.lax.psum(dtable, layout.tokens_only)
  rows, dhidden = jax.tree.map(lambda x: _join(x, batch, length), outputs)
  return rows, dhidden, dtable


def _local_columns(count: int, vocab_size: int, layout: _Layout) -> Columns:
  ids = jnp.arange(count, dtype=jnp.int32)
  if layout.vocab:
    ids += jax.lax.axis_index(layout.vocab) * count
  has_padding = count * layout.active.devices(layout.vocab) > vocab_size
  is_token = ids < vocab_size if has_padding else None
  return Columns(ids, is_token, vocab_size, layout.vocab)


def _split(x: jax.Array, chunk: int) -> jax.Array:
  """Splits [B, T, ...] into [chunks, at most `chunk`, ...], padded with 0."""
  count = x.shape[0] * x.shape[1]
  chunks = -(-count // chunk)
  # Chunks of equal size pad fewer tokens than full chunks and a remainder.
  size = -(-count // chunks)
  x = x.reshape(count, *x.shape[2:])
  padding = [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, padding).reshape(chunks, size, *x.shape[1:])


def _join(x: jax.Array, batch: int, length: int) -> jax.Array:
  x = x.reshape(-1, *x.shape[2:])[: batch * length]
  return x.reshape(batch, length, *x.shape[1:])
