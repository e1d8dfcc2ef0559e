"""Flash attention kernels in Pallas, to be lowered to Triton.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): scores exist for one block of
queries and keys at a time, and are computed again in the backward pass, which
has a kernel for the gradients of queries and one for those of keys and
values. A kernel instance has one block of its side and loops over the blocks
of the other side in its range of visits.
"""

import dataclasses
import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LOG2_E = math.log2(math.e)
# Score of a key that is not visible, and the initial peak of a row. The peak is
# larger, so a row without visible keys has weights 2^(_HIDDEN - _LOWEST) = 0.
_HIDDEN, _LOWEST = -1e30, -1e29


@dataclasses.dataclass(frozen=True)
class Tile:
  """Queries and keys of one step of a kernel, and how it is compiled.

  Attributes:
    queries, keys: tokens; powers of two, at least 16.
    warps: number of warps (32 threads each).
    stages: software pipelining depth: loads in flight at a time.
  """

  queries: int
  keys: int
  warps: int
  stages: int


@dataclasses.dataclass(frozen=True)
class Call:
  """Parameters that are the same for all blocks.

  Attributes:
    left, right: reach of a query before and after itself; None for all keys.
    keys: number of keys S without padding.
    memory: number of keys, at the end, that have no position.
    scale: factor of the scores.
    softcap: cap of the scores, or None.
    interpret: run as ordinary operations, on any platform.
  """

  left: int | None
  right: int | None
  keys: int
  memory: int
  scale: float
  softcap: float | None
  interpret: bool


def run_forward(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  q_tokens: Int[Array, 'B 2 T'],
  kv_tokens: Int[Array, 'B 2 S'],
  visits: Int[Array, 'B blocks 2'],
  tile: Tile,
  call: Call,
) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B N T']]:
  """Computes attention, and log2 of the sum of 2^score of each query.

  Args:
    q: queries; T is whole blocks, H a power of two.
    k: keys; S is whole blocks.
    v: values.
    q_tokens: segments and positions of the queries.
    kv_tokens: segments and positions of the keys.
    visits: for each block of queries, the first block of keys to visit and
      one past the last.
    tile: block sizes.
    call: parameters of the call.
  """
  blocks = _OfQueries(q, k, tile)
  return blocks.call(
    functools.partial(_forward_kernel, tile=tile, call=call),
    'flash_forward',
    tile,
    call,
    in_specs=blocks.forward_inputs,
    out_specs=[blocks.query, blocks.sums],
    out_shape=[q, _sums_of(q)],
  )(visits, q, k, v, q_tokens, kv_tokens)


def run_queries(
  q, k, v, q_tokens, kv_tokens, d_out, sums, inner, visits, tile, call
) -> Float[Array, 'B T N H']:
  """Computes the gradient with respect to the queries.

  Args:
    q, k, v, q_tokens, kv_tokens, visits, tile, call: as in `run_forward`.
    d_out: cotangent of the output.
    sums: log2 sums of the forward pass [B, N, T].
    inner: inner products [B, N, T] of output and cotangent.
  """
  blocks = _OfQueries(q, k, tile)
  (d_q,) = blocks.call(
    functools.partial(_queries_kernel, tile=tile, call=call),
    'flash_backward_queries',
    tile,
    call,
    in_specs=blocks.forward_inputs + blocks.backward_inputs,
    out_specs=[blocks.query],
    out_shape=[q],
  )(visits, q, k, v, q_tokens, kv_tokens, d_out, sums, inner)
  return d_q


def run_keys(
  q, k, v, q_tokens, kv_tokens, d_out, sums, inner, visits, tile, call
) -> tuple[Float[Array, 'B S K H'], Float[Array, 'B S K H']]:
  """Computes the gradients with respect to keys and values.

  Arguments as in `run_queries`, but `visits` are the blocks of queries of each
  block of keys.
  """
  blocks = _OfKeys(q, k, tile)
  return blocks.call(
    functools.partial(_keys_kernel, tile=tile, call=call),
    'flash_backward_keys',
    tile,
    call,
    in_specs=blocks.forward_inputs + blocks.backward_inputs,
    out_specs=[blocks.key, blocks.key],
    out_shape=[k, v],
  )(visits, q, k, v, q_tokens, kv_tokens, d_out, sums, inner)


def _sums_of(q: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)


