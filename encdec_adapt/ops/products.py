"""Matrix products with fast gradients, also on CPUs.

XLA:CPU multiplies in bfloat16 only if the result is float32, the contraction is
over the last dimension of the first operand, and no operand is a bare
transpose. Otherwise it converts the operands to float32, at a third of the
speed. JAX's derivatives violate these conditions: the cotangent of a float32
result is float32, and the gradient of a kernel contracts the rows of both
operands. So on CPUs the products here have custom derivatives: they round the
cotangent to the operands' dtype and sum over a transposed copy of the smaller
operand, which pays off in float32 too. On other platforms compilers choose
layouts themselves, and the products are plain `jnp` products.

All results are float32. Letters besides the package's: R rows, I inputs, J
outputs, Q = G * T queries of a key head.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from encdec_adapt.ops import partition

_Product = Callable[[jax.Array, jax.Array], jax.Array]
# Checkpoint names of projections, for rematerialisation policies: widened more
# than twofold, and all others.
WIDE, NARROW = 'wide_product', 'narrow_product'
# Minimum rows per product with a weight in a decoding step, by platform.
LEAST_ROWS = {'gpu': 8}


def on_cpu() -> bool:
  """Returns whether the program runs on CPUs; True without a mesh."""
  return partition.active().platform in (None, 'cpu')


def copies(rows: int) -> int:
  """Returns the number of copies of each row in a decoding step.

  XLA:GPU multiplies one or two rows without matrix units and in more kernels,
  some of which materialise products as large as the weight or convert a table
  to float32.

  Args:
    rows: global number of rows.
  """
  active = partition.active()
  on_device = max(1, rows // active.size('batch'))
  return -(-LEAST_ROWS.get(active.platform, 1) // on_device)


def matmul(
  x: Float[Array, 'R I'], y: Float[Array, 'I J']
) -> Float[Array, 'R J']:
  """Multiplies matrices."""
  return _on_platform(_matmul, _matmul_gradients, x, y)


def logits(
  hidden: Float[Array, 'B T D'], table: Float[Array, 'V D']
) -> Float[Array, 'B T V']:
  """Computes logits: products of states with the rows of a table."""
  rows = hidden.shape[0] * hidden.shape[1]
  # XLA reads any layout at full rate for a single row.
  if on_cpu() and 1 < rows <= _FEW:
    flat = _few_by_transposed(hidden.reshape(rows, -1), table)
    return flat.reshape(*hidden.shape[:2], -1)
  # Length 1 is a decoding step.
  length = hidden.shape[1]
  if length == 1 and (count := copies(rows)) > 1:
    hidden = jnp.repeat(hidden, count, axis=1)
  y = jnp.einsum('BTD,VD->BTV', hidden, table, **_FLOAT32)
  return y[:, :length]


def scores(
  q: Float[Array, 'B K Q H'], k: Float[Array, 'B S K H']
) -> Float[Array, 'B K Q S']:
  """Computes scores: products of each query with all keys of its head."""
  return _on_platform(_scores, scores_gradients, q, k)


def weighted_values(
  weights: Float[Array, 'B K Q S'], v: Float[Array, 'B S K H']
) -> Float[Array, 'B K Q H']:
  """Sums the values of each head, weighted per query."""
  return _on_platform(_weighted_values, values_gradients, weights, v)


def scores_gradients(
  q: Float[Array, 'B K Q H'],
  k: Float[Array, 'B S K H'],
  cotangent: Float[Array, 'B K Q S'],
) -> tuple[Float[Array, 'B K Q H'], Float[Array, 'B S K H']]:
  """Returns the gradients of the operands of `scores`, in float32."""
  dk = sum_over_rows(cotangent, q)  # [B, K, S, H]
  return _weighted_values(cotangent, k), dk.swapaxes(1, 2)


def values_gradients(
  weights: Float[Array, 'B K Q S'],
  v: Float[Array, 'B S K H'],
  cotangent: Float[Array, 'B K Q H'],
) -> tuple[Float[Array, 'B K Q S'], Float[Array, 'B S K H']]:
  """Returns the gradients of the operands of `weighted_values`, in float32."""
  dv = sum_over_rows(weights, cotangent)  # [B, K, S, H]
  return _scores(cotangent, v), dv.swapaxes(1, 2)


def sum_over_rows(
  x: Float[Array, '*B R I'], y: Float[Array, '*B R J']
) -> Float[Array, '*B I J']:
  """Multiplies the transpose of `x` by `y`: the gradient of a kernel."""
  if not on_cpu():
    return jnp.einsum('...RI,...RJ->...IJ', x, y, **_FLOAT32)
  if x.size > y.size:
    return jnp.swapaxes(sum_over_rows(y, x), -1, -2)
  return _matmul_alone(_transposed_copy(x), y)


def add_to_rows(
  x: Float[Array, 'B *J'], shared: Float[Array, '#B *J']
) -> Float[Array, 'B *J']:
  """Adds shared or per-row values to the rows of a batch."""
  if not on_cpu() or shared.shape[0] == x.shape[0]:
    return x + shared

  @jax.custom_vjp
  def on_cpus(x, shared):
    return x + shared

  def backward(_, cotangent):
    # A product with ones: XLA:CPU sums over the first dimension at a tenth of
    # its speed, and would recompute the cotangent for the sum.
    cotangent = jax.lax.optimization_barrier(cotangent)
    rows = cotangent.shape[0]
    total = jnp.ones((1, rows), x.dtype) @ cotangent.reshape(rows, -1)
    return cotangent, total.reshape(shared.shape)

  on_cpus.defvjp(lambda x, shared: (x + shared, None), backward)
  return on_cpus(x, shared)


def _transposed_copy(x: jax.Array) -> jax.Array:
  """Transposes matrices [*B, R, I] into row-major memory."""
  # The reshape forces a copy: JAX lowers a transpose alone to a view.
  *batch, rows, columns = x.shape
  return jnp.moveaxis(x[..., None, :], -1, -3).reshape(*batch, columns, rows)


def _matmul_alone(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies matrices without fusing the transposes around them."""
  barrier = jax.lax.optimization_barrier
  return barrier(jnp.matmul(barrier(x), barrier(y), **_FLOAT32))


