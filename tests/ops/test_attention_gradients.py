"""Gradients by blocks of queries against those of the reference attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import (
  attention_gradients,
  attention_reference,
  attention_tokamax,
)
from tests.ops import attention_cases

MASKS = [*attention_cases.MASKS, 'prefix', 'prefix window', 'cross']


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, spec, scale, softcap, queries):
  return _forward(q, k, v, spec, scale, softcap, queries)[0]


def _forward(q, k, v, spec, scale, softcap, queries):
  del queries
  options = {'scale': scale, 'softcap': softcap}
  out = attention_reference.attend(q, k, v, spec, **options)
  keys = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
  scores = scale * jnp.einsum('btnh,bsnh->bnts', q, keys)
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  first, last, _ = attention_tokamax.key_ranges(spec)
  index = jnp.arange(k.shape[1])
  sees = (first[..., None] <= index) & (index < last[..., None])
  sums = jax.nn.logsumexp(scores, -1, where=sees[:, None])
  return out, (q, k, v, spec, first, last, out, sums)


def _backward(scale, softcap, queries, saved, d_out):
  q, k, v, spec, *others = saved
  gradients = attention_gradients.gradients(
    *(q, k, v, *others, d_out),
    scale=scale,
    softcap=softcap,
    queries=queries,
  )
  return *gradients, jax.tree.map(lambda _: None, spec)


_attend.defvjp(_forward, _backward)


@pytest.mark.parametrize('softcap', [None, 5.0])
@pytest.mark.parametrize('queries', [8, 75, 128])
def test_equals_the_reference(softcap, queries):
  cases = {}
  for name in MASKS:
    spec = attention_cases.spec_of(name, 75)
    sizes = spec.q_segments.shape[1], spec.kv_segments.shape[1]
    cases[name] = attention_cases.qkv(*sizes), spec
  blind = attention_cases.blind_cross()
  cases['blind cross'] = attention_cases.qkv(100, 200), blind

  def attend(q, k, v, spec, *, scale, softcap):
    sees = attention_tokamax.key_ranges(spec)[2]
    out = _attend(q, k, v, spec, scale, softcap, queries)
    return jnp.where(sees[..., None, None], out, 0)

  expected = attention_cases.results(attention_reference.attend, cases, softcap)
  got = attention_cases.results(attend, cases, softcap)
  attention_cases.assert_same(got, expected, 5e-5)


def test_keys_that_no_query_of_a_block_sees_are_not_read():
  """They may be anything, NaN too."""
  q, k, v = attention_cases.qkv(64, 64)
  first = jnp.broadcast_to(jnp.arange(64) // 16 * 16, (2, 64))
  k = k.at[:, 16:32].set(np.nan)
  d_q, d_k, _ = attention_gradients.gradients(
    *(q, k, v, first, first + 16, q, jnp.zeros((2, 4, 64)), q),
    scale=1.0,
    softcap=None,
    queries=16,
  )
  for gradient in d_q, d_k:
    finite = np.isfinite(gradient).all((0, 2, 3))
    assert finite[:16].all() and finite[32:].all()
