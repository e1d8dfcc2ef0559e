"""Stacks with experts: where layers are, caches, what tokens see, meshes."""

import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from encdec_adapt.models import (
  build,
  execution,
  expert_layer,
  layer_leaves,
  model_config,
  parameters,
)
from encdec_adapt.ops import partition
from encdec_adapt.sharding import placement, rules
from tests.models import test_leaks

EXPERTS = dict(
  experts=4,
  experts_per_token=2,
  expert_mlp_width=12,
  norm_topk=True,
  shared_expert_width=8,
  shared_expert_gate=True,
)


@pytest.fixture(scope='module')
def pair(small_stack):
  """An encoder-decoder with experts; a dense layer leads its encoder."""
  return model_config.encoder_decoder(
    small_stack(**EXPERTS, layers=4, dense_layers=1, vocab_multiple=8),
    small_stack(**EXPERTS, vocab_multiple=8),
  )


def test_dense_layers_lead(small_stack):
  stack = small_stack(
    **EXPERTS,
    layers=8,
    dense_layers=2,
    pattern=('local', 'local', 'global'),
  )
  model = model_config.DecoderOnlyConfig(stack)
  # What follows the dense layers goes on in the pattern.
  assert stack.lead == ('local', 'local')
  assert stack.cycle == ('global', 'local', 'local')
  assert (stack.repeats, stack.tail) == (2, ())
  found = layer_leaves.leaves_of(model)
  for layer in range(8):
    parts = {name.split('/')[3] for name in found if f'/{layer}/' in name}
    assert ('mlp' in parts) == (layer < 2)
    assert ('experts' in parts) == (layer >= 2)
  up = 'decoder/layers/{}/mlp/up'.format
  assert found[up(1)] == layer_leaves.Leaf(
    (16, 24), 'decoder/lead/layer_1/mlp/up', None
  )
  gate = found['decoder/layers/5/experts/gate']
  assert gate == layer_leaves.Leaf(
    (4, 16, 12), 'decoder/blocks/layer_0/experts/gate', 1
  )


def test_leading_layers_compute_what_scanned_ones_do(small_stack, redraw, pack):
  """Experts that are all alike are one MLP, wherever its layer is stored."""
  one = dict(experts=1, experts_per_token=1, norm_topk=True)
  rows = pack([[9, 3]], 12)
  led = build.build(
    model_config.DecoderOnlyConfig(small_stack(**one, layers=5, dense_layers=3))
  )
  dense = build.build(model_config.DecoderOnlyConfig(small_stack(layers=5)))
  params = redraw(dense)
  flat = traverse_util.flatten_dict(params, sep='/')
  theirs = layer_leaves.leaves_of(dense.config)
  made = {}
  for name, leaf in layer_leaves.leaves_of(led.config).items():
    if name.endswith('/router'):
      array = jnp.ones(leaf.shape)
    else:
      source = theirs[name.replace('/experts/', '/mlp/')]
      array = flat[source.path]
      array = array if source.index is None else array[source.index]
    made.setdefault(leaf.path, []).append(array.reshape(leaf.shape))
  table = parameters.parameter_table(led.config)
  made = {p: jnp.stack(a).reshape(table[p].shape) for p, a in made.items()}
  np.testing.assert_allclose(
    led.decode(traverse_util.unflatten_dict(made, sep='/'), *rows),
    dense.decode(params, *rows),
    atol=2e-5,
  )


