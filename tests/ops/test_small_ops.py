"""Norms, activations and rotary embedding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import activations, norms, rope


def random(seed, *shape):
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


def test_rms_norm_equals_its_formula():
  x, scale = random(0, 2, 3, 8), random(1, 8)
  x64, scale64 = np.asarray(x, np.float64), np.asarray(scale, np.float64)
  mean_square = (x64**2).mean(-1, keepdims=True)
  expected = x64 / np.sqrt(mean_square + 1e-6) * (1 + scale64)
  np.testing.assert_allclose(
    norms.rms_norm(x, scale, 1e-6), expected, rtol=1e-5, atol=1e-6
  )


def test_rms_norm_casts_once():
  x = random(0, 4, 64).astype(jnp.bfloat16)
  # 1 + scale is 1 in bfloat16: the gain shows only if it is fp32.
  scale = jnp.full((64,), 2.0**-9)
  out = norms.rms_norm(x, scale, 1e-6)
  exact = norms.rms_norm(x.astype(jnp.float32), scale, 1e-6)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
  without = norms.rms_norm(x, jnp.zeros(64), 1e-6)
  assert (out != without).any()


def test_rms_norm_with_a_direct_gain_casts_before_it():
  x = jnp.array([[3.0, 4.0]])
  out = norms.rms_norm(x, jnp.array([2.0, 1.0]), 0.0, gain='direct')
  np.testing.assert_allclose(out, np.array([[6.0, 4.0]]) / 12.5**0.5, rtol=1e-6)
  half, gain = random(0, 3, 64).astype(jnp.bfloat16), 1 + random(1, 64)
  plain = norms.rms_norm(half, jnp.ones(64), 1e-6, gain='direct')
  np.testing.assert_array_equal(
    norms.rms_norm(half, gain, 1e-6, gain='direct'),
    plain * gain.astype(jnp.bfloat16),
  )


def test_rms_norm_with_a_direct_gain_in_fp32_casts_after_it():
  half, gain = random(0, 3, 64).astype(jnp.bfloat16), 1 + random(1, 64)
  got = norms.rms_norm(half, gain, 1e-6, gain='direct_fp32')
  whole = norms.rms_norm(half.astype(jnp.float32), gain, 1e-6, gain='direct')
  np.testing.assert_array_equal(got, whole.astype(jnp.bfloat16))
  cast = norms.rms_norm(half, gain, 1e-6, gain='direct')
  assert np.any(np.asarray(got != cast))
  np.testing.assert_array_equal(
    norms.rms_norm(half, None, 1e-6), norms.rms_norm(half, gain * 0, 1e-6)
  )


X = jnp.concatenate([jnp.linspace(-12, 12, 97), jnp.array([-1e4, 0.0, 1e4])])


THEIRS = {
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'silu': jax.nn.silu,
  'relu': jax.nn.relu,
}
each = pytest.mark.parametrize('name', activations.ACTIVATIONS)


@each
def test_activations_equal_jax(name):
  ours, theirs = activations.ACTIVATIONS[name], THEIRS[name]
  np.testing.assert_allclose(ours(X), theirs(X), atol=1e-6)
  # Where tanh saturates, 1 - tanh^2 has the rounding error of 1.
  ours, theirs = (jax.vmap(jax.grad(f))(X) for f in (ours, theirs))
  np.testing.assert_allclose(ours, theirs, atol=2e-5)


@each
def test_activations_round_once_in_bfloat16(name):
  activation = activations.ACTIVATIONS[name]
  x = X.astype(jnp.bfloat16)
  exact = activation(x.astype(jnp.float32))
  np.testing.assert_array_equal(activation(x), exact.astype(jnp.bfloat16))
  gradient = jax.vmap(jax.grad(activation))
  assert gradient(x).dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(gradient(x), np.float32),
    gradient(x.astype(jnp.float32)),
    atol=5e-3,
  )


@each
def test_activations_keep_one_array_for_the_backward_pass(name):
  _, backward = jax.vjp(activations.ACTIVATIONS[name], random(0, 4, 8))
  kept = [x for x in jax.tree.leaves(backward) if jnp.size(x) > 1]
  assert [x.shape for x in kept] == [(4, 8)]


def test_softcap():
  x = jnp.array([-1e6, -1.0, 0.0, 1.0, 1e6])
  np.testing.assert_allclose(
    activations.softcap(x, 30.0),
    [-30.0, -0.99963, 0.0, 0.99963, 30.0],
    rtol=1e-5,
  )
  gradient = jax.vmap(jax.grad(lambda x: activations.softcap(x, 30.0)))(x)
  np.testing.assert_allclose(gradient, [0, 0.99889, 1, 0.99889, 0], rtol=1e-5)


def rotated(x, positions, theta):
  """Queries or keys turned by their positions, as attention does it."""
  return rope.rotate(x, *rope.angles(positions, x.shape[-1], theta, x.dtype))


def test_rope_is_half_split_with_falling_frequencies():
  # H = 4, theta = 100: pairs (0, 2) at frequency 1 and (1, 3) at 1/10.
  x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
  out = rotated(x, jnp.array([[2]]), 100.0)[0, 0, 0]
  fast, slow = np.array([np.cos(2), np.sin(2)]), np.array([0.980067, 0.198669])
  expected = [
    1 * fast[0] - 3 * fast[1],
    2 * slow[0] - 4 * slow[1],
    3 * fast[0] + 1 * fast[1],
    4 * slow[0] + 2 * slow[1],
  ]
  np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_scaled_frequencies():
  linear = rope.frequencies(4, 100.0, rope.Scaling('linear', 4.0))
  np.testing.assert_allclose(linear, [0.25, 0.025], rtol=1e-6)
  # Frequencies 1, 0.1, 0.01 and 0.001; a row of 314 tokens, about 100 pi, holds
  # 50, 5, 0.5 and 0.05 periods. Between 1 and 9 they are blended: 5 is half.
  scaling = rope.Scaling('llama3', 8.0, 1.0, 9.0, 314)
  np.testing.assert_allclose(
    rope.frequencies(8, 1e4, scaling),
    [1.0, 0.1 * (0.5 + 0.5 / 8), 0.01 / 8, 0.001 / 8],
    rtol=1e-3,
  )


def test_rope_products_depend_on_the_distance_only():
  q, k = random(0, 1, 1, 1, 8), random(1, 1, 1, 1, 8)

  def product(q_position, k_position):
    rotated_q = rotated(q, jnp.array([[q_position]]), 1e4)
    rotated_k = rotated(k, jnp.array([[k_position]]), 1e4)
    return jnp.sum(rotated_q * rotated_k)

  near, far = product(7, 3), product(1007, 1003)
  np.testing.assert_allclose(near, far, atol=1e-3)
  assert abs(near - product(3, 7)) > 1e-2


def test_rope_casts_angles_to_bfloat16_but_computes_them_in_fp32():
  x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
  # 4095 is no bfloat16 number.
  positions = jnp.array([[4095]])
  out = rotated(x, positions, 1e4)
  assert out.dtype == jnp.bfloat16
  exact = rotated(x.astype(jnp.float32), positions, 1e4)
  np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=1e-2)
  cos, sin = rope.angles(positions, 8, 1e4, jnp.bfloat16)
  assert cos.dtype == sin.dtype == jnp.bfloat16
