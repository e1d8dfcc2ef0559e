"""Property: what a query may not see cannot reach its output, not by a bit."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import attention, attention_splash, masks
from tests.ops import attention_cases, tokamax_reference

# One shape for every example, so that little is compiled.
L, S, N, K, H = 10, 7, 2, 1, 16
# Those that run here only in another form.
MADE = {
  'splash': lambda: functools.partial(attention_splash.attend, interpret=True),
  'tokamax': tokamax_reference.attend,
}
KINDS = [*attention_cases.MASKS, 'cross', 'merged']
CASES = [
  (backend, kind)
  for backend in sorted(attention.BACKENDS)
  for kind in KINDS
  if kind != 'merged' or not attention.BACKENDS[backend].kernels
]


@functools.partial(jax.jit, static_argnums=5)
def run(q, k, v, spec, weight, backend):
  """Output, and the gradients of its sum over the weighted queries."""

  def loss(q, k, v):
    if backend in MADE:
      out = MADE[backend]()(q, k, v, spec, scale=0.5, softcap=4.0)
    else:
      out = attention.attention(
        q, k, v, spec, scale=0.5, softcap=4.0, backend=backend, chunk=4
      )
    return jnp.sum(out * weight[None, :, None, None]), out

  gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return jax.tree.map(lambda x: x[0], (out, *gradients))


@pytest.mark.parametrize('backend, kind', CASES)
def test_only_visible_keys_reach_a_query(backend, kind):
  @settings(max_examples=12, deadline=None)
  @given(
    attention_cases.rows(L), attention_cases.rows(S), st.integers(0, 2**31)
  )
  def check(decoder, encoder, seed):
    spec = attention_cases.make_spec(kind, decoder, encoder[0], window=3)
    sees = np.asarray(masks.dense_mask(spec))[0]  # [queries, keys]
    rng = np.random.default_rng(seed)
    q, *before = (
      rng.normal(size=(1, *shape, H)).astype(np.float32)
      for shape in ((L, N), (sees.shape[1], K), (sees.shape[1], K))
    )
    changed = rng.random(sees.shape[1]) < 0.3
    huge = 10.0 ** rng.integers(0, 5)
    after = [
      np.where(
        changed[:, None, None], huge * rng.normal(size=x.shape), x
      ).astype(np.float32)
      for x in before
    ]
    chosen = rng.random(L) < 0.4
    weight = jnp.asarray(chosen, jnp.float32)
    x, d_q, d_k, d_v = map(np.asarray, run(q, *before, spec, weight, backend))
    y = np.asarray(run(q, *after, spec, weight, backend)[0])

    reached = (sees & changed).any(axis=1)
    np.testing.assert_array_equal(
      x[~reached].view(np.uint32), y[~reached].view(np.uint32)
    )
    # The soft-cap bounds every weight from below, so a change shows.
    assert (x[reached] != y[reached]).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(y[~sees.any(axis=1)], 0.0)
    # Gradients stay with the chosen queries and the keys that they see.
    read = (sees & chosen[:, None]).any(axis=0)
    np.testing.assert_array_equal(d_q[~chosen], 0.0)
    np.testing.assert_array_equal(d_k[~read], 0.0)
    np.testing.assert_array_equal(d_v[~read], 0.0)
    assert (d_v[read] != 0).any(axis=(1, 2)).all()

  check()
