"""Backends against a loop in float64, each other, and their promises."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from encdec_adapt.ops import attention, masks

BACKENDS = sorted(
  name
  for name, backend in attention.BACKENDS.items()
  if 'cpu' in backend.capabilities.platforms
)
B, N, K, H = 2, 4, 2, 8
SCALE, CHUNK = 0.4, 4


def random(seed, *shape, dtype=jnp.float32):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


def qkv(queries, keys, *, heads=N, kv_heads=K, dtype=jnp.float32):
  return (
    random(0, B, queries, heads, H, dtype=dtype),
    random(1, B, keys, kv_heads, H, dtype=dtype),
    random(2, B, keys, kv_heads, H, dtype=dtype),
  )


def packed(length):
  """Segments and positions of two pairs and two padded slots per row."""
  first = length // 2
  second = length - first - 2
  segments = [1] * first + [2] * second + [0, 0]
  positions = [*range(first), *range(second), 0, 0]
  return (
    jnp.array([segments] * B, jnp.int32),
    jnp.array([positions] * B, jnp.int32),
  )


def specs(length):
  segments, positions = packed(length)
  local = {'window': 3, 'window_rule': 'inclusive'}
  return {
    'causal': masks.causal(segments, positions),
    'causal window': masks.causal(segments, positions, window=3),
    'full': masks.bidirectional(segments, positions),
    'full exclusive window': masks.bidirectional(segments, positions, window=3),
    'full inclusive window': masks.bidirectional(segments, positions, **local),
    'nothing visible': masks.cross(segments, segments + 7),
  }


def by_loop(q, k, v, spec, softcap):
  """The definition, one score at a time, in float64."""
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


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def gradients_of(q, k, v, spec, backend, softcap=None, chunk=CHUNK):
  """The output and the gradients of a loss of it, by q, k and v."""

  def loss(q, k, v):
    out = attend(q, k, v, spec, backend, softcap, chunk)
    weight = random(3, *out.shape)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * weight), out

  gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
  return out, *gradients


def assert_close(got, expected, atol=2e-6):
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=atol)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('name', specs(11))
def test_equals_the_definition(backend, name):
  q, k, v = qkv(11, 11)
  spec = specs(11)[name]
  out = attend(q, k, v, spec, backend, 2.0)
  np.testing.assert_allclose(out, by_loop(q, k, v, spec, 2.0), atol=2e-6)


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
@pytest.mark.parametrize('backend', BACKENDS)
def test_query_heads_share_key_value_heads(backend, kv_heads):
  q, k, v = qkv(11, 11, kv_heads=kv_heads)
  spec = specs(11)['causal']
  out = attend(q, k, v, spec, backend)
  np.testing.assert_allclose(out, by_loop(q, k, v, spec, None), atol=2e-6)


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('queries, keys', [(9, 5), (5, 9), (1, 7)])
def test_cross_lengths(backend, queries, keys):
  q, k, v = qkv(queries, keys)
  q_segments = jnp.array([([1, 2] * queries)[:queries]] * B, jnp.int32)
  kv_segments = jnp.array([([2, 1, 0] * keys)[:keys]] * B, jnp.int32)
  spec = masks.cross(q_segments, kv_segments)
  out = attend(q, k, v, spec, backend, 2.0)
  np.testing.assert_allclose(out, by_loop(q, k, v, spec, 2.0), atol=2e-6)


@pytest.mark.parametrize('backend', [b for b in BACKENDS if b != 'reference'])
@pytest.mark.parametrize(
  'name, softcap', [(name, 2.0) for name in specs(11)] + [('causal', None)]
)
def test_backends_agree_in_value_and_gradient(backend, name, softcap):
  call = *qkv(11, 11), specs(11)[name]
  assert_close(
    gradients_of(*call, backend, softcap),
    gradients_of(*call, 'reference', softcap),
  )


@pytest.mark.parametrize('chunk', [1, 3, 11])
def test_chunk_size_does_not_matter(chunk):
  call = *qkv(11, 11), specs(11)['full exclusive window']
  assert_close(
    gradients_of(*call, 'chunked', 2.0, chunk),
    gradients_of(*call, 'reference', 2.0),
  )


@pytest.mark.parametrize('backend', BACKENDS)
def test_gradients_equal_finite_differences(backend):
  spec = specs(6)['causal window']

  def run(q, k, v):
    return attend(q, k, v, spec, backend, 2.0)

  jax.test_util.check_grads(
    run,
    qkv(6, 6, heads=2, kv_heads=1),
    order=1,
    modes=['rev'],
    atol=2e-2,
    rtol=2e-2,
  )


@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('size', [1.0, 1e4])
def test_rows_that_see_nothing_are_zeros(backend, size):
  spec = specs(11)['nothing visible']
  arrays = [x * size for x in qkv(11, 11)]
  for x in gradients_of(*arrays, spec, backend, 2.0):
    np.testing.assert_array_equal(x, jnp.zeros_like(x))


@pytest.mark.parametrize('backend', BACKENDS)
def test_padded_rows_are_zeros_and_gradients_finite(backend):
  spec = specs(11)['causal']
  for x in gradients_of(*qkv(11, 11), spec, backend, 2.0):
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x[:, -2:], 0.0)
    assert np.abs(x[:, :-2]).max() > 1e-3


@pytest.mark.parametrize('backend', BACKENDS)
def test_huge_scores_stay_finite(backend):
  arrays = [x * 1e4 for x in qkv(11, 11)]
  for x in gradients_of(*arrays, specs(11)['causal'], backend, None):
    assert np.isfinite(x).all()


@pytest.mark.parametrize('backend', BACKENDS)
def test_bfloat16_has_fp32_scores_and_softmax(backend):
  # 600 equal keys: the softmax's sum would stop at 256 in bfloat16.
  ones = jnp.ones((B, 600), jnp.int32)
  q = random(0, B, 5, N, H, dtype=jnp.bfloat16)
  k = jnp.zeros((B, 600, K, H), jnp.bfloat16)
  out = attend(q, k, jnp.ones_like(k), masks.cross(ones[:, :5], ones), backend)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=5e-3)


@pytest.mark.parametrize('backend', BACKENDS)
def test_bfloat16_is_close_to_fp32(backend):
  narrow = qkv(11, 11, dtype=jnp.bfloat16)
  wide = [x.astype(jnp.float32) for x in narrow]
  spec = specs(11)['causal window']
  pairs = zip(
    gradients_of(*narrow, spec, backend, 2.0),
    gradients_of(*wide, spec, backend, 2.0),
    strict=True,
  )
  for got, expected in pairs:
    assert got.dtype == jnp.bfloat16
    error = np.abs(np.asarray(got, np.float32) - expected).max()
    assert error < 2e-2 * np.abs(expected).max()


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


def temporary_bytes(backend, length, backward):
  """Memory of the compiled program besides its arguments and results."""
  array = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def loss(q, k, v, segments, positions):
    out = attention.attention(
      q,
      k,
      v,
      masks.causal(segments, positions, window=16),
      scale=SCALE,
      softcap=2.0,
      backend=backend,
      chunk=32,
    )
    return jnp.sum(out)

  program = jax.grad(loss, argnums=(0, 1, 2)) if backward else loss
  compiled = jax.jit(program).lower(array, array, array, ids, ids).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('backward', [False, True])
def test_chunked_memory_is_linear_in_the_length(backward):
  short, long = (temporary_bytes('chunked', n, backward) for n in (256, 1024))
  assert long < 4.2 * short
  # The measure sees a square where there is one.
  square = [temporary_bytes('reference', n, backward) for n in (256, 1024)]
  assert square[1] > 12 * square[0]
  assert long < square[1] / 10


def test_unknown_backend_is_refused_by_name():
  q, k, v = qkv(4, 4)
  with pytest.raises(ValueError, match="'flash'; choose one of chunked, ref"):
    attention.attention(q, k, v, specs(4)['full'], scale=SCALE, backend='flash')


@pytest.mark.parametrize(
  'lacks, what',
  [
    ({'masks': frozenset({'full'})}, "a 'causal window' mask"),
    ({'softcap': False}, r'a soft-cap \(2.0\)'),
    ({'grouped_heads': False}, '4 query heads on 2 key/value heads'),
    ({'cross_lengths': False}, '5 queries on 11 keys'),
    ({'dtypes': frozenset({'bfloat16'})}, 'dtype float32'),
    ({'head_multiple': 128}, 'a head dimension of 8'),
    ({'platforms': frozenset({'tpu'})}, "platform 'cpu'"),
  ],
)
def test_what_a_backend_cannot_honour_is_refused(monkeypatch, lacks, what):
  reference = attention.BACKENDS['reference']
  kernel = dataclasses.replace(
    reference,
    capabilities=dataclasses.replace(reference.capabilities, **lacks),
  )
  monkeypatch.setitem(attention.BACKENDS, 'kernel', kernel)
  q, k, v = qkv(5, 11)
  spec = specs(11)['causal window']
  spec = spec.replace(
    q_segments=spec.q_segments[:, :5], q_positions=spec.q_positions[:, :5]
  )
  call = {'scale': SCALE, 'softcap': 2.0}
  message = f"'kernel' cannot honour {what}.*that can: chunked, reference"
  with pytest.raises(ValueError, match=message):
    attention.attention(q, k, v, spec, backend='kernel', **call)
  # The same backend with the capability back is used.
  monkeypatch.setitem(attention.BACKENDS, 'kernel', reference)
  attention.attention(q, k, v, spec, backend='kernel', **call)


def test_packed_rows_are_refused_where_segments_are_not_honoured(monkeypatch):
  def attend(q, k, v, spec, *, scale, softcap):
    assert spec.q_segments is None
    return attention.BACKENDS['reference'].attend(
      q, k, v, masks.with_segments(spec, B, 4, 4), scale=scale, softcap=softcap
    )

  lacks = dataclasses.replace(
    attention.BACKENDS['reference'].capabilities, segments=False
  )
  kernel = attention.Backend(attend, lacks)
  monkeypatch.setitem(attention.BACKENDS, 'kernel', kernel)
  q, k, v = qkv(4, 4)
  message = "'kernel' cannot honour segment ids .*that can: chunked, reference$"
  with pytest.raises(ValueError, match=message):
    attention.attention(
      q, k, v, specs(4)['causal'], scale=SCALE, backend='kernel'
    )
  # Rows of one segment say so by having none.
  positions = jnp.broadcast_to(jnp.arange(4), (B, 4))
  whole = masks.MaskSpec(
    kind='causal', q_positions=positions, kv_positions=positions
  )
  run = functools.partial(attention.attention, q, k, v, scale=SCALE)
  ones = jnp.ones((B, 4), jnp.int32)
  expected = run(whole.replace(q_segments=ones, kv_segments=ones))
  for backend in ('kernel', *BACKENDS):
    np.testing.assert_allclose(
      run(whole, backend=backend), expected, rtol=1e-5, atol=1e-6
    )
  with pytest.raises(ValueError, match='needs kv_segments; it is None'):
    run(whole.replace(q_segments=ones))


def test_platform_is_that_of_the_active_mesh(monkeypatch):
  # Compiling for a TPU topology happens on a machine without one.
  device = types.SimpleNamespace(platform='tpu')
  mesh = types.SimpleNamespace(devices=np.array([[device]]))
  monkeypatch.setattr(
    attention.partition, 'active', lambda: types.SimpleNamespace(mesh=mesh)
  )
  chunked = attention.BACKENDS['chunked']
  cpu_only = dataclasses.replace(
    chunked.capabilities, platforms=frozenset({'cpu'})
  )
  monkeypatch.setitem(
    attention.BACKENDS,
    'chunked',
    dataclasses.replace(chunked, capabilities=cpu_only),
  )
  q, k, v = qkv(4, 4)
  with pytest.raises(ValueError, match="platform 'tpu'"):
    attention.attention(q, k, v, specs(4)['full'], scale=SCALE)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'heads': 3}, '3 query heads are not a multiple of 2'),
    ({'softcap': 0.0}, 'softcap is 0.0'),
    ({'chunk': 0}, 'chunk is 0'),
    ({'queries': 6}, r'q_segments .*\(2, 4\).*\(2, 6\)'),
  ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
  options = {'softcap': None, 'chunk': 4, 'heads': N, 'queries': 4} | change
  q, k, v = qkv(options.pop('queries'), 4, heads=options.pop('heads'))
  with pytest.raises(ValueError, match=message):
    attention.attention(q, k, v, specs(4)['full'], scale=SCALE, **options)


def test_mixed_dtypes_are_refused():
  q, k, v = qkv(4, 4)
  with pytest.raises(ValueError, match='float32, bfloat16, float32'):
    attention.attention(
      q, k.astype(jnp.bfloat16), v, specs(4)['full'], scale=SCALE
    )
