"""Model FLOPs against the products of a traced program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.models import build, execution, model_config, stack
from encdec_adapt.models import forward_flops as flops
from encdec_adapt.objectives import framing
from encdec_adapt.ops import masks
from encdec_adapt.training import setup
from encdec_adapt.training.losses import loss
from tests import gemma_ids, toy_models


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('rule', ['exclusive', 'inclusive', 'centered'])
@pytest.mark.parametrize('window', [None, 1, 2, 5, 6, 7, 20])
def test_visible_pairs_are_those_of_the_mask(causal, rule, window):
  length = 6
  ones, positions = jnp.ones((1, length), int), jnp.arange(length)[None]
  if causal:
    spec = masks.causal(ones, positions, window=window)
  else:
    spec = masks.bidirectional(ones, positions, window=window, window_rule=rule)
  assert np.sum(masks.dense_mask(spec)) == flops.visible_pairs(
    length, causal=causal, window=window, window_rule=rule
  )


@pytest.mark.parametrize('window', [None, 1, 2, 5, 6, 20])
@pytest.mark.parametrize('prefix', [0, 1, 4, 6])
def test_visible_pairs_of_a_prefix_are_those_of_the_mask(prefix, window):
  length = 6
  ones, positions = jnp.ones((1, length), int), jnp.arange(length)[None]
  seen = jnp.int32(positions < prefix)
  spec = masks.prefix(ones, positions, seen, window=window)
  assert np.sum(masks.dense_mask(spec)) == flops.visible_pairs(
    length, causal=True, window=window, prefix=prefix
  )


def _stack(**changes):
  values = dict(layers=1, mlp_width=32, pattern=('global',))
  values |= dict(role='bidirectional', vocab_size=100)
  return toy_models.stack(**values | changes)


def _products(jaxpr):
  """FLOPs of the products of a traced program."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      contracted = equation.params['dimension_numbers'][0][0]
      operand, out = equation.invars[0].aval, equation.outvars[0].aval
      total += 2 * out.size * math.prod(operand.shape[i] for i in contracted)
    inner = (getattr(x, 'jaxpr', None) for x in equation.params.values())
    total += sum(_products(x) for x in inner if x is not None)
  return total


@pytest.mark.parametrize('gated', [True, False])
def test_a_layer_equals_the_products_of_its_program(gated):
  # In the tail, so that nothing is in a loop.
  config, length, source = (
    _stack(pattern=('global',) * 2, cross_width=24, mlp_gated=gated),
    10,
    6,
  )
  compute = execution.ComputeConfig('float32', 'none', 'reference')

  def run(encoded):
    ids, source_ids = (jnp.ones((1, n), jnp.int32) for n in (length, source))
    module = stack.Stack(config, compute)
    return module.init_with_output(
      jax.random.key(0), ids, ids, ids, encoded, source_ids
    )[0]

  traced = jax.make_jaxpr(run)(jnp.ones((1, source, 24)))
  expected = flops.stack_forward(config, length, source_length=source)
  assert _products(traced.jaxpr) == expected


def test_the_answers_of_a_prompt_share_its_encoder():
  side = _stack(pattern=('global',) * 2)  # In the tail.
  config = model_config.encoder_decoder(side, side)
  compute = execution.ComputeConfig(attention='reference').on('cpu')
  model = build.build(config, compute)
  source, target = 6, 10

  def products(prompts, *answers):
    shapes = {'encoder': (prompts, source), 'decoder': (*answers, target)}
    batch = {
      f'{name}_{field}': jnp.ones(shape, jnp.int32)
      for name, shape in shapes.items()
      for field in ('tokens', 'segments', 'positions')
    }
    params = jax.eval_shape(model.init, jax.random.key(0))
    predict = jax.make_jaxpr(model.architecture.predict, static_argnums=0)
    return _products(predict(model, params, batch).jaxpr)

  counts = [
    flops.forward(config, source, target, source + target, n) for n in (1, 2)
  ]
  shared = flops.stack_forward(config.encoder, source)
  assert products(2, 2) - products(1, 1, 2) == shared
  assert 2 * counts[0] - counts[1] == shared


