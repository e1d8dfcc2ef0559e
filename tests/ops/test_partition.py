"""Logical names to mesh axes, and constraints that hold on CPU too."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from encdec_adapt.ops import partition

RULES = {'batch': ('replica', 'fsdp'), 'mlp': 'tensor', 'embed': None}


def make_mesh():
  return jax.make_mesh(
    (2, 2, 2), ('replica', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3
  )


@pytest.mark.sharded
def test_names_become_mesh_axes():
  with partition.use(make_mesh(), RULES) as active:
    assert active.mesh_axes('batch') == ('replica', 'fsdp')
    assert active.mesh_axes('mlp') == ('tensor',)
    assert active.mesh_axes('embed') == active.mesh_axes(None) == ()
    assert active.spec('batch', None, 'mlp') == PartitionSpec(
      ('replica', 'fsdp'), None, 'tensor'
    )
    sizes = [active.size(name) for name in ('batch', 'mlp', 'embed', None)]
    assert sizes == [4, 2, 1, 1]


@pytest.mark.sharded
def test_unknown_names_are_refused():
  with partition.use(make_mesh(), RULES) as active:
    with pytest.raises(ValueError, match="'heads'; known axes: batch, embed"):
      active.spec('heads')


@pytest.mark.sharded
def test_active_inside_only_and_nested():
  mesh = make_mesh()
  assert partition.active() is None
  with partition.use(mesh, RULES) as outer:
    with partition.use(mesh, {}) as inner:
      assert partition.active() is inner
    assert partition.active() is outer
    with pytest.raises(KeyError):
      with partition.use(mesh, {}):
        raise KeyError
    assert partition.active() is outer
  assert partition.active() is None


@pytest.mark.sharded
def test_shard_constrains():
  mesh = make_mesh()

  @jax.jit
  def run(x):
    with partition.use(mesh, RULES):
      return partition.shard(x * 2, 'batch', 'mlp')

  out = run(jnp.ones((4, 6)))
  expected = NamedSharding(mesh, PartitionSpec(('replica', 'fsdp'), 'tensor'))
  assert out.sharding.is_equivalent_to(expected, 2)
  assert out.addressable_shards[0].data.shape == (1, 3)


def test_shard_without_a_partition_is_the_identity():
  x = jnp.ones((3, 5))
  assert partition.shard(x, 'batch', 'unheard of') is x


@pytest.mark.sharded
def test_shard_wants_a_name_per_dimension():
  with partition.use(make_mesh(), RULES):
    with pytest.raises(ValueError, match=r"\('batch',\).*\(4, 6\)"):
      partition.shard(jnp.ones((4, 6)), 'batch')


@pytest.mark.sharded
def test_shard_names_what_does_not_divide():
  with partition.use(make_mesh(), RULES):
    with pytest.raises(ValueError, match=r"\(4, 5\).*'mlp' of 5.*2 times"):
      partition.shard(jnp.ones((4, 5)), 'batch', 'mlp')


@pytest.mark.sharded
def test_shard_names_axes_that_collide():
  rules = {**RULES, 'heads': ('fsdp', 'tensor')}
  with partition.use(make_mesh(), rules):
    with pytest.raises(ValueError, match="'batch' and 'heads'.*'fsdp'"):
      partition.shard(jnp.ones((4, 4)), 'batch', 'heads')
