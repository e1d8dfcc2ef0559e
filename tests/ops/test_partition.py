"""Logical names to mesh axes, and constraints that hold on CPU too."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from encdec_adapt.ops import partition

RULES = {'batch': ('replica', 'fsdp'), 'mlp': ('tensor',), 'embed': ()}


# Weights over all devices that have tokens; gradients over some of them first.
STAGES = {
  'batch': ('replica', 'fsdp'),
  'length': (),
  'embed': ('fsdp', 'replica'),
  'mlp': ('tensor',),
  'summed_first': ('fsdp',),
}


def make_mesh(*sizes):
  return jax.make_mesh(
    sizes or (2, 2, 2),
    ('replica', 'fsdp', 'tensor'),
    axis_types=(AxisType.Auto,) * 3,
  )


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
def test_what_cannot_be_sharded_is_refused():
  with partition.use(make_mesh(), RULES):
    with pytest.raises(ValueError, match="'mlp' of size 5.* 2 devices"):
      partition.shard(jnp.ones((4, 5)), 'batch', 'mlp')


@pytest.mark.sharded
@pytest.mark.parametrize(
  'shape, names, expected',
  [
    ((8, 4), ('embed', 'rank'), (('fsdp', 'replica'), None)),
    ((4, 8), ('rank', 'embed'), (None, ('fsdp', 'replica'))),
    ((4, 8), ('rank', 'mlp'), (('fsdp', 'replica'), 'tensor')),
    ((2, 8), ('rank', 'mlp'), (None, 'tensor')),  # Four devices: whole.
  ],
)
def test_a_rank_is_divided_where_no_other_axis_is(shape, names, expected):
  where = partition.Partition(
    make_mesh(), STAGES | {'rank': ('fsdp', 'replica')}
  )
  assert where.sharding('b', shape, names).spec == PartitionSpec(*expected)


def gradient(sizes, rules):
  """The lowered gradient of a weight that a product reads."""
  mesh, names = make_mesh(*sizes), ('embed', 'mlp')

  def loss(weight, tokens):
    summed = partition.sum_gradient_in_stages(weight, *names)
    return jnp.sum(jnp.tanh(tokens @ summed))

  def run(weight, tokens):
    with partition.use(mesh, rules):
      return jax.grad(loss)(weight, tokens)

  def describe(shape, *axes):
    spec = partition.Partition(mesh, rules).spec(*axes)
    place = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

  weight = describe((64, 128), *names)
  tokens = describe((16, 64), 'batch', None)
  return jax.jit(run, out_shardings=weight.sharding).lower(weight, tokens)


LAST = '{"fsdp", "replica"}, {"tensor"}'


@pytest.mark.sharded
@pytest.mark.parametrize(
  'sizes, rules, stages',
  [
    ((2, 4, 1), STAGES, ['{"fsdp"}, {}', LAST]),
    # What is split by heads and mlp stays so.
    ((2, 2, 2), STAGES, ['{"fsdp"}, {"tensor"}', LAST]),
    # There is nothing to sum first.
    ((2, 1, 4), STAGES, []),
    ((2, 4, 1), {**STAGES, 'summed_first': ()}, []),
  ],
)
def test_gradients_are_summed_in_stages(sizes, rules, stages):
  text = gradient(sizes, rules).as_text()
  found = re.findall(r'sharding_constraint .*<@mesh, \[(.*)\]>', text)
  assert found == stages


@pytest.mark.sharded
def test_stages_gather_no_gradient():
  text = gradient((2, 2, 2), STAGES).compile().as_text()
  # The weight itself, for its product.
  assert len(re.findall(r' all-gather\(', text)) == 1
