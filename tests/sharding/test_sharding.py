"""Meshes, rules and placement: sizes, collisions, divisibility."""

import jax
from jax.sharding import AbstractMesh, PartitionSpec
import numpy as np
import pytest

from encdec_adapt.models import parameters, presets
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib

pytestmark = pytest.mark.sharded


def test_one_axis_takes_what_remains():
  config = mesh_lib.MeshConfig(replica=2, fsdp=-1, tensor=2)
  assert config.sizes(8) == (2, 2, 1, 2)
  mesh = mesh_lib.make_mesh(config)
  assert dict(mesh.shape) == dict(replica=2, fsdp=2, sequence=1, tensor=2)


@pytest.mark.parametrize(
  'devices, sizes', [(8, (1, 8)), (256, (4, 64)), (96, (2, 48)), (67, (67, 1))]
)
def test_devices_in_groups(devices, sizes):
  found = mesh_lib.in_groups(devices, 64).sizes(devices)
  assert found == (*sizes, 1, 1)


@pytest.mark.parametrize(
  'config',
  [
    mesh_lib.MeshConfig(fsdp=3),
    mesh_lib.MeshConfig(fsdp=4),
    mesh_lib.MeshConfig(fsdp=-1, tensor=-1),
    mesh_lib.MeshConfig(fsdp=0),
  ],
)
def test_meshes_that_do_not_multiply_are_refused(config):
  with pytest.raises(ValueError, match=f'fsdp={config.fsdp}'):
    config.sizes(8)


def test_a_mesh_axis_twice_in_one_array_is_refused():
  rules = rules_lib.Rules(heads=('fsdp',))
  with pytest.raises(ValueError, match="'embed' and 'heads'.*query"):
    rules.check({'query': ('embed', 'heads', 'head_dim')})


def test_unknown_rules_name_the_known():
  with pytest.raises(ValueError, match='data_parallel'):
    rules_lib.named('fdsp')


@pytest.mark.parametrize(
  'sizes, words',
  [
    (dict(replica=1, fsdp=256), 'replica to 4 and config.mesh.fsdp to 64'),
    (dict(replica=2, fsdp=96), 'replica to 4 and config.mesh.fsdp to 48'),
    (dict(replica=1, fsdp=67), 'replica to 67 and config.mesh.fsdp to 1'),
  ],
)
@pytest.mark.parametrize('name', ['fsdp', 'fsdp_replica'])
def test_a_vocabulary_in_too_many_pieces_names_the_mesh_that_would_do(
  name, sizes, words
):
  rules, sizes = rules_lib.named(name), dict(sequence=1, tensor=1, **sizes)
  with pytest.raises(ValueError, match=words):
    rules.check_vocabulary(sizes)
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
  table = parameters.parameter_table(presets.t5gemma('toy_toy'))
  with pytest.raises(ValueError, match=words):
    placement.parameter_shardings(table, mesh, rules)


def test_a_vocabulary_of_too_large_a_slice_names_the_rules_that_would_do():
  sizes = dict(replica=2, fsdp=64, sequence=1, tensor=1)
  with pytest.raises(ValueError, match='among 128 .*rules to fsdp_replica'):
    rules_lib.named('whole_slice').check_vocabulary(sizes)
  rules_lib.named('fsdp_replica').check_vocabulary(sizes)
  rules_lib.named('whole_slice').check_vocabulary(sizes | {'replica': 1})


@pytest.mark.parametrize(
  'replica, fsdp, advised',
  [(1, 128, (2, 64)), (2, 128, (4, 64)), (1, 96, (2, 48))],
)
def test_where_other_rules_alone_would_not_do_the_mesh_is_advised_too(
  replica, fsdp, advised
):
  sizes = dict(replica=replica, fsdp=fsdp, sequence=1, tensor=1)
  words = (
    'Set config.mesh.rules to fsdp_replica, config.mesh.replica to {} and'
    ' config.mesh.fsdp to {};'
  )
  with pytest.raises(ValueError, match=words.format(*advised)):
    rules_lib.named('whole_slice').check_vocabulary(sizes)
  would_do = dict(zip(('replica', 'fsdp'), advised, strict=True))
  rules_lib.named('fsdp_replica').check_vocabulary(sizes | would_do)


