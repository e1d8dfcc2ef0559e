"""Logits and gradients on meshes equal those of one device."""

import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from encdec_adapt.models import build, execution, expert_layer, model_config
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement, rules

pytestmark = pytest.mark.sharded

AXES = ('replica', 'fsdp', 'sequence', 'tensor')
RULES = rules.named('fsdp').as_dict()


EXPERTS = dict(
  experts=4,
  experts_per_token=2,
  expert_mlp_width=12,
  norm_topk=True,
  shared_expert_width=8,
  shared_expert_gate=True,
)
# What compiles is one layer of a tail, or a leading one, and one that is
# scanned over.
STACKS = {
  'dense': (
    dict(layers=1, width=24, pattern=('local', 'global')),
    dict(layers=2, pattern=('global',)),
  ),
  'experts': (dict(EXPERTS, layers=4, dense_layers=1), EXPERTS),
}


@pytest.fixture(scope='module')
def case(request, small_stack, redraw, pack):
  """A model, its parameters, a loss, and what one device makes of it."""
  dense = request.param == 'dense'
  pair = model_config.encoder_decoder(
    *(
      small_stack(vocab_multiple=8, **fields)
      for fields in STACKS[request.param]
    )
  )
  compute = execution.ComputeConfig(
    remat='full' if dense else 'dots', attention_chunk=4
  )
  model, plain = build.build(pair, compute), build.build(pair)
  encoder = pack([[5, 7], [16], [3, 3, 9], [1]], 16)
  decoder = pack([[4, 4], [8], [2, 2, 3], [1]], 8, seed=1)

  def loss(params, model=model):
    """A loss of the logits and of the routers, if there are any."""
    routing = []
    encoded = model.encode(params, *encoder, routing=routing)
    hidden = model.decode(
      params, *decoder, encoded, encoder[1], routing=routing
    )
    logits = model.logits(params, hidden)
    total = jnp.sum(jnp.sin(logits) * (decoder[1] > 0)[..., None])
    if routing:
      found = expert_layer.mean_losses(routing)
      total += found.balance + found.z
    return total, logits

  params = redraw(model)
  # Without rematerialisation, which changes nothing either.
  expected = jax.grad(functools.partial(loss, model=plain), has_aux=True)
  return model, params, loss, jax.jit(expected)(params)


@pytest.mark.parametrize(
  'case, shape',
  [
    pytest.param('dense', (2, 2, 1, 2), marks=pytest.mark.long),
    ('dense', (1, 2, 2, 2)),
    pytest.param('dense', (1, 2, 4, 1), marks=pytest.mark.long),
    pytest.param('dense', (1, 1, 8, 1), marks=pytest.mark.slow),
    pytest.param('dense', (2, 1, 4, 1), marks=pytest.mark.slow),
    pytest.param('dense', (1, 1, 4, 2), marks=pytest.mark.slow),
    pytest.param('experts', (1, 2, 2, 2), marks=pytest.mark.long),
    pytest.param('experts', (2, 2, 1, 2), marks=pytest.mark.slow),
  ],
  indirect=['case'],
  ids=str,
)
def test_meshes_equal_one_device(case, shape):
  model, params, loss, (gradients, logits) = case
  mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)
  shardings = placement.parameter_shardings(
    model.table, mesh, rules.named('fsdp')
  )
  placed = jax.device_put(
    params, traverse_util.unflatten_dict(shardings, sep='/')
  )
  query = placed['decoder']['blocks']['layer_0']['attention']['query']
  assert query.addressable_shards[0].data.size < query.size

  @jax.jit
  def sharded(params):
    with partition.use(mesh, RULES):
      return jax.grad(loss, has_aux=True)(params)

  got, got_logits = sharded(placed)
  np.testing.assert_allclose(got_logits, logits, atol=2e-5)
  worst = jax.tree.map(
    lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)),
    got,
    gradients,
  )
  # Parameters changed by one unit in the last place make 7e-6.
  assert max(jax.tree.leaves(worst)) < 3e-5, worst
