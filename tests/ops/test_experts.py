"""Routing and dropless experts against every expert on every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import experts

B, L, D, F, X, K = 2, 7, 6, 5, 4, 2


@pytest.fixture(scope='module')
def case():
  """States, logits, padding at the end of row 1, and kernels."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  real = jnp.ones((B, L), bool).at[1, 4:].set(False)
  kernels = draw(X, D, F), draw(X, D, F), draw(X, F, D)
  return draw(B, L, D), draw(B, L, X), real, kernels


def plain(x, logits, real, kernels, normalise):
  """Every expert on every token."""
  gate, up, down = kernels
  shares = jax.nn.softmax(logits)
  least = jnp.sort(shares)[..., -K, None]
  shares = jnp.where(shares >= least, shares, 0)
  if normalise:
    shares = shares / shares.sum(-1, keepdims=True)
  hidden = jnp.tanh(jnp.einsum('BLD,XDF->BLXF', x, gate))
  hidden = hidden * jnp.einsum('BLD,XDF->BLXF', x, up)
  out = jnp.einsum('BLXF,XFD,BLX->BLD', hidden, down, shares)
  return jnp.where(real[..., None], out, 0)


def ours(x, logits, real, kernels, normalise):
  chosen, shares = experts.route(logits, real, K, normalise=normalise)
  return experts.feed_forward(x, chosen, shares, *kernels, jnp.tanh)


@pytest.mark.parametrize('normalise', [False, True])
@pytest.mark.parametrize('favourite', [0.0, 20.0])
def test_output_and_gradients_equal_the_plain_form(case, normalise, favourite):
  x, logits, real, kernels = case
  # No token is dropped where all of them take the same expert.
  logits = logits.at[..., 2].add(favourite)

  def loss(function, x, logits, kernels):
    y = function(x, logits, real, kernels, normalise)
    return jnp.sum(jnp.sin(y)), y

  def run(function):
    graded = jax.grad(
      functools.partial(loss, function), argnums=(0, 1, 2), has_aux=True
    )
    return jax.jit(graded)(x, logits, kernels)

  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5),
    run(ours),
    run(plain),
  )


def test_a_token_does_not_see_the_others(case):
  x, logits, real, kernels = case
  run = jax.jit(functools.partial(ours, kernels=kernels, normalise=True))
  before = run(x, logits, real)
  rng = np.random.default_rng(1)
  for seed in range(8):
    kept = rng.integers(L - 3)
    other = jnp.asarray(rng.normal(size=(2, B, L, D + X)) * 10**seed)
    # The others' states, experts and whether they are padding; one is NaN.
    mine = jnp.zeros((B, L), bool).at[0, kept].set(True)
    changed_x = jnp.where(mine[..., None], x, other[0, ..., :D])
    changed_x = changed_x.at[1, 0].set(jnp.nan).astype(x.dtype)
    changed_logits = jnp.where(mine[..., None], logits, other[0, ..., D:])
    after = run(
      changed_x,
      changed_logits.astype(logits.dtype),
      jnp.where(mine, real, other[1, ..., 0] > 0),
    )
    np.testing.assert_allclose(after[0, kept], before[0, kept], rtol=1e-5)


def test_padding_takes_no_expert(case):
  x, logits, real, kernels = case
  chosen, _ = experts.route(logits, real, K, normalise=True)
  assert (np.asarray(chosen)[1, 4:] == X).all()
  assert (np.asarray(chosen)[np.asarray(real)] < X).all()
  out = ours(x, logits, real, kernels, True)
  assert not np.asarray(out)[1, 4:].any()


def test_losses_by_hand():
  # Two tokens of two experts, one expert each; the third is padding.
  logits = jnp.log(jnp.array([[[0.75, 0.25], [0.5, 0.5], [0.1, 0.9]]]))
  chosen = jnp.array([[[0], [0], [2]]])
  real = jnp.array([[True, True, False]])
  found = experts.losses(logits, real, chosen)
  # Shares 1 and 0; mean probabilities 5/8 and 3/8.
  np.testing.assert_allclose(found.balance, 2 * 5 / 8, rtol=1e-6)
  np.testing.assert_allclose(found.z, 0.0, atol=1e-12)
  found = experts.losses(logits + 2.0, real, chosen)
  np.testing.assert_allclose(found.z, 4.0, rtol=1e-6)
