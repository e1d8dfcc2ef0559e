"""Products and their gradients on CPUs against float64, and how they run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import layers
from encdec_adapt.ops import products

# Each product with an equation, and shapes of which the first operand is the
# larger or the smaller one.
PRODUCTS = {
  'matmul': (products.matmul, 'MK,KN->MN', (64, 16), (16, 32)),
  'matmul, narrow result': (products.matmul, 'MK,KN->MN', (64, 32), (32, 16)),
  'scores': (
    products.scores,
    'BKQH,BSKH->BKQS',
    (2, 2, 64, 16),
    (2, 32, 2, 16),
  ),
  'scores, few keys': (
    products.scores,
    'BKQH,BSKH->BKQS',
    (2, 2, 64, 32),
    (2, 16, 2, 32),
  ),
  'scores, few queries': (
    products.scores,
    'BKQH,BSKH->BKQS',
    (2, 2, 8, 32),
    (2, 64, 2, 32),
  ),
  'values': (
    products.weighted_values,
    'BKQS,BSKH->BKQH',
    (2, 2, 64, 32),
    (2, 32, 2, 16),
  ),
}


def draw(shape, seed, dtype):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(product, x, y, cotangent):
  """The product rounded to the operands' dtype, and its gradients."""
  rounded = lambda x, y: product(x, y).astype(x.dtype)  # noqa: E731
  out, backward = jax.vjp(rounded, x, y)
  return out, *backward(cotangent.astype(out.dtype))


@pytest.mark.parametrize(
  'dtype, rounding', [('float32', 1e-6), ('bfloat16', 4e-3)]
)
@pytest.mark.parametrize('name', PRODUCTS)
def test_products_and_gradients_are_rounded_once(name, dtype, rounding):
  product, equation, *shapes = PRODUCTS[name]
  x, y = (draw(shape, i, dtype) for i, shape in enumerate(shapes))
  einsum = lambda x, y: jnp.einsum(equation, x, y)  # noqa: E731
  cotangent = draw(jax.eval_shape(einsum, x, y).shape, 2, dtype)
  got = jax.jit(gradients, static_argnums=0)(product, x, y, cotangent)
  wide = [a.astype(jnp.float32) for a in (x, y, cotangent)]
  expected = gradients(einsum, *wide)
  for a, b in zip(got, expected, strict=True):
    assert a.dtype == dtype
    error = np.abs(np.asarray(a, np.float32) - b)
    assert (error <= rounding * np.abs(b) + 2e-5).all()


@pytest.mark.parametrize('rows', [1, 8, 64])
def test_logits_are_the_same_for_every_number_of_rows(rows):
  hidden, table = (
    draw((rows, 1, 16), 0, 'float32'),
    draw((96, 16), 1, 'float32'),
  )
  expected = jnp.einsum('BTD,VD->BTV', hidden, table)
  got = jax.jit(products.logits)(hidden, table)
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize('name', [n for n in PRODUCTS if 'queries' not in n])
def test_bfloat16_operands_are_not_converted(name):
  product, equation, *shapes = PRODUCTS[name]
  # Small products have code of their own.
  x, y = (
    draw([4 * n if n > 2 else n for n in shape], i, 'bfloat16')
    for i, shape in enumerate(shapes)
  )
  cotangent = jnp.einsum(equation, x, y)
  run = jax.jit(gradients, static_argnums=0)
  text = run.lower(product, x, y, cotangent).compile().as_text()
  assert len(re.findall(r' dot\(', text)) == 3
  assert not re.findall(r' = f32\S+ convert\(', text)


def test_only_cpus_have_products_of_their_own(monkeypatch):
  x, kernel = draw((2, 4, 8), 0, 'bfloat16'), draw((8, 16), 1, 'bfloat16')

  def loss(x, kernel):
    return layers.project(x, kernel, axes=('embed', 'mlp')).sum()

  def dtypes():
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel))
    return set(re.findall(r'preferred_element_type=(\w+)', text))

  assert dtypes() == {'float32'}
  monkeypatch.setattr(products, 'on_cpu', lambda: False)
  assert dtypes() == {'bfloat16'}


@pytest.mark.parametrize('rows', [1, 3])
def test_the_gradient_of_what_rows_share_is_summed_over_them(rows):
  x, cotangent = (draw((3, 2, 5, 4), seed, 'float32') for seed in (0, 1))
  shared = draw((rows, 2, 5, 4), 2, 'float32')
  out, backward = jax.vjp(products.add_to_rows, x, shared)
  plain, expected = jax.vjp(jnp.add, x, shared)
  np.testing.assert_array_equal(out, plain)
  for ours, theirs in zip(
    backward(cotangent), expected(cotangent), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
