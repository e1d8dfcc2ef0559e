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


def _attention(queries):
  """Attention whose gradients are by blocks of so many queries."""

  def attend(q, k, v, spec, *, scale, softcap):
    sees = attention_tokamax.key_ranges(spec)[2]
    out = _attend(q, k, v, spec, scale, softcap, queries)
    return jnp.where(sees[..., None, None], out, 0)

  return attend


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

  attend = _attention(queries)
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


def test_blocks_of_many_keys_are_small(monkeypatch):
  assert attention_gradients.block(4096, 4096) == 1024
  assert attention_gradients.block(100_000, 24_576) == 256
  assert attention_gradients.block(100_000, 2**20) == 128
  monkeypatch.setattr(attention_gradients, 'QUERIES', 16)
  assert attention_gradients.block(10, 40) == 10
  # Several blocks, the last padded, of more keys than queries.
  q, k, v = attention_cases.qkv(70, 200)
  spec = attention_cases.masks.cross(
    jnp.ones((2, 70), jnp.int32), jnp.ones((2, 200), jnp.int32)
  )

  attention_cases.assert_like_reference(_attention(None), q, k, v, spec)


def test_gradients_of_bfloat16_are_rounded_once():
  arrays = attention_cases.qkv(75, 75)
  q, k, v = (x.astype(jnp.bfloat16) for x in arrays)
  spec = attention_cases.spec_of('causal', 75)

  found = attention_cases.results(_attention(16), {'': ((q, k, v), spec)})['']
  exact = (q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32))
  expected = attention_cases.results(
    attention_reference.attend, {'': (exact, spec)}
  )['']
  for x, y in zip(found, expected, strict=True):
    assert x.dtype == jnp.bfloat16
    assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()
