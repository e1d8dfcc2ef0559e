"""Backends against a loop in float64, each other, and their promises."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from encdec_adapt.ops import attention, masks
from tests.ops import attention_cases

BACKENDS = attention.on_platform('cpu')
B, N, K, H = 2, 4, 2, 8
SCALE, CHUNK = 0.4, 4
qkv = functools.partial(attention_cases.qkv, head_dim=H)
PREFIX = ('prefix', 'prefix window')
MASKS = [*attention_cases.MASKS, *PREFIX, 'nothing visible']
every_backend = pytest.mark.parametrize('backend', BACKENDS)


def spec_of(name, length=11):
  if name == 'nothing visible':
    segments = attention_cases.packed(length)[0]
    return masks.cross(segments, segments + 7)
  return attention_cases.spec_of(name, length, window=3, aligned=False)


def by_loop(q, k, v, spec, softcap):
  """The definition, one query and head at a time, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  visible = np.asarray(masks.dense_mask(spec))
  out = np.zeros_like(q)
  for b, t, n in np.ndindex(q.shape[:3]):
    kv_head = n // (q.shape[2] // k.shape[2])
    keys = np.flatnonzero(visible[b, t])
    if not keys.size:
      continue
    scores = k[b, keys, kv_head] @ q[b, t, n] * SCALE
    if softcap is not None:
      scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    out[b, t, n] = weights @ v[b, keys, kv_head] / weights.sum()
  return out


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def attend(q, k, v, spec, backend, softcap=None, chunk=CHUNK):
  return attention.attention(
    q, k, v, spec, scale=SCALE, softcap=softcap, backend=backend, chunk=chunk
  )


@every_backend
@pytest.mark.parametrize('name', MASKS)
def test_equals_the_definition(backend, name):
  call = *qkv(11, 11), spec_of(name)
  out = attend(*call, backend, 2.0)
  np.testing.assert_allclose(out, by_loop(*call, 2.0), atol=2e-6)


@every_backend
@pytest.mark.parametrize('queries, keys, kv_heads', [(9, 5, 1), (1, 7, 4)])
def test_other_lengths_and_groups_of_heads(backend, queries, keys, kv_heads):
  q_segments = jnp.array([([1, 2] * queries)[:queries]] * B, jnp.int32)
  kv_segments = jnp.array([([2, 1, 0] * keys)[:keys]] * B, jnp.int32)
  arrays = qkv(queries, keys, heads=(N, kv_heads))
  call = *arrays, masks.cross(q_segments, kv_segments)
  out = attend(*call, backend, None)
  np.testing.assert_allclose(out, by_loop(*call, None), atol=2e-6)


@pytest.mark.parametrize('chunk', [1, 4, 11])
@pytest.mark.parametrize('name', ['causal', 'full exclusive window'])
def test_chunks_agree_in_value_and_gradient(name, chunk):
  chunked = functools.partial(
    attention.attention, backend='chunked', chunk=chunk
  )
  attention_cases.assert_like_reference(
    chunked, *qkv(11, 11), spec_of(name), softcap=2.0, tolerance=1e-6
  )


def test_gradients_equal_finite_differences():
  spec = spec_of('causal window', 6)
  jax.test_util.check_grads(
    lambda *arrays: attend(*arrays, spec, 'reference', 2.0),
    qkv(6, 6, heads=(2, 1)),
    order=1,
    modes=['rev'],
    atol=2e-2,
    rtol=2e-2,
  )


@every_backend
@pytest.mark.parametrize('name', ['nothing visible', 'causal'])
def test_huge_scores_and_blind_rows_stay_finite(backend, name):
  cases = {name: ([x * 1e4 for x in qkv(11, 11)], spec_of(name))}
  call = functools.partial(attention.attention, backend=backend)
  for x in attention_cases.results(call, cases, None)[name]:
    assert np.isfinite(x).all()
    if name == 'nothing visible':
      np.testing.assert_array_equal(x, jnp.zeros_like(x))


@every_backend
def test_bfloat16_has_fp32_scores_and_softmax(backend):
  # 600 equal keys: the softmax's sum would stop at 256 in bfloat16.
  ones = jnp.ones((B, 600), jnp.int32)
  q, k, _ = qkv(5, 600, dtype=jnp.bfloat16)
  out = attend(q, 0 * k, 0 * k + 1, masks.cross(ones[:, :5], ones), backend)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=5e-3)


def test_value_gradients_of_many_chunks_add_up_in_fp32():
  # Every query gives both values the same cotangent, 1/2: 1024 of them would
  # stop growing at 128 if they were added up in bfloat16.
  queries = 1024
  ones = jnp.ones((1, queries), jnp.int32)
  q = jnp.zeros((1, queries, 1, 2), jnp.bfloat16)
  k = v = jnp.zeros((1, 2, 1, 2), jnp.bfloat16)
  spec = masks.cross(ones, ones[:, :2])

  def loss(v):
    out = attend(q, k, v, spec, 'chunked', None, 1)
    return jnp.sum(out.astype(jnp.float32))

  np.testing.assert_array_equal(
    np.asarray(jax.grad(loss)(v), np.float32), queries / 2
  )


def temporary_bytes(backend, length):
  """Memory of the compiled gradient besides its arguments and results."""
  array = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def loss(q, k, v, segments, positions):
    spec = masks.causal(segments, positions, window=16)
    return jnp.sum(attend(q, k, v, spec, backend, 2.0, 32))

  program = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  compiled = program.lower(array, array, array, ids, ids).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear_in_the_length():
  short, long = (temporary_bytes('chunked', n) for n in (256, 1024))
  assert long < 4.2 * short
  # The measure sees a square where there is one.
  assert temporary_bytes('reference', 1024) > 10 * long


@pytest.mark.parametrize(
  'backend, name, aligned, head_dim, dtype, what',
  [
    ('splash', 'causal', False, H, 'float32', 'positions that are not indices'),
    ('splash', 'merged', True, H, 'float32', '11 keys without a position'),
    ('splash', 'prefix', True, H, 'float32', 'a bidirectional prefix'),
    ('splash', 'causal', True, H, 'float16', 'dtype float16'),
    ('tokamax', 'merged', True, H, 'bfloat16', '11 keys without a position'),
    ('tokamax', 'causal', False, H, 'bfloat16', 'positions that are not ind'),
    ('tokamax', 'causal', True, H, 'float32', "dtype float32; platform 'cpu'"),
  ],
)
def test_what_a_backend_cannot_honour_is_refused(
  backend, name, aligned, head_dim, dtype, what
):
  spec = attention_cases.spec_of(name, 11, aligned=aligned)
  arrays = qkv(11, spec.kv_segments.shape[1], head_dim=head_dim, dtype=dtype)
  message = f"'{backend}' cannot honour .*{what}.*that can: chunked, reference"
  with pytest.raises(ValueError, match=message):
    attention.attention(*arrays, spec, scale=SCALE, backend=backend)
