"""The tree, its logical axes and the distributions it starts from."""

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, model_config
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement, rules
from tests import toy_models


def test_init_agrees_with_the_table(small_pair):
  model = build.build(small_pair)
  params = traverse_util.flatten_dict(
    jax.eval_shape(model.init, jax.random.key(0)), sep='/'
  )
  assert set(params) == set(model.table)
  for path, info in model.table.items():
    assert (params[path].shape, params[path].dtype) == (info.shape, info.dtype)
    assert len(info.axes) == len(info.shape)
    assert info.dtype == jnp.float32


def test_distributions(small_stack):
  stack = small_stack(width=64, mlp_width=256, vocab_size=1024, layers=5)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params = traverse_util.flatten_dict(
    jax.jit(model.init)(jax.random.key(1)), sep='/'
  )
  table = params['decoder/embedder/table']
  assert np.std(table * 64**0.5) == pytest.approx(1, rel=0.02)
  block = 'decoder/blocks/layer_1'
  fan_in = {'attention/query': 64, 'attention/output': 32, 'mlp/down': 256}
  for name, size in fan_in.items():
    kernel = np.asarray(params[f'{block}/{name}'])
    assert np.std(kernel) == pytest.approx(size**-0.5, rel=0.08), name
    assert np.abs(kernel[0] - kernel[1]).min() > 0  # layers differ
  norms = [leaf for path, leaf in params.items() if path.endswith('scale')]
  assert norms and all((leaf == 0).all() for leaf in norms)


@pytest.mark.parametrize('kind', ['relative', 'relative_each'])
def test_distributions_of_t5(kind, small_stack):
  fields = dict(layers=5, width=64, mlp_width=256, vocab_size=1024)
  fields |= dict(
    heads=32,
    kv_heads=32,
    head=toy_models.UNTIED,
    positions=toy_models.positions(kind),
  )
  stack = small_stack(**{**toy_models.T5, **fields})
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params = traverse_util.flatten_dict(
    jax.jit(model.init)(jax.random.key(1)), sep='/'
  )
  layer = 'decoder/blocks/layer_0'
  bias = {'relative': 'decoder'}.get(kind, f'{layer}/attention')
  expected = {
    'decoder/embedder/table': 1.0,
    'decoder/head/table': 64**-0.5,
    f'{bias}/relative_bias': 64**-0.5,
    f'{layer}/attention/query': (64 * stack.head_dim) ** -0.5,
    f'{layer}/attention/key': 64**-0.5,
    f'{layer}/attention/value': 64**-0.5,
    f'{layer}/attention/output': (32 * stack.head_dim) ** -0.5,
    f'{layer}/mlp/up': 64**-0.5,
    f'{layer}/mlp/down': 256**-0.5,
  }
  for path, std in expected.items():
    assert np.std(params[path]) == pytest.approx(std, rel=0.1), path


@pytest.mark.sharded
def test_sharded_init_is_the_same_and_never_replicated(small_stack):
  stack = small_stack(width=64, vocab_size=4096, layers=2)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=8))
  shardings = placement.parameter_shardings(
    model.table, mesh, rules.RULES['fsdp']
  )
  init = jax.jit(
    model.init, out_shardings=traverse_util.unflatten_dict(shardings, sep='/')
  )
  compiled = init.lower(jax.random.key(0)).compile()
  table_bytes = 4096 * 64 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < table_bytes
  sharded = compiled(jax.random.key(0))
  single = jax.jit(model.init)(jax.random.key(0))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7),
    sharded,
    single,
  )
