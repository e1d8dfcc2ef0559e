"""Flash kernels, interpreted, against the reference; and lowered for CUDA."""

import functools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
import numpy as np
import pytest

from encdec_adapt.models import execution
from encdec_adapt.ops import (
  attention_shards,
  attention_triton,
  flash_kernels,
  masks,
)
from tests.ops import attention_cases
from tests.ops.attention_cases import assert_like_reference, qkv, spec_of

# Small ones, so that short rows have several blocks.
TILE = flash_kernels.Tile(32, 16, 4, 2)
TILES = attention_triton.Tiles(TILE, TILE, flash_kernels.Tile(16, 32, 4, 2))
interpreted = functools.partial(attention_triton.attend, interpret=True)


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention_triton, 'choose_tiles', lambda *_: TILES)


@pytest.mark.parametrize('name', [*attention_cases.MASKS, 'merged'])
@pytest.mark.usefixtures('small_blocks')
def test_equals_the_reference(name):
  spec = spec_of(name, 75)
  keys = spec.kv_segments.shape[1]
  assert_like_reference(interpreted, *qkv(75, keys), spec)


@pytest.mark.usefixtures('small_blocks')
def test_positions_that_are_not_indices():
  # Keys in reverse order, as a cache may have them.
  spec = spec_of('causal window', 75, aligned=False)
  flip = {'kv_segments': spec.kv_segments, 'kv_positions': spec.kv_positions}
  spec = spec.replace(**jax.tree.map(lambda x: x[:, ::-1], flip))
  assert_like_reference(interpreted, *qkv(75, 75), spec, softcap=None)


def test_cross_attention_of_large_blocks_and_odd_head_dimension():
  spec = attention_cases.blind_cross()
  assert_like_reference(interpreted, *qkv(100, 200, head_dim=20), spec)


@pytest.mark.usefixtures('small_blocks')
def test_bfloat16():
  spec = spec_of('causal', 75)
  assert_like_reference(
    interpreted, *qkv(75, 75, dtype=jnp.bfloat16), spec, tolerance=0.03
  )


@pytest.mark.usefixtures('small_blocks')
@pytest.mark.parametrize('softcap', [None, 2.0])
def test_huge_scores_stay_finite(softcap):
  arrays = [x * 1e4 for x in qkv(75, 75)]
  cases = {'causal': (arrays, spec_of('causal', 75))}
  for x in attention_cases.results(interpreted, cases, softcap)['causal']:
    assert np.isfinite(x).all()


def visited(spec, tile):
  keys = spec.kv_segments.shape[1]
  call = flash_kernels.Call(spec.reach, keys, spec.memory, 1.0, None, True)
  tokens = (
    jnp.stack([spec.q_segments, spec.q_positions], axis=1),
    jnp.stack([spec.kv_segments, spec.kv_positions], axis=1),
  )
  return np.asarray(attention_triton.visited(*tokens, tile, call))


def test_only_blocks_that_may_see_are_visited():
  ones = jnp.ones((1, 8), jnp.int32)
  index = jnp.arange(8)[None]
  tile = flash_kernels.Tile(2, 2, 4, 2)
  causal = visited(masks.causal(ones, index), tile)
  np.testing.assert_array_equal(causal[0], np.tri(4))
  window = visited(masks.causal(ones, index, window=2), tile)
  np.testing.assert_array_equal(window[0], np.tri(4) - np.tri(4, k=-2))
  # Two examples and padding: each block sees its own example only.
  segments = jnp.array([[1, 1, 1, 1, 2, 2, 0, 0]])
  full = visited(masks.bidirectional(segments, index), tile)
  np.testing.assert_array_equal(
    full[0], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
  )
  memory = masks.with_memory(masks.causal(ones, index), ones[:, :2])
  np.testing.assert_array_equal(
    visited(memory, tile)[0],
    np.pad(np.tri(4), [(0, 0), (0, 1)], constant_values=1),
  )


@pytest.mark.parametrize('name', [*attention_cases.MASKS, 'merged'])
def test_every_block_that_sees_is_visited(name):
  spec = spec_of(name, 80)
  tile = flash_kernels.Tile(16, 8, 4, 2)
  sees = np.asarray(masks.dense_mask(spec))
  sees = sees.reshape(2, -1, 16, sees.shape[2] // 8, 8).any((2, 4))
  assert not (sees & ~visited(spec, tile)).any()


@pytest.mark.parametrize(
  'head_dim, dtype',
  [(64, jnp.bfloat16), (128, jnp.float32), (256, jnp.bfloat16)],
)
def test_lowers_for_cuda(head_dim, dtype):
  q, k, v = (
    jax.ShapeDtypeStruct((1, 256, heads, head_dim), dtype)
    for heads in (4, 2, 2)
  )
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def run(q, k, v, segments, positions):
    spec = masks.causal(segments, positions, window=100, aligned=True)

    def loss(q, k, v):
      out = attention_triton.attend(q, k, v, spec, scale=1.0, softcap=50.0)
      return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(q, k, v)

  device = AbstractDevice('NVIDIA H100 80GB HBM3', None, 'gpu')
  mesh = AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(run).trace(q, k, v, ids, ids)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert text.count('gpu.triton') == 3


@pytest.mark.parametrize('remat, saved', [('attention', 2), ('full', 0)])
def test_a_policy_saves_what_attention_makes(remat, saved, capsys):
  """Outputs and sums, so that the forward kernel is not run once more."""
  states = jnp.ones((2, 96, 2, 32))
  segments, positions = attention_cases.packed(96)

  def loss(states):
    spec = masks.causal(segments, positions, aligned=True)
    options = dict(scale=1.0, softcap=None)
    return jnp.sum(interpreted(states, states, states, spec, **options))

  policy = execution.REMAT_POLICIES[remat]
  jax.ad_checkpoint.print_saved_residuals(
    jax.checkpoint(loss, policy=policy), states
  )
  assert capsys.readouterr().out.count(attention_shards.SAVED) == saved
