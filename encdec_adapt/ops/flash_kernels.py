"""Flash attention kernels in Pallas, to be lowered to Triton.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): scores exist for a block of
queries and keys at a time, and are computed again in the backward pass, which
has a kernel for the gradients of queries and another for those of keys and
values. A kernel instance has a block of its side and loops over the blocks
of the other side in its range of visits.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

# Softmax in powers of two: GPUs have an instruction for 2^x, and e^x would be
# computed as 2^(x log2 e) for each score instead of folding it into the scale.
_LOG2_E = math.log2(math.e)
# Score of a key that is not visible, and the initial peak of a row. The peak is
# larger, so a row without visible keys has weights 2^(_HIDDEN - _LOWEST) = 0.
_HIDDEN, _LOWEST = -1e30, -1e29


@dataclasses.dataclass(frozen=True)
class Tile:
  """Queries and keys of a step of a kernel, and how it is compiled.

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
    reach: `MaskSpec.reach`.
    keys: number of keys S without padding.
    memory: number of keys, at the end, that have no position.
    scale: factor of the scores.
    softcap: cap of the scores, or None.
    interpret: run as ordinary operations, on any platform.
  """

  reach: tuple[int | None, int | None]
  keys: int
  memory: int
  scale: float
  softcap: float | None
  interpret: bool


def run(
  name: str, operands: Sequence[jax.Array], tile: Tile, call: Call
) -> Sequence[jax.Array]:
  """Runs a kernel.

  Args:
    name: 'flash_forward', 'flash_backward_queries' or 'flash_backward_keys'.
    operands: visits [B, blocks, 2]: for each block of queries (of keys in
      'flash_backward_keys'), the range of blocks of the other side to visit
      (first, end); queries [B, T, N, H], keys and values [B, S, K, H],
      where T and S are whole blocks and H is a power of two; segments and
      positions of the queries [B, 2, T] and of the keys [B, 2, S]. In the
      backward pass also the cotangent of the output, the sums of the forward
      pass and the inner products [B, N, T] of output and cotangent.
    tile: block sizes.
    call: parameters of the call.

  Returns:
    Forward: the output, and log2 of the sum of 2^score of each query
    [B, N, T]. Backward: the gradient with respect to the queries, or those
    with respect to keys and values.
  """
  kernel, outputs = _KERNELS[name]
  q, k = operands[1:3]
  grid, specs = _blocks(q, k, tile, by_keys=name == 'flash_backward_keys')
  sums = (q.shape[0], q.shape[2], q.shape[1])
  shapes = {
    'queries': jax.ShapeDtypeStruct(q.shape, q.dtype),
    'keys': jax.ShapeDtypeStruct(k.shape, k.dtype),
    'sums': jax.ShapeDtypeStruct(sums, jnp.float32),
  }
  return pl.pallas_call(
    functools.partial(kernel, tile=tile, call=call),
    name=name,
    grid=grid,
    in_specs=[specs[kind] for kind in _OPERANDS[: len(operands)]],
    out_specs=[specs[kind] for kind in outputs],
    out_shape=[shapes[kind] for kind in outputs],
    compiler_params=triton.CompilerParams(
      num_warps=tile.warps, num_stages=tile.stages
    ),
    interpret=call.interpret,
  )(*operands)


def _blocks(
  q: jax.Array, k: jax.Array, tile: Tile, *, by_keys: bool
) -> tuple[tuple[int, int, int], dict[str, pl.BlockSpec]]:
  """Returns the grid of (blocks, heads, rows), and block specs by kind.

  An instance has a block of a head's queries and all keys that the head
  reads or, by keys, a block of a key head's keys and all queries of the heads
  that read it.
  """
  batch, queries, heads, head_dim = q.shape
  keys, kv_heads = k.shape[1:3]
  groups, spec = heads // kv_heads, pl.BlockSpec
  visits = spec((None, None, 2), lambda i, n, b: (b, i, 0))
  if by_keys:
    # All query heads of a key head: their gradients are summed in the instance,
    # in an order that does not depend on scheduling.
    return (keys // tile.keys, kv_heads, batch), {
      'visits': visits,
      'queries': spec(
        (None, queries, groups, head_dim), lambda i, n, b: (b, 0, n, 0)
      ),
      'keys': spec(
        (None, tile.keys, None, head_dim), lambda i, n, b: (b, i, n, 0)
      ),
      'query_tokens': spec((None, 2, queries), lambda i, n, b: (b, 0, 0)),
      'key_tokens': spec((None, 2, tile.keys), lambda i, n, b: (b, 0, i)),
      'sums': spec((None, groups, queries), lambda i, n, b: (b, n, 0)),
    }
  return (queries // tile.queries, heads, batch), {
    'visits': visits,
    'queries': spec(
      (None, tile.queries, None, head_dim), lambda i, n, b: (b, i, n, 0)
    ),
    'keys': spec(
      (None, keys, None, head_dim), lambda i, n, b: (b, 0, n // groups, 0)
    ),
    'query_tokens': spec((None, 2, tile.queries), lambda i, n, b: (b, 0, i)),
    'key_tokens': spec((None, 2, keys), lambda i, n, b: (b, 0, 0)),
    'sums': spec((None, None, tile.queries), lambda i, n, b: (b, n, i)),
  }


def _dot(a, b, contracted_a: int, contracted_b: int):
  """Multiplies over these two dimensions, in fp32."""
  dimensions = (((contracted_a,), (contracted_b,)), ((), ()))
  return jax.lax.dot_general(
    a, b, dimensions, preferred_element_type=jnp.float32
  )


def _scores(products, call: Call):
  """Returns base-2 scores, and the derivative of their soft-cap."""
  if call.softcap is None:
    return products * (call.scale * _LOG2_E), 1.0
  # tanh x = 1 - 2 / (e^2x + 1) is exact to a rounding of 1, as the softmax is,
  # and costs an exponential and a division; the library function costs more.
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
  past, future = call.reach
  # Comparisons are left out where the mask needs none: they cost every score.
  if past is None and future is None:
    return visible
  behind = q_tokens[1] - kv_tokens[1]
  if future is None:
    near = behind <= past
  else:
    near = behind >= -future
    if past is not None:
      near &= behind <= past
  if call.memory:
    shape = kv_tokens[0].shape
    index = jax.lax.broadcasted_iota(jnp.int32, shape, int(shape[0] == 1))
    near |= first_key + index >= call.keys - call.memory
  return visible & near


def _forward_kernel(
  visits, q, k, v, q_tokens, kv_tokens, out, sums, *, tile, call
):
  queries = q[...]
  rows = q_tokens[0, :][:, None], q_tokens[1, :][:, None]

  def visit(j, carry):
    """Adds a block of keys to weighted values, peaks and sums of weights."""
    total, peak, weight = carry
    keys = pl.ds(j * tile.keys, tile.keys)
    scores, _ = _scores(_dot(queries, k[keys, :], 1, 1), call)
    columns = kv_tokens[0, keys][None], kv_tokens[1, keys][None]
    seen = _visible(rows, columns, j * tile.keys, call)
    scores = jnp.where(seen, scores, _HIDDEN)  # [queries, keys]
    higher = jnp.maximum(peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - higher[:, None])
    # Earlier blocks were weighted relative to a lower peak.
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
  # Queries that see no key have weight 0 and give zeros, not NaN.
  weight = jnp.where(weight == 0.0, 1.0, weight)
  out[...] = (total / weight[:, None]).astype(out.dtype)
  sums[...] = peak + jnp.log2(weight)


def _queries_kernel(
  visits, q, k, v, q_tokens, kv_tokens, d_out, sums, inner, d_q, *, tile, call
):
  queries = q[...]
  rows = q_tokens[0, :][:, None], q_tokens[1, :][:, None]
  cotangent = d_out[...]
  log_sums, inners = sums[...][:, None], inner[...][:, None]

  def visit(j, gradient):
    """Adds a block of keys to the gradient of the queries."""
    keys = pl.ds(j * tile.keys, tile.keys)
    block = k[keys, :]
    scores, slope = _scores(_dot(queries, block, 1, 1), call)
    columns = kv_tokens[0, keys][None], kv_tokens[1, keys][None]
    seen = _visible(rows, columns, j * tile.keys, call)
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
  key_tokens = kv_tokens[0, :][:, None], kv_tokens[1, :][:, None]
  first_key = pl.program_id(0) * tile.keys

  def visit(group, i, carry):
    """Adds a block of a head's queries; scores are [keys, queries]."""
    by_keys, by_values = carry
    rows = pl.ds(i * tile.queries, tile.queries)
    queries, cotangent = q[rows, group, :], d_out[rows, group, :]
    scores, slope = _scores(_dot(keys, queries, 1, 1), call)
    query_tokens = q_tokens[0, rows][None], q_tokens[1, rows][None]
    seen = _visible(query_tokens, key_tokens, first_key, call)
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


# Kinds of the operands, in order, and kernels with the kinds of their outputs.
_OPERANDS = (
  *('visits', 'queries', 'keys', 'keys', 'query_tokens', 'key_tokens'),
  *('queries', 'sums', 'sums'),
)
_KERNELS = {
  'flash_forward': (_forward_kernel, ('queries', 'sums')),
  'flash_backward_queries': (_queries_kernel, ('queries',)),
  'flash_backward_keys': (_keys_kernel, ('keys', 'keys')),
}
