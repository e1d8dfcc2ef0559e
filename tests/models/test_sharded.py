"""Logits and gradients on meshes equal those of one device."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
import numpy as np
import pytest

from encdec_adapt.models import build, execution, model_config
from encdec_adapt.ops import partition
from encdec_adapt.sharding import rules

pytestmark = pytest.mark.sharded

AXES = ('replica', 'fsdp', 'sequence', 'tensor')
RULES = rules.named('fsdp').as_dict()


@pytest.fixture(scope='module')
def case(small_stack, redraw, pack):
  """A pair, its arguments, the loss, and what one device makes of them."""
  table = {'vocab_multiple': 8}
  pair = model_config.encoder_decoder(
    # What compiles is one layer of a tail and one that is scanned over.
    small_stack(layers=1, width=24, pattern=('local', 'global'), **table),
    small_stack(layers=2, pattern=('global',), **table),
  )
  model = build.build(
    pair, execution.ComputeConfig(remat='full', attention_chunk=4)
  )
  encoder = pack([[5, 7], [16], [3, 3, 9], [1]], 16)
  decoder = pack([[4, 4], [8], [2, 2, 3], [1]], 8, seed=1)

  def loss(params, encoder, decoder):
    encoded = model.encode(params, *encoder)
    hidden = model.decode(params, *decoder, encoded, encoder[1])
    logits = model.logits(params, hidden)
    return jnp.sum(jnp.sin(logits) * (decoder[1] > 0)[..., None]), logits

  args = redraw(model), encoder, decoder
  return model, args, loss, jax.jit(jax.grad(loss, has_aux=True))(*args)


@pytest.mark.parametrize(
  'shape',
  [
    pytest.param((2, 2, 1, 2), marks=pytest.mark.long),
    (1, 2, 2, 2),
    pytest.param((1, 2, 4, 1), marks=pytest.mark.long),
    pytest.param((1, 1, 8, 1), marks=pytest.mark.slow),
    pytest.param((2, 1, 4, 1), marks=pytest.mark.slow),
    pytest.param((1, 1, 4, 2), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_meshes_equal_one_device(case, shape):
  model, (params, encoder, decoder), loss, expected = case
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)

  def place(path, x):
    axes = model.table['/'.join(key.key for key in path)].axes
    spec = partition.Partition(mesh, RULES).spec(*axes)
    return jax.device_put(x, NamedSharding(mesh, spec))

  placed = jax.tree_util.tree_map_with_path(place, params)
  query = placed['decoder']['blocks']['layer_0']['attention']['query']
  shards = shape[1] * shape[3]
  assert query.addressable_shards[0].data.size * shards == query.size

  @jax.jit
  def sharded(params, encoder, decoder):
    with partition.use(mesh, RULES):
      return jax.grad(loss, has_aux=True)(params, encoder, decoder)

  got, logits = sharded(placed, encoder, decoder)
  np.testing.assert_allclose(logits, expected[1], atol=2e-5)
  errors = jax.tree.map(
    lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)),
    got,
    expected[0],
  )
  # Parameters changed by one unit in the last place make 7e-6.
  assert max(jax.tree.leaves(errors)) < 3e-5, errors
