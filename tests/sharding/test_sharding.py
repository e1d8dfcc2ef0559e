"""Meshes, rules and placement: sizes, collisions, divisibility."""

import jax
from jax.sharding import PartitionSpec
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