def _few_by_transposed(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies a few rows [*B, R, I] by the transpose of [*B, J, I] on CPUs."""
  # XLA:CPU reads a transposed operand at half rate if few rows reuse it.
  return jnp.swapaxes(_matmul_alone(y, _transposed_copy(x)), -1, -2)


_FEW = 32  # Rows.
_FLOAT32 = {'preferred_element_type': jnp.float32}
_matmul = functools.partial(jnp.matmul, **_FLOAT32)
_weighted_values = functools.partial(jnp.einsum, 'BKQS,BSKH->BKQH', **_FLOAT32)


def _scores(q, k):
  if on_cpu() and q.shape[2] <= _FEW:
    return _few_by_transposed(q, k.swapaxes(1, 2))
  return jnp.einsum('BKQH,BSKH->BKQS', q, k, **_FLOAT32)


def _matmul_gradients(x, y, cotangent):
  dx = jnp.einsum('RJ,IJ->RI', cotangent, y, **_FLOAT32)
  return dx, sum_over_rows(x, cotangent)


def _on_platform(
  product: _Product, gradients: Callable, x: jax.Array, y: jax.Array
) -> jax.Array:
  """Computes a product; on CPUs its VJP is `gradients(x, y, cotangent)`."""
  if not on_cpu():
    return product(x, y)

  @jax.custom_vjp
  def on_cpus(x, y):
    return product(x, y)

  def backward(operands, cotangent):
    x, y = operands
    dx, dy = gradients(x, y, cotangent.astype(x.dtype))
    return dx.astype(x.dtype), dy.astype(y.dtype)

  on_cpus.defvjp(lambda x, y: (product(x, y), (x, y)), backward)
  return on_cpus(x, y)
