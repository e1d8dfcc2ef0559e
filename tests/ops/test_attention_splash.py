"""Splash kernels, interpreted, against the reference: forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from encdec_adapt.ops import (
  attention,
  attention_reference,
  attention_splash,
  masks,
  partition,
)

B, N, K, H = 2, 4, 2, 64
RULES = {
  'batch': ('replica', 'fsdp'),
  'length': ('sequence',),
  'act_heads': ('tensor',),
}
interpreted = functools.partial(attention_splash.attend, interpret=True)


def packed(length):
  """Segments and positions of two pairs and some padding per row."""
  first = length // 3
  second = length - first - 7
  segments = [1] * first + [2] * second + [0] * 7
  positions = [*range(first), *range(second), *[0] * 7]
  return (
    jnp.array([segments] * B, jnp.int32),
    jnp.array([positions] * B, jnp.int32),
  )


def spec_of(name, length):
  segments, positions = packed(length)
  rule = name.split()[1] if 'window' in name and 'full' in name else 'exclusive'
  window = 17 if 'window' in name else None
  make = masks.causal
  if name.startswith('full'):
    make = functools.partial(masks.bidirectional, window_rule=rule)
  return make(segments, positions, window=window, aligned=True)


def qkv(queries, keys, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = (B, queries, N, H), (B, keys, K, H), (B, keys, K, H)
  return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def results(attend, q, k, v, spec, softcap):
  """Output and gradients of a loss of it."""

  def loss(q, k, v):
    out = attend(q, k, v, spec, scale=0.3, softcap=softcap)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

  gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
  return out, *gradients


def assert_like_reference(attend, q, k, v, spec, softcap=5.0, rtol=1e-6):
  expected = results(attention_reference.attend, q, k, v, spec, softcap)
  for got, want in zip(
    results(attend, q, k, v, spec, softcap), expected, strict=True
  ):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(
      np.asarray(got, np.float32),
      np.asarray(want, np.float32),
      rtol=rtol,
      atol=max(5e-5, rtol),
    )


@pytest.mark.parametrize('name', sorted(attention.ALL_MASKS))
def test_equals_the_reference(name):
  # 150 tokens are padded to two vectors of lanes.
  assert_like_reference(interpreted, *qkv(150, 150), spec_of(name, 150))


def test_several_blocks_without_a_cap():
  assert_like_reference(
    interpreted, *qkv(600, 600), spec_of('causal window', 600), softcap=None
  )


@pytest.mark.parametrize('name', ['full', 'full inclusive window', 'causal'])
def test_one_backward_kernel_where_all_see_all(name, monkeypatch):
  monkeypatch.setattr(attention_splash, '_BLOCK', 128)
  used = []
  sizes = attention_splash.kernels.BlockSizes

  def record(**given):
    used.append(given)
    return sizes(**given)

  monkeypatch.setattr(attention_splash.kernels, 'BlockSizes', record)
  spec = spec_of(name, 500)
  if 'window' in name:  # One that nobody can see the end of.
    spec = spec.replace(window=511)
  assert_like_reference(interpreted, *qkv(500, 500), spec)
  fused = name != 'causal'
  assert used[-1]['use_fused_bwd_kernel'] == fused
  assert used[-1]['block_kv_dkv'] == (512 if fused else 128)


@pytest.mark.parametrize(
  'blocks, block_kib, count',
  [
    (8, 128, 4),
    (8, 256, 2),
    (16, 256, 2),
    (32, 256, 1),  # 16 parts.
    (8, 512, 1),  # Twice as many bytes.
    (6, 256, 2),
    (5, 256, 1),
    (1, 256, 1),
  ],
)
def test_blocks_of_a_part(blocks, block_kib, count):
  assert attention_splash.joined(blocks, block_kib * 2**10) == count


def test_cross_attention_of_other_lengths_and_rows_that_see_nothing():
  q_segments = jnp.array([[1] * 50 + [3] * 40 + [0] * 10] * B, jnp.int32)
  kv_segments = jnp.array([[1] * 100 + [2] * 90 + [0] * 10] * B, jnp.int32)
  spec = masks.cross(q_segments, kv_segments)
  q, k, v = qkv(100, 200)
  assert_like_reference(interpreted, q, k, v, spec)
  out = interpreted(q, k, v, spec, scale=0.3, softcap=None)
  assert jnp.all(out[:, 50:] == 0) and jnp.any(out[:, :50] != 0)


def test_bfloat16():
  q, k, v = qkv(130, 130, jnp.bfloat16)
  assert_like_reference(interpreted, q, k, v, spec_of('causal', 130), rtol=0.03)


@pytest.mark.sharded
@pytest.mark.parametrize(
  'sizes, name',
  [
    ((1, 2, 1, 1), 'full exclusive window'),
    ((1, 1, 1, 2), 'full exclusive window'),
    ((2, 1, 2, 2), 'full exclusive window'),
    ((2, 1, 2, 2), 'full'),  # Its backward pass is one kernel.
  ],
)
def test_on_a_mesh(sizes, name):
  devices = jax.devices()[: int(np.prod(sizes))]
  mesh = jax.make_mesh(
    sizes,
    ('replica', 'fsdp', 'sequence', 'tensor'),
    axis_types=(AxisType.Auto,) * 4,
    devices=devices,
  )

  @functools.partial(jax.jit, static_argnames=('scale', 'softcap'))
  def attend(q, k, v, spec, scale, softcap):
    with partition.use(mesh, RULES):
      return interpreted(q, k, v, spec, scale=scale, softcap=softcap)

  assert_like_reference(attend, *qkv(256, 256), spec_of(name, 256))


def test_heads_that_do_not_divide_are_refused():
  mesh = jax.make_mesh(
    (1, 1, 1, 4),
    ('replica', 'fsdp', 'sequence', 'tensor'),
    axis_types=(AxisType.Auto,) * 4,
    devices=jax.devices()[:4],
  )
  with (
    partition.use(mesh, RULES),
    pytest.raises(ValueError, match='2 key/value'),
  ):
    interpreted(*qkv(128, 128), spec_of('causal', 128), scale=1.0, softcap=None)


def refused(spec, q, k):
  capabilities = attention.BACKENDS['splash'].capabilities
  return ' '.join(attention.unsupported(capabilities, q, k, spec, 1.0))


def test_the_dispatcher_refuses_what_the_kernels_cannot_honour():
  q, k, _ = qkv(32, 32)
  spec = spec_of('causal', 32)
  assert refused(spec, q, k) == "platform 'cpu'"
  assert 'positions that are not indices' in refused(
    spec.replace(aligned=False), q, k
  )
  merged = masks.with_memory(spec, spec.kv_segments)
  assert '32 keys without a position' in refused(merged, q, k)
  assert 'float16' in refused(spec, q.astype(jnp.float16), k)
