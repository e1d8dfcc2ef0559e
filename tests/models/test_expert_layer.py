"""Stacks with experts: leading dense layers, router losses, counts."""

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.models import (
  build,
  expert_layer,
  layer_leaves,
  model_config,
  parameters,
)
from tests import toy_models

EXPERTS = dict(
  experts=4, experts_per_token=2, expert_mlp_width=12, shared_expert_width=8
)


def test_leading_layers_compute_what_scanned_ones_do(small_stack, redraw, pack):
  """Experts that are all alike are one MLP, wherever its layer is stored."""
  single = dict(experts=1, experts_per_token=1, norm_topk=True)
  rows = pack([[9, 3]], 12)
  stack = small_stack(**single, layers=5, dense_layers=3)
  led = build.build(model_config.DecoderOnlyConfig(stack))
  dense = build.build(model_config.DecoderOnlyConfig(small_stack(layers=5)))
  params = redraw(dense)
  flat = traverse_util.flatten_dict(params, sep='/')
  dense_leaves = toy_models.leaves(dense.config, flat)
  arrays = {}
  for name, leaf in layer_leaves.leaves_of(led.config).items():
    if name.endswith('/router'):
      array = jnp.ones(leaf.shape)
    else:
      array = dense_leaves[name.replace('/experts/', '/mlp/')]
    arrays.setdefault(leaf.path, []).append(array.reshape(leaf.shape))
  table = parameters.parameter_table(led.config)
  weights = {p: jnp.stack(a).reshape(table[p].shape) for p, a in arrays.items()}
  np.testing.assert_allclose(
    led.decode(traverse_util.unflatten_dict(weights, sep='/'), *rows),
    dense.decode(params, *rows),
    atol=2e-5,
  )


def test_losses_are_the_mean_over_layers(small_stack, redraw, pack):
  stack = small_stack(**EXPERTS, layers=5)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  rows = pack([[9, 3]], 12)
  routing = []
  model.decode(redraw(model), *rows, routing=routing)
  losses = jax.tree.leaves(routing, is_leaf=lambda x: hasattr(x, 'balance'))
  values = np.concatenate([np.ravel(x.balance) for x in losses])
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