def test_what_is_not_seen_changes_nothing(pair, redraw, pack, run):
  model = build.build(pair)
  logits, params = run(model), redraw(model)
  encoder, decoder = pack([[5, 4]], 12), pack([[3, 5]], 10, seed=1)
  before = np.asarray(logits(params, encoder, decoder))
  first = np.asarray(decoder[1]) == 1
  second = np.asarray(decoder[1]) == 2
  changed = test_leaks.change(encoder, encoder[1] != 1)
  after = np.asarray(logits(params, changed, decoder))
  np.testing.assert_allclose(after[first], before[first], atol=1e-5)
  assert np.abs(after - before)[second].max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
  'remat', ['dots', pytest.param('full', marks=pytest.mark.slow)]
)
def test_remat_changes_nothing(remat, small_stack, redraw, pack):
  stack = small_stack(**EXPERTS, dense_layers=1)
  rows = pack([[9, 3], [7]], 12)
  results = []
  for policy in ('none', remat):
    model = build.build(
      model_config.DecoderOnlyConfig(stack),
      execution.ComputeConfig(remat=policy),
    )

    def loss(params, model=model):
      routing = []
      hidden = model.decode(params, *rows, routing=routing)
      found = expert_layer.mean_losses(routing)
      return jnp.sum(jnp.sin(hidden)) + found.balance + found.z

    results.append(jax.jit(jax.value_and_grad(loss))(redraw(model)))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
    *results,
  )


def test_losses_are_the_mean_over_layers(small_stack, redraw, pack):
  stack = small_stack(**EXPERTS, layers=5)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  rows = pack([[9, 3]], 12)
  routing = []
  model.decode(redraw(model), *rows, routing=routing)
  found = jax.tree.leaves(routing, is_leaf=lambda x: hasattr(x, 'balance'))
  values = np.concatenate([np.ravel(x.balance) for x in found])
  assert len(values) == 5
  assert len(set(values.tolist())) == 5
  mean = expert_layer.mean_losses(routing)
  np.testing.assert_allclose(mean.balance, values.mean(), rtol=1e-6)


def test_active_parameters(small_stack):
  stack = small_stack(**EXPERTS, layers=4, dense_layers=1)
  model = model_config.DecoderOnlyConfig(stack)
  idle = 3 * 2 * 3 * 16 * 12  # Layers, experts, kernels, D, F.
  assert parameters.count(model) - parameters.count_active(model) == idle
  dense = model_config.DecoderOnlyConfig(small_stack())
  assert parameters.count_active(dense) == parameters.count(dense)


@pytest.fixture(scope='module')
def meshed(pair, redraw, pack):
  """A pair, its arguments, a loss, and what one device makes of them."""
  model = build.build(
    pair, execution.ComputeConfig(remat='dots', attention_chunk=4)
  )
  encoder = pack([[5, 7], [16], [3, 3, 9], [1]], 16)
  decoder = pack([[4, 4], [8], [2, 2, 3], [1]], 8, seed=1)

  def loss(params):
    routing = []
    encoded = model.encode(params, *encoder, routing=routing)
    hidden = model.decode(
      params, *decoder, encoded, encoder[1], routing=routing
    )
    found = expert_layer.mean_losses(routing)
    real = (decoder[1] > 0)[..., None]
    return jnp.sum(jnp.sin(hidden) * real) + found.balance + found.z

  params = redraw(model)
  return model, params, loss, jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'shape',
  [pytest.param((2, 2, 1, 2), marks=pytest.mark.slow), (1, 2, 2, 2)],
  ids=str,
)
def test_meshes_equal_one_device(shape, meshed):
  model, params, loss, expected = meshed
  axes = ('replica', 'fsdp', 'sequence', 'tensor')
  mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 4)
  # Two heads of keys and values do not divide by four.
  found = dataclasses.replace(rules.named('fsdp'), kv_heads=())
  shardings = placement.parameter_shardings(model.table, mesh, found)
  placed = jax.device_put(
    params, traverse_util.unflatten_dict(shardings, sep='/')
  )
  gate = placed['decoder']['blocks']['layer_0']['experts']['gate']
  assert gate.addressable_shards[0].data.shape == (
    (1, 4 // shape[3], 16 // shape[1], 12)
  )

  @jax.jit
  def sharded(params):
    with partition.use(mesh, found.as_dict()):
      return jax.value_and_grad(loss)(params)

  value, gradients = sharded(placed)
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  worst = jax.tree.map(
    lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)),
    gradients,
    expected[1],
  )
  assert max(jax.tree.leaves(worst)) < 3e-5, worst