def test_inputs_of_a_prefix_decoder_are_bidirectional():
  stacks = [_stack(layers=2, role=role) for role in ('causal', 'prefix')]
  causal, prefix = map(model_config.DecoderOnlyConfig, stacks)
  # 6 inputs have 6 * 5 / 2 pairs more, in 2 layers of 4 heads of 8.
  extra = 4 * (4 * 8) * 15
  rows = [flops.forward(model, 6, 10, 16) for model in (causal, prefix)]
  assert rows[1] - rows[0] == 2 * extra
  # Texts without inputs are causal.
  texts = [flops.forward(model, 0, 10, 10) for model in (causal, prefix)]
  assert texts[0] == texts[1]
  # A prompt computes the attention of all layers but the last; then steps see
  # what those of a causal decoder do.
  (read, step), (expected, same) = (
    flops.generation(model, 6, 10) for model in (prefix, causal)
  )
  assert (read - expected, step) == (extra, same)


def test_logits_of_inputs_are_those_that_xla_counts():
  stack = _stack(width=256, heads=2, vocab_size=512, role='causal')
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params = jax.eval_shape(model.init, jax.random.key(0))
  lengths = framing.Lengths(24, 8)
  row = framing.frame_row([], lengths, gemma_ids.FRAMING, teacher=True)

  def costs(on_inputs):
    config = config_lib.defaults()
    config_lib.set_model(config.model, model.config)
    config.data.objective, config.data.source = 'pairs', ''
    config.data.encoder_length, config.data.decoder_length = 24, 8
    config.loss.on_inputs = on_inputs
    recipe = config_lib.load(config, sources=False).recipe
    rows = framing.stack_rows([row])
    batch = recipe.rows.transform(rows, gemma_ids.FRAMING.decoder)

    def total(params, batch):
      return loss.sums(recipe.loss, model, params, batch, {})['loss']

    compiled = jax.jit(jax.grad(total)).lower(params, batch).compile()
    stated = setup.step_flops(recipe, 1)
    return stated, compiled.cost_analysis()['flops']

  targets, everywhere = (costs(on_inputs) for on_inputs in (False, True))
  # 24 positions more; XLA also counts the softmax.
  assert everywhere[0] - targets[0] == 3 * 2 * 24 * 256 * 512
  assert everywhere[1] - targets[1] == pytest.approx(
    everywhere[0] - targets[0], rel=0.03
  )


def test_experts_count_where_a_token_takes_them():
  dense = flops.stack_forward(_stack(layers=3), 10)
  experts = dict(
    experts=4,
    experts_per_token=2,
    expert_mlp_width=24,
    shared_expert_width=8,
    shared_expert_gate=True,
    dense_layers=1,
  )
  sparse = flops.stack_forward(_stack(layers=3, **experts), 10)
  # In two layers: two experts of 24, one of 8, a router to 4 and a gate.
  assert sparse - dense == 2 * 10 * 2 * 16 * (3 * (56 - 32) + 5)
  experts['experts_beside_mlp'] = True
  both = flops.stack_forward(_stack(layers=3, **experts), 10)
  assert both - sparse == 2 * 10 * 2 * 16 * 3 * 32


@pytest.mark.parametrize(
  'experts', [{}, dict(experts=4, experts_per_token=2, expert_mlp_width=8)]
)
def test_a_prompt_leaves_keys_and_values_of_the_last_layer(experts):
  stack = _stack(role='causal', **experts)
  model = model_config.DecoderOnlyConfig(stack)
  assert flops.generation(model, 10, 1)[0] == 10 * 2 * 16 * 2 * (2 * 8)


def test_cross_attention_of_some_layers_and_merged():
  pattern = dict(role='causal', layers=2, pattern=('local', 'global'))

  def total(**cross):
    return flops.stack_forward(_stack(**pattern, **cross), 8, source_length=6)

  base = total()
  cross = total(cross_width=16) - base
  assert total(cross_width=16, cross_layers='global') - base == cross // 2
  # Query and output projections of its own are all that merging saves.
  saved = 2 * (2 * 16 * 2 * 4 * 8) * 8
  assert total(cross_width=16, cross_merged=True) - base == cross - saved


@pytest.mark.parametrize('source', [0, 7])
def test_decoding_token_by_token_is_one_forward_pass(source):
  stack = _stack(layers=2, role='causal', pattern=('global', 'local'), window=3)
  model = model_config.DecoderOnlyConfig(stack)
  if source:
    model = model_config.encoder_decoder(_stack(width=12), stack)
  steps = sum(flops.decoding(model, source, keys) for keys in range(1, 11))
  # The source's keys and values are computed once, before.
  projected = 2 * 2 * 12 * 2 * (2 * 8) * source
  expected = flops.stack_forward(model.decoder, 10, source_length=source)
  assert steps + projected == expected + 2 * 16 * 100 * 10
