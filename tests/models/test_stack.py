"""Scan, tail, rematerialisation and dtypes do not change the function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import (
  build,
  execution,
  layers,
  layers_index,
  model_config,
)
from encdec_adapt.ops import attention, kernel_forms, products
from tests import toy_models

FIVE_TO_ONE = ('local',) * 5 + ('global',)


@pytest.mark.long
@pytest.mark.parametrize(
  'changes',
  [
    {'layers': 5},
    {'layers': 8, 'pattern': FIVE_TO_ONE},
    {'layers': 1},
    dict(experts=4, experts_per_token=2, dense_layers=1),
    {**toy_models.T5, 'positions': toy_models.positions('relative_each')},
    None,
  ],
  ids=['5', '8', '1', 'experts', 't5', 'pair'],
)
def test_a_scanned_model_equals_its_layers_unrolled(
  changes, small_stack, small_pair, redraw, pack, run
):
  config, encoder = small_pair, pack([[5, 4], [9]], 10)
  if changes is not None:
    config = model_config.DecoderOnlyConfig(small_stack(**changes))
    encoder = None
  decoder = pack([[2, 6], [7]], 8, seed=1)
  params = redraw(build.build(config))
  stacks = {k: layers_index.unroll(s) for k, s in config.stacks.items()}
  groups = [group for stack in stacks.values() for group in stack.groups]
  assert not any(group.repeats for group in groups)
  weights = {
    k: layers_index.unroll_params(s, params[k])
    for k, s in config.stacks.items()
  }
  np.testing.assert_allclose(
    run(build.build(config))(params, encoder, decoder),
    run(build.build(type(config)(**stacks)))(weights, encoder, decoder),
    atol=2e-5,
  )


def test_the_program_does_not_grow_with_layers(small_stack):
  def text(layers):
    stack = small_stack(layers=layers)
    model = build.build(model_config.DecoderOnlyConfig(stack))
    params = jax.eval_shape(model.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    loss = lambda p, ids: model.decode(p, ids, ids, ids).sum()  # noqa: E731
    return jax.jit(jax.grad(loss)).lower(params, ids).as_text()

  assert len(text(16)) == pytest.approx(len(text(4)), rel=0.02)


@pytest.fixture
def gradients(small_stack, redraw, pack):
  """A function (**options) -> gradients and logits of 2 x 2 + 1 layers."""
  decoder = model_config.DecoderOnlyConfig(small_stack(layers=5))
  params, rows = redraw(build.build(decoder)), pack([[5, 4]], 10)

  def make(**options):
    options = {'dtype': 'float32', 'remat': 'none', **options}
    model = build.build(decoder, execution.ComputeConfig(**options))

    def loss(params):
      logits = model.logits(params, model.decode(params, *rows))
      return jnp.sum(jnp.sin(logits) * (rows[1] > 0)[..., None]), logits

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  return make


@pytest.mark.long
def test_gradients_are_equal_for_every_policy_and_unrolling(gradients):
  expected, expected_logits = gradients(remat='none')
  assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(expected))
  variants = [{'remat': name} for name in execution.REMAT_POLICIES]
  variants += [{'remat': 'full', 'scan_unroll': 2, 'attention_chunk': 3}]
  for options in variants[1:]:
    got, logits = gradients(**options)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4),
      got,
      expected,
    )


@pytest.mark.parametrize(
  'remat, wide, narrow, attends',
  [
    ('full', False, False, False),
    ('attention', False, False, True),
    ('narrow_dots', False, True, True),
    ('dots', True, True, True),
  ],
)
def test_policies_save_what_they_say(
  remat, wide, narrow, attends, small_stack, capsys
):
  # In the tail, so that nothing is in a loop.
  stack = small_stack(layers=1, mlp_width=40)
  model = build.build(
    model_config.DecoderOnlyConfig(stack),
    execution.ComputeConfig('float32', remat),
  )
  params = jax.jit(model.init)(jax.random.key(0))
  ids = jnp.ones((2, 4), jnp.int32)
  jax.ad_checkpoint.print_saved_residuals(
    lambda p: model.decode(p, ids, ids, ids).sum(), params
  )
  saved = capsys.readouterr().out
  assert (products.WIDE in saved) == wide
  assert (products.NARROW in saved) == narrow
  assert (attention.SAVED in saved) == attends


@pytest.mark.parametrize('remat', ['dots', 'narrow_dots'])
def test_policies_save_the_rounded_product_of_an_adapter(remat, capsys):
  kernel = kernel_forms.Adapted(
    *(jnp.ones(shape, jnp.bfloat16) for shape in ((16, 8), (16, 2), (2, 8)))
  )

  def loss(x):
    return jnp.sum(jnp.sin(layers.project(x, kernel, axes=('embed', 'mlp'))))

  policy = execution.REMAT_POLICIES[remat]
  jax.ad_checkpoint.print_saved_residuals(
    jax.checkpoint(loss, policy=policy), jnp.ones((2, 4, 16), jnp.bfloat16)
  )
  saved = capsys.readouterr().out
  assert f"bf16[2,4,8] named '{products.NARROW}'" in saved
  assert 'output of' not in saved


def test_bfloat16_is_near_float32(gradients):
  expected, expected_logits = gradients()
  got, logits = gradients(dtype='bfloat16')
  assert logits.dtype == jnp.float32
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))
  error = jnp.abs(logits - expected_logits).max()
  assert 0 < error < 0.05 * jnp.abs(expected_logits).max()
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert jnp.linalg.norm(a - b) < 0.2 * jnp.linalg.norm(b)


@pytest.mark.parametrize(
  'dtype, scale', [('bfloat16', 55.5), ('float32', 3072**0.5)]
)
def test_embedding_scale_is_rounded_to_the_compute_dtype(
  small_stack, dtype, scale
):
  embedder = layers.Embedder(small_stack(width=3072, vocab_size=4), dtype)
  variables = {'params': {'table': jnp.ones((4, 3072))}}
  zeros = jnp.zeros((1, 1), jnp.int32)
  x = embedder.apply(variables, zeros, zeros)
  assert float(x[0, 0, 0]) == pytest.approx(scale, rel=1e-6)


def test_logits_are_capped_and_without_padding_rows(small_stack, pack, redraw):
  stack = small_stack(vocab_multiple=64, final_softcap=2.0)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params = redraw(model)
  assert model.head(params).shape == (64, 16)
  hidden = jax.jit(model.decode)(params, *pack([[4]], 4))
  logits = model.logits(params, 9 * hidden)
  assert logits.shape == (1, 4, 53)
  assert 1.9 < jnp.abs(logits).max() <= 2.0