class _Blocks:
  """Block specs of a kernel over a grid of (blocks, heads, rows)."""

  grid: tuple[int, int, int]
  span = pl.BlockSpec((None, None, 2), lambda i, n, b: (b, i, 0))

  @property
  def forward_inputs(self) -> list[pl.BlockSpec]:
    """Specs of visits, q, k, v, q_tokens, kv_tokens."""
    tokens = [self.query_tokens, self.key_tokens]
    return [self.span, self.query, self.key, self.key, *tokens]

  @property
  def backward_inputs(self) -> list[pl.BlockSpec]:
    """Specs of d_out, sums, inner."""
    return [self.query, self.sums, self.sums]

  def call(self, kernel, name, tile, call, **specs):
    """Makes the Pallas call of a kernel."""
    specs['out_shape'] = [
      jax.ShapeDtypeStruct(x.shape, x.dtype) for x in specs['out_shape']
    ]
    return pl.pallas_call(
      kernel,
      name=name,
      grid=self.grid,
      compiler_params=triton.CompilerParams(
        num_warps=tile.warps, num_stages=tile.stages
      ),
      interpret=call.interpret,
      **specs,
    )


class _OfQueries(_Blocks):
  """A block of one head's queries, and all keys that the head reads."""

  def __init__(self, q: jax.Array, k: jax.Array, tile: Tile):
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    groups = heads // k.shape[2]
    self.grid = (queries // tile.queries, heads, batch)
    self.query = pl.BlockSpec(
      (None, tile.queries, None, head_dim), lambda i, n, b: (b, i, n, 0)
    )
    self.key = pl.BlockSpec(
      (None, keys, None, head_dim), lambda i, n, b: (b, 0, n // groups, 0)
    )
    self.query_tokens = pl.BlockSpec(
      (None, 2, tile.queries), lambda i, n, b: (b, 0, i)
    )
    self.key_tokens = pl.BlockSpec((None, 2, keys), lambda i, n, b: (b, 0, 0))
    self.sums = pl.BlockSpec(
      (None, None, tile.queries), lambda i, n, b: (b, n, i)
    )


class _OfKeys(_Blocks):
  """A block of one head's keys, and all queries of the heads that read it."""

  def __init__(self, q: jax.Array, k: jax.Array, tile: Tile):
    (batch, keys, heads, head_dim), queries = k.shape, q.shape[1]
    groups = q.shape[2] // heads
    self.grid = (keys // tile.keys, heads, batch)
    self.query = pl.BlockSpec(
      (None, queries, groups, head_dim), lambda i, n, b: (b, 0, n, 0)
    )
    self.key = pl.BlockSpec(
      (None, tile.keys, None, head_dim), lambda i, n, b: (b, i, n, 0)
    )
    self.query_tokens = pl.BlockSpec(
      (None, 2, queries), lambda i, n, b: (b, 0, 0)
    )
    self.key_tokens = pl.BlockSpec(
      (None, 2, tile.keys), lambda i, n, b: (b, 0, i)
    )
    self.sums = pl.BlockSpec((None, groups, queries), lambda i, n, b: (b, n, 0))


def _dot(a, b, contracted_a: int, contracted_b: int):
  """Product over these two dimensions, in fp32."""
  dimensions = (((contracted_a,), (contracted_b,)), ((), ()))
  return jax.lax.dot_general(
    a, b, dimensions, preferred_element_type=jnp.float32
  )


def _scores(products, call: Call):
  """Returns base-2 scores, and the derivative of their soft-cap.

  tanh x = 1 - 2 / (e^2x + 1) is exact to a rounding of 1, as the softmax is,
  and costs an exponential and a division where the libraries' costs more.
  """
  if call.softcap is None:
    return products * (call.scale * _LOG2_E), 1.0
  power = jnp.exp2(products * (2 * _LOG2_E * call.scale / call.softcap))
  capped = 1.0 - 2.0 / (power + 1.0)
  return capped * (call.softcap * _LOG2_E), 1.0 - capped * capped


def _visible(q_tokens, kv_tokens, first_key, call: Call):
  """Returns whether a query sees a key.

  Args:
    q_tokens: segments and positions, [queries, 1] or [1, queries].
    kv_tokens: likewise, with the two dimensions swapped.
    first_key: index of the first key.
    call: parameters of the call, among them the mask.
  """
  visible = (q_tokens[0] == kv_tokens[0]) & (q_tokens[0] > 0)
  if call.left is None and call.right is None:
    return visible
  behind = q_tokens[1] - kv_tokens[1]
  if call.right is None:
    near = behind <= call.left
  else:
    near = behind >= -call.right
    if call.left is not None:
      near &= behind <= call.left
  if call.memory:
    shape = kv_tokens[0].shape
    index = jax.lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    near |= first_key + index >= call.keys - call.memory
  return visible & near


def _forward_kernel(
  visits, q, k, v, q_tokens, kv_tokens, out, sums, *, tile, call
):
  queries, own = q[...], (q_tokens[0, :][:, None], q_tokens[1, :][:, None])

  def visit(j, carry):
    """Adds a block of keys to weighted values, peaks and sums of weights."""
    total, peak, weight = carry
    keys = pl.ds(j * tile.keys, tile.keys)
    scores, _ = _scores(_dot(queries, k[keys, :], 1, 1), call)
    others = kv_tokens[0, keys][None], kv_tokens[1, keys][None]
    seen = _visible(own, others, j * tile.keys, call)
    scores = jnp.where(seen, scores, _HIDDEN)  # [queries, keys]
    higher = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - higher[:, None])
    shrink = jnp.exp2(peak - higher)
    total = total * shrink[:, None]
    total += _dot(weights.astype(v.dtype), v[keys, :], 1, 0)
    weight = weight * shrink + jnp.sum(weights, axis=1)
    return total, higher, weight

  shape = queries.shape
  carry = (
    jnp.zeros(shape, jnp.float32),
    jnp.full(shape[:1], _LOWEST, jnp.float32),
    jnp.zeros(shape[:1], jnp.float32),
  )
  total, peak, weight = jax.lax.fori_loop(visits[0], visits[1], visit, carry)
  weight = jnp.where(weight == 0.0, 1.0, weight)  # Of rows that see nothing.
  out[...] = (total / weight[:, None]).astype(out.dtype)
  sums[...] = peak + jnp.log2(weight)


def _queries_kernel(
  visits,
  q,
  k,
  v,
  q_tokens,
  kv_tokens,
  d_out,
  sums,
  inner,
  d_q,
  *,
  tile,
  call,
):
  queries, own = q[...], (q_tokens[0, :][:, None], q_tokens[1, :][:, None])
  cotangent = d_out[...]
  log_sums, inners = sums[...][:, None], inner[...][:, None]

  def visit(j, gradient):
    keys = pl.ds(j * tile.keys, tile.keys)
    block = k[keys, :]
    scores, slope = _scores(_dot(queries, block, 1, 1), call)
    others = kv_tokens[0, keys][None], kv_tokens[1, keys][None]
    seen = _visible(own, others, j * tile.keys, call)
    weights = jnp.exp2(jnp.where(seen, scores, _HIDDEN) - log_sums)
    d_weights = _dot(cotangent, v[keys, :], 1, 1)  # [queries, keys]
    d_products = weights * (d_weights - inners) * slope
    return gradient + _dot(d_products.astype(k.dtype), block, 1, 0)

  zeros = jnp.zeros(queries.shape, jnp.float32)
  gradient = jax.lax.fori_loop(visits[0], visits[1], visit, zeros)
  d_q[...] = (gradient * call.scale).astype(d_q.dtype)


def _keys_kernel(
  visits,
  q,
  k,
  v,
  q_tokens,
  kv_tokens,
  d_out,
  sums,
  inner,
  d_k,
  d_v,
  *,
  tile,
  call,
):
  keys, values = k[...], v[...]
  own = kv_tokens[0, :][:, None], kv_tokens[1, :][:, None]
  first_key = pl.program_id(0) * tile.keys

  def visit(group, i, carry):
    """Adds a block of queries of one head; scores are [keys, queries]."""
    by_keys, by_values = carry
    rows = pl.ds(i * tile.queries, tile.queries)
    queries, cotangent = q[rows, group, :], d_out[rows, group, :]
    scores, slope = _scores(_dot(keys, queries, 1, 1), call)
    others = q_tokens[0, rows][None], q_tokens[1, rows][None]
    seen = _visible(others, own, first_key, call)
    log_sums, inners = sums[group, rows][None], inner[group, rows][None]
    weights = jnp.exp2(jnp.where(seen, scores, _HIDDEN) - log_sums)
    by_values += _dot(weights.astype(v.dtype), cotangent, 1, 0)
    d_weights = _dot(values, cotangent, 1, 1)
    d_products = weights * (d_weights - inners) * slope
    by_keys += _dot(d_products.astype(q.dtype), queries, 1, 0)
    return by_keys, by_values

  def visit_head(group, carry):
    return jax.lax.fori_loop(
      visits[0], visits[1], functools.partial(visit, group), carry
    )

  zeros = jnp.zeros(keys.shape, jnp.float32)
  by_keys, by_values = jax.lax.fori_loop(
    0, q.shape[1], visit_head, (zeros, zeros)
  )
  d_k[...] = (by_keys * call.scale).astype(d_k.dtype)
  d_v[...] = by_values.astype(d_v.dtype)
