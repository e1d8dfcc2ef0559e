"""Meshes, rules and placement: sizes, collisions, divisibility."""

import types

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
import numpy as np
import pytest

from encdec_adapt.models import parameters, presets
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib

pytestmark = pytest.mark.sharded

TABLE = parameters.parameter_table(presets.t5gemma('toy_toy'))


def abstract(**sizes):
  sizes = dict.fromkeys(mesh_lib.AXES, 1) | sizes
  return AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.mark.parametrize(
  'config, devices, sizes',
  [
    (mesh_lib.MeshConfig(replica=2, tensor=2), 8, (2, 2, 1, 2)),
    (mesh_lib.in_groups(8, 64), 8, (1, 8, 1, 1)),
    (mesh_lib.in_groups(256, 64), 256, (4, 64, 1, 1)),
    (mesh_lib.in_groups(96, 64), 96, (2, 48, 1, 1)),
    (mesh_lib.in_groups(67, 64), 67, (67, 1, 1, 1)),
  ],
)
def test_sizes_of_the_axes(config, devices, sizes):
  assert config.sizes(devices) == sizes


def place(shape, *names, rules='fsdp', **sizes):
  leaf = jax.ShapeDtypeStruct(shape, 'float32')
  table = {'leaf': parameters.ParamInfo(shape, leaf.dtype, names)}
  mesh, rules = abstract(**sizes), rules_lib.RULES[rules]
  if names == ('batch',):
    return placement.batch_sharding(mesh, rules, {'leaf': leaf})
  return placement.parameter_shardings(table, mesh, rules)


@pytest.mark.parametrize(
  'refused, words',
  [
    (lambda: mesh_lib.MeshConfig(fsdp=3).sizes(8), 'fsdp=3'),
    (lambda: mesh_lib.MeshConfig(fsdp=4).sizes(8), 'fsdp=4'),
    (lambda: mesh_lib.MeshConfig(fsdp=0).sizes(8), 'fsdp=0'),
    (lambda: mesh_lib.MeshConfig(fsdp=-1, tensor=-1).sizes(8), 'tensor=-1'),
    (
      lambda: place((12, 3), 'embed', 'head_dim', fsdp=8),
      "leaf .*'embed' of size 12",
    ),
    (lambda: place((12,), 'batch', fsdp=8), "leaf .*'batch' of size 12"),
  ],
)
def test_refusals(refused, words):
  with pytest.raises(ValueError, match=words):
    refused()


@pytest.mark.parametrize(
  'name, sizes, group',
  [
    ('fsdp', dict(fsdp=256), 256),
    ('fsdp_replica', dict(replica=2, fsdp=96), 96),
    ('whole_slice', dict(replica=2, fsdp=64), 128),
  ],
)
def test_a_vocabulary_in_too_many_parts_is_refused(name, sizes, group):
  with pytest.raises(ValueError, match=f'among {group} devices.* at most 64'):
    place((2**16, 8), 'vocab', 'head_dim', rules=name, **sizes)


def test_only_devices_with_different_tokens_count_as_parts():
  place((2**16, 8), 'vocab', 'head_dim', replica=8, fsdp=64, tensor=4)
  place((2**16, 8), 'vocab', 'head_dim', rules='data_parallel', fsdp=256)


@pytest.mark.parametrize(
  'name, table, up',
  [
    ('fsdp', ('fsdp', 'tensor'), 'fsdp'),
    ('fsdp_replica', ('fsdp', 'tensor'), ('replica', 'fsdp')),
    ('whole_slice', ('fsdp', 'replica', 'tensor'), ('fsdp', 'replica')),
    ('data_parallel', None, None),
  ],
)
def test_specs_of_a_toy_model(name, table, up):
  found = placement.parameter_shardings(
    TABLE, abstract(replica=2, fsdp=4), rules_lib.RULES[name]
  )
  block = 'decoder/blocks/layer_0'
  assert found['decoder/embedder/table'].spec == PartitionSpec(table, None)
  assert found[f'{block}/mlp/up'].spec == PartitionSpec(None, up, 'tensor')
  assert found[f'{block}/cross_attention/key'].spec == PartitionSpec(
    None, up, 'tensor', None
  )


def test_gpus_get_the_options_that_this_xla_knows():
  gpus = np.array([types.SimpleNamespace(platform='gpu')] * 2, object)
  mesh = types.SimpleNamespace(devices=gpus, size=2)
  options = compiler.options(mesh)
  # XLA refuses names and values that it does not know, on any platform.
  jitted = jax.jit(lambda x: x + 1, compiler_options=options)
  assert jitted(np.ones(2)).sum() == 4
  cpus = Mesh(np.array(jax.devices()), 'x')
  assert compiler.options(cpus) is None
