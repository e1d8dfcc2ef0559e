"""The tree, its logical axes and the distributions it starts from."""

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from encdec_adapt.models import build, model_config, parameters
from encdec_adapt.ops import partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement, rules


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


def test_an_untied_head_is_a_table_of_its_own(small_stack, redraw, pack, run):
  model = build.build(
    model_config.DecoderOnlyConfig(small_stack(tied_head=False))
  )
  assert model.table['decoder/head/table'].shape == (53, 16)
  params = redraw(model)
  assert model.head(params) is params['decoder']['head']['table']
  part = parameters.count_by_stack(model.config)['decoder']
  assert part.head == part.embedding == 53 * 16
  rows = pack([[6]], 6)
  before = run(model)(params, None, rows)
  params['decoder']['head']['table'] *= 2
  assert not np.allclose(run(model)(params, None, rows), before)


def test_a_shared_table_is_counted_once(small_stack):
  stack = small_stack(qk_norm=True, eoi_token=7)
  pair = model_config.encoder_decoder(
    stack, stack, cross_merged=True, shared_table=True
  )
  table = parameters.parameter_table(pair)
  assert 'encoder/embedder/table' not in table
  assert not [path for path in table if 'cross' in path]
  counts = parameters.count_by_stack(pair)
  assert counts['encoder'].embedding == 0
  assert counts['decoder'].embedding == 53 * 16 + 16
  assert counts['decoder'].cross == 0


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
  alone = jax.jit(model.init)(jax.random.key(0))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7),
    sharded,
    alone,
  )


def test_init_and_table_ignore_mesh_and_partition(small_stack, redraw):
  """Traced only: with no constraint in it, the program is the same."""
  stack = small_stack(layers=1, window=5)  # a table that is not cached yet
  model = build.build(model_config.DecoderOnlyConfig(stack))
  mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))
  names = dict.fromkeys(rules.RULES['fsdp'].as_dict(), ('fsdp',))
  with jax.set_mesh(mesh), partition.use(mesh, names):
    inside = jax.make_jaxpr(model.init)(jax.random.key(0))
    assert len(model.table) == len(inside.out_avals)
    with pytest.raises(ValueError, match='divide'):  # the rules are active
      model.decode(redraw(model), *[jnp.zeros((1, 1), jnp.int32)] * 3)
  assert 'random_bits' in str(inside)
  assert 'sharding_constraint' not in str(inside)