def test_only_devices_with_tokens_of_their_own_count_as_pieces():
  rules = rules_lib.named('fsdp')
  rules.check_vocabulary(dict(replica=8, fsdp=64, sequence=1, tensor=4))
  whole = rules_lib.named('data_parallel')
  whole.check_vocabulary(dict(replica=1, fsdp=256, sequence=1, tensor=1))


@pytest.mark.parametrize('name', list(rules_lib.RULES))
def test_shipped_rules_have_no_collision(name):
  table = parameters.parameter_table(presets.t5gemma('toy_toy'))
  rules_lib.named(name).check({p: info.axes for p, info in table.items()})


def test_specs_of_a_toy_model():
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=4, tensor=2))
  table = parameters.parameter_table(presets.t5gemma('toy_toy'))
  specs = {
    path: sharding.spec
    for path, sharding in placement.parameter_shardings(
      table, mesh, rules_lib.named('fsdp')
    ).items()
  }
  block = 'decoder/blocks/layer_0'
  assert specs['decoder/embedder/table'] == PartitionSpec(
    ('fsdp', 'tensor'), None
  )
  assert specs[f'{block}/mlp/up'] == PartitionSpec(None, 'fsdp', 'tensor')
  assert specs[f'{block}/cross_attention/key'] == PartitionSpec(
    None, 'fsdp', 'tensor', None
  )


def test_indivisible_parameter_is_named():
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=8))
  table = parameters.parameter_table(
    presets.decoder_only('toy', vocab_size=4099)
  )
  with pytest.raises(ValueError, match='decoder/embedder/table.*vocab'):
    placement.parameter_shardings(table, mesh, rules_lib.named('fsdp'))


def test_indivisible_batch_is_named():
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=8))
  batch = {'targets': jax.ShapeDtypeStruct((12, 16), 'int32')}
  with pytest.raises(ValueError, match='targets.*batch_size'):
    placement.batch_sharding(mesh, rules_lib.named('fsdp'), batch)


def test_rules_with_replica_shard_all_but_the_tables_over_it():
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(replica=2, fsdp=4))
  table = parameters.parameter_table(presets.t5gemma('toy_toy'))
  specs = placement.parameter_shardings(
    table, mesh, rules_lib.named('fsdp_replica')
  )
  up = specs['decoder/blocks/layer_0/mlp/up']
  assert up.spec == PartitionSpec(None, ('replica', 'fsdp'), 'tensor')
  embedding = specs['decoder/embedder/table']
  assert embedding.spec == PartitionSpec(('fsdp', 'tensor'), None)
  specs = placement.parameter_shardings(
    table, mesh, rules_lib.named('whole_slice')
  )
  embedding = specs['decoder/embedder/table']
  assert embedding.spec == PartitionSpec(('fsdp', 'replica', 'tensor'), None)


UP = 'decoder/blocks/layer_0/mlp/up'  # ('layers', 'embed', 'mlp')


@pytest.mark.parametrize(
  'shape, axes',
  [
    ((2, 16, 24), ('layers', 'embed', 'mlp')),
    ((2, 16), ('layers', 'embed')),
    ((2, 24), ('layers', 'mlp')),
    ((1,), (None,)),
  ],
  ids=['moment', 'rows', 'columns', 'placeholder'],
)
def test_leaves_made_from_a_parameter_have_its_axes(shape, axes):
  info = parameters.ParamInfo(
    (2, 16, 24), np.dtype('float32'), ('layers', 'embed', 'mlp')
  )
  leaf = jax.ShapeDtypeStruct(shape, 'float32')
  tree = {'flat': {UP: leaf}, 'count': jax.ShapeDtypeStruct((), 'int32')}
  found = placement.axes_like_parameters(tree, {UP: info})
  assert found == {'flat': {UP: axes}, 'count': ()}
  nested = {'decoder': {'blocks': {'layer_0': {'mlp': {'up': leaf}}}}}
  found = placement.axes_like_parameters(nested, {UP: info})
  assert found['decoder']['blocks']['layer_0']['mlp']['up'] == axes


def test_a_leaf_that_does_not_divide_is_named():
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=8))
  tree = {'segments': jax.ShapeDtypeStruct((12, 3), 'int32')}
  with pytest.raises(ValueError, match=r'segments.*\(12, 3\).*batch'):
    placement.shardings(
      tree, {'segments': ('batch', None)}, mesh, rules_lib.named('fsdp')
    )
