"""Gradients by tiles against those of the reference attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import (
  attention_gradients,
  attention_reference,
  attention_tiles,
  attention_tokamax,
  masks,
)
from encdec_adapt.planner import hlo
from tests.ops import attention_cases

MASKS = [*attention_cases.MASKS[:4], 'prefix', 'prefix window', 'cross']
LENGTH, KEYS, SIZE = 77, 83, 16  # No tile divides the lengths.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, spec, tiling):
  return _forward(q, k, v, spec, tiling)[0]


def _forward(q, k, v, spec, tiling):
  options = {'scale': tiling.scale, 'softcap': tiling.softcap}
  out = attention_reference.attend(q, k, v, spec, **options)
  keys = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
  scores = tiling.scale * jnp.einsum('btnh,bsnh->btns', q, keys)
  if tiling.softcap is not None:
    scores = tiling.softcap * jnp.tanh(scores / tiling.softcap)
  first, last = attention_tokamax.key_ranges(spec)
  index = jnp.arange(k.shape[1])
  sees = (first[..., None] <= index) & (index < last[..., None])
  sums = jax.nn.logsumexp(scores, -1, where=sees[:, :, None])
  return out, (q, k, v, spec, out, sums)


def _backward(tiling, saved, d_out):
  q, k, v, spec, out, sums = saved
  *gradients, _ = attention_gradients.gradients(
    q, k, v, spec, None, out, sums, d_out, tiling
  )
  return *gradients, None


_attend.defvjp(_forward, _backward)


def _attention(size):
  """Attention whose gradients are by tiles of so many queries and keys."""

  def attend(q, k, v, spec, *, scale, softcap):
    tiling = attention_tiles.Tiling(size, scale, softcap)
    return _attend(q, k, v, spec, tiling)

  return attend


def _rows(examples):
  """Tokens of two rows of so many examples (0: random ones), and of memory."""
  rng = np.random.default_rng(0)

  def tokens(length):
    sizes = [length // (examples or 1)] * examples
    rows = [sizes or rng.integers(1, 20, size) for size in (5, 9)]
    return attention_cases.of_sizes(rows, length)

  return tokens(LENGTH), tokens(KEYS)[0]


@pytest.mark.long
@pytest.mark.parametrize(
  'head_dim, softcap, loop',
  [
    (64, None, 'while'),
    (128, 5.0, 'cond'),
    (256, 5.0, 'while'),
    (256, None, 'cond'),
  ],
)
def test_equals_the_reference(head_dim, softcap, loop, monkeypatch):
  monkeypatch.setattr(attention_tiles, 'LOOP', loop)
  got, expected = (
    attention_cases.compiled(attend, softcap)
    for attend in (_attention(SIZE), attention_reference.attend)
  )
  sizes = {name: KEYS if name == 'cross' else LENGTH for name in MASKS}
  for examples in 1, 8, 0:
    tokens, memory = _rows(examples)
    cases = {
      name: (
        attention_cases.qkv(LENGTH, keys, head_dim=head_dim),
        attention_cases.make_spec(name, tokens, memory, window=17),
      )
      for name, keys in sizes.items()
    }
    attention_cases.assert_same(got(cases), expected(cases), 5e-5)


def test_queries_that_see_no_key():
  arrays, spec = attention_cases.qkv(100, 200), attention_cases.blind_cross()
  attention_cases.assert_like_reference(_attention(SIZE), *arrays, spec)


@pytest.mark.parametrize('loop', ['while', 'cond'])
def test_keys_that_no_query_of_a_block_sees_are_not_read(loop, monkeypatch):
  """They may be anything, NaN too."""
  monkeypatch.setattr(attention_tiles, 'LOOP', loop)
  q, k, v = attention_cases.qkv(64, 64)
  segments = jnp.broadcast_to(1 + jnp.arange(64) // 16, (2, 64))
  k = k.at[:, 16:32].set(np.nan)
  spec = masks.cross(segments, segments)
  tiling = attention_tiles.Tiling(16, 1.0, None)
  d_q, d_k, *_ = attention_gradients.gradients(
    q, k, v, spec, None, q, jnp.zeros((2, 64, 4)), q, tiling
  )
  for gradient in d_q, d_k:
    finite = np.isfinite(gradient).all((0, 2, 3))
    assert finite[:16].all() and finite[32:].all()


@pytest.mark.parametrize('loop', ['while', 'cond'])
def test_no_loop_copies_the_sums_of_a_row(loop, monkeypatch):
  monkeypatch.setattr(attention_tiles, 'LOOP', loop)
  attend, cases = (
    _attention(32),
    {
      'causal': (
        attention_cases.qkv(128, 128),
        attention_cases.spec_of('causal', 128),
      )
    },
  )
  lowered = attention_cases.compiled(attend, 5.0).lower(cases)
  text = lowered.compile().as_text()
  assert attention_cases.large_copies(text, 128 * 2 * 32) == []
  # The measure sees smaller ones.
  assert attention_cases.large_copies(text, 1)
  # Plans count all pairs: two products of the forward pass, one for its sums
  # above, and five.
  assert hlo.totals(text).flops == 8 * (2 * 4 * 128 * 128) * 2 * 32


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
