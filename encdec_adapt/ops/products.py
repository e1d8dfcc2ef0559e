"""Matrix products with gradients that are fast on CPUs too.

XLA:CPU multiplies in bfloat16 only if the result is float32, the last dimension
of the first operand is contracted, and no operand is a bare transpose.
Otherwise it first converts the operands to float32, at a third of the speed.
JAX's derivatives do not meet these conditions: the cotangent of a float32
result is float32, and the gradient of a kernel contracts the rows of both
operands. So on CPUs the products here have custom derivatives, which round the
cotangent to the dtype of the operands and sum over a transposed copy of the
smaller operand. In float32 the copy pays off too. On other platforms compilers
choose layouts themselves, and the products are plain `jnp` products.

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
# Names of projected states for rematerialisation policies: states widened more
# than twofold, and all others.
WIDE, NARROW = 'wide_product', 'narrow_product'
# Minimum rows of a decoding step's product with a weight, by platform.
LEAST_ROWS = {'gpu': 8}


def on_cpu() -> bool:
  """Returns whether the program runs on CPUs."""
  return partition.active().platform in (None, 'cpu')


def copies(rows: int) -> int:
  """Returns the number of copies of each row of a decoding step.

  XLA:GPU multiplies one or two rows without matrix units and in more kernels,
  some of which write products as large as the weight, or convert a table to
  float32.

  Args:
    rows: rows of all devices.
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
  """Multiplies states by the rows of a table."""
  rows = hidden.shape[0] * hidden.shape[1]
  # A single row is a product of XLA's own, which reads each layout as fast.
  if on_cpu() and 1 < rows <= _FEW:
    flat = _few_by_transposed(hidden.reshape(rows, -1), table)
    return flat.reshape(*hidden.shape[:2], -1)
  # A token of each row is a step of decoding.
  length = hidden.shape[1]
  if length == 1 and (count := copies(rows)) > 1:
    hidden = jnp.repeat(hidden, count, axis=1)
  y = jnp.einsum('BTD,VD->BTV', hidden, table, **_FLOAT32)
  return y[:, :length]


def scores(
  q: Float[Array, 'B K Q H'], k: Float[Array, 'B S K H']
) -> Float[Array, 'B K Q S']:
  """Multiplies each query by all keys of its head."""
  return _on_platform(_scores, scores_gradients, q, k)


def weighted_values(
  weights: Float[Array, 'B K Q S'], v: Float[Array, 'B S K H']
) -> Float[Array, 'B K Q H']:
  """Sums the values of each head by the weights of a query."""
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
  """Adds the same or separate values to the rows of a batch."""
  if not on_cpu() or shared.shape[0] == x.shape[0]:
    return x + shared

  @jax.custom_vjp
  def on_cpus(x, shared):
    return x + shared

  def backward(_, cotangent):
    # A product by ones: XLA:CPU sums over the first dimension at a tenth of
    # its speed, and would compute the cotangent once more for it.
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
  """Multiplies matrices, without merging the transposes around them."""
  barrier = jax.lax.optimization_barrier
  return barrier(jnp.matmul(barrier(x), barrier(y), **_FLOAT32))


def _few_by_transposed(x: jax.Array, y: jax.Array) -> jax.Array:
  """Multiplies a few rows [*B, R, I] by the transpose of [*B, J, I] on CPUs."""
  # XLA:CPU reads a transposed operand at half of its rate where few rows reuse
  # it.
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
  """Computes a product, on CPUs with `gradients` (of x, y, cotangent)."""
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
