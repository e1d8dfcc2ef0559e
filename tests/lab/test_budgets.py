"""Budgets as steps, and matched models: the worked example, and 2B."""

import dataclasses

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.lab import budgets
from encdec_adapt.models import (
  forward_flops,
  model_config,
  parameters,
  presets,
)
from encdec_adapt.objectives import framing

ROW = framing.Lengths(128, 128)
ROWS, LENGTH = 16, 64  # Of a job.


def _decoder(layers=4, role='causal'):
  stack = model_config.StackConfig(
    layers=layers,
    width=128,
    mlp_width=512,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocab_size=2048,
    window=64,
    role=role,
  )
  return model_config.DecoderOnlyConfig(stack)


def _pair(layers):
  stack = _decoder(layers).decoder
  return model_config.encoder_decoder(stack, stack, shared_table=True)


def _flops(model, lengths=ROW):
  return forward_flops.forward(
    model, lengths.encoder, lengths.decoder, lengths.teacher
  )


def _widths(model):
  return {stack.mlp_width for stack in model.stacks.values()}


def test_the_worked_example():
  causal, prefix = _decoder(), _decoder(role='prefix')
  millions = [round(_flops(x) / 1e6, 1) for x in (causal, prefix)]
  assert millions == [618.8, 633.3]
  assert parameters.count(causal) == 1247360
  # (a) Equal parameters.
  half = budgets.match(_pair(2), causal, 'parameters', ROW)
  assert (_widths(half), parameters.count(half)) == ({448}, 1248000)
  assert round(_flops(half) / 1e6, 1) == 357.6
  steps = [round(_flops(x) / _flops(half), 2) for x in (causal, prefix)]
  assert steps == [1.73, 1.77]
  # (b) Equal FLOPs of a row.
  for decoder, width, expected in ((causal, 408, 616.6), (prefix, 432, 635.5)):
    whole = budgets.match(_pair(4), decoder, 'flops', ROW)
    assert _widths(whole) == {width}
    assert round(_flops(whole) / 1e6, 1) == expected
  # (c) Equal FLOPs as published.
  published = budgets.match(_pair(4), causal, 'published', ROW)
  assert _widths(published) == {536}
  assert [
    round(forward_flops.published(x, 128, 128) / 1e6, 1)
    for x in (causal, published)
  ] == [685.9, 686.0]
  # (d) The decoder of as many parameters as the pair of (b).
  whole = budgets.match(_pair(4), causal, 'flops', ROW)
  deep = budgets.match(_decoder(8), whole, 'parameters', ROW)
  assert parameters.count(whole) == 2110720
  assert (_widths(deep), parameters.count(deep)) == ({472}, 2109568)


def test_layers_are_found_too():
  causal = _decoder()
  for by, layers, width in (
    ('parameters', 2, 448),
    ('flops', 4, 408),
    ('published', 4, 536),
  ):
    found = budgets.match(_pair(3), causal, by, ROW, layers=True)
    assert {stack.layers for stack in found.stacks.values()} == {layers}
    assert _widths(found) == {width}


@pytest.mark.parametrize(
  'layers, by, options, expected, error',
  [
    (13, 'parameters', {}, (13, 8192), 3e-5),
    # Cross-attention takes the place of a layer of each stack.
    (26, 'parameters', {'layers': True}, (12, 9128), 2e-4),
    (26, 'flops', {}, (26, 7280), 2e-4),
    (26, 'published', {'multiple': 128}, (26, 10112), 1e-3),
  ],
)
def test_shapes_of_2b(layers, by, options, expected, error):
  decoder = presets.decoder_only('2b')
  stack = dataclasses.replace(decoder.decoder, layers=layers)
  pair = model_config.encoder_decoder(stack, stack, shared_table=True)
  lengths = framing.Lengths(4096, 4096)
  found = budgets.match(pair, decoder, by, lengths, **options)
  shapes = {(x.layers, x.mlp_width) for x in found.stacks.values()}
  assert shapes == {expected}
  count = {
    'parameters': parameters.count,
    'flops': lambda model: _flops(model, lengths),
    'published': lambda model: forward_flops.published(model, 4096, 4096),
  }[by]
  assert count(found) == pytest.approx(count(decoder), rel=error)


def test_stacks_of_unequal_widths_keep_their_ratio():
  pair, like = presets.t5gemma('9b_2b'), presets.decoder_only('9b')
  found = budgets.match(pair, like, 'parameters', multiple=128)
  encoder, decoder = (stack.mlp_width for stack in found.stacks.values())
  assert encoder < 14336
  assert encoder / decoder == pytest.approx(14336 / 9216, rel=0.01)


def test_a_match_that_cannot_be_met_names_the_nearest():
  with pytest.raises(errors.UserError, match=r'4 layers of F = 8, .*\+'):
    budgets.match(_pair(4), _decoder(1), 'flops', ROW)
  with pytest.raises(errors.UserError, match='multiple of 256'):
    budgets.match(_pair(4), _decoder(), 'flops', ROW, multiple=256)


def test_budgets_as_steps():
  settings = config_lib.load(_toy(), sources=False)
  step = budgets.Step.of(settings)
  pair = settings.model
  row = forward_flops.forward(pair, LENGTH, LENGTH, 2 * LENGTH)
  assert step == budgets.Step(ROWS * LENGTH, 3 * ROWS * row)
  taught = budgets.Step.of(settings, [pair])
  assert taught == budgets.Step(ROWS * LENGTH, 4 * ROWS * row)
  assert budgets.Tokens(400 * step.tokens).steps(step) == 400
  assert budgets.FLOPs(99.9 * step.flops).steps(step, sources=1e30) == 100
  total = budgets.FLOPs(100 * step.flops, sources=True)
  assert total.steps(step, sources=30 * step.flops) == 70


def test_tokens_are_of_rows_that_are_full():
  config = _toy()
  budgets.Tokens(1e6).check(config_lib.load(config, sources=False))
  config.data.objective = 'prefix_lm | span_corruption'
  with pytest.raises(errors.UserError, match='span_corruption have fewer'):
    budgets.Tokens(1e6).check(config_lib.load(config, sources=False))


@pytest.mark.parametrize(
  'budget, sources, words',
  [
    (budgets.Tokens(999), 0, '0.999 steps of 1000'),
    (budgets.FLOPs(3.4e6), 0, '3.4 steps'),  # 3 spend 12 % less.
    (budgets.FLOPs(5e6, sources=True), 6e6, 'sources have cost 6e'),
  ],
)
def test_budgets_that_cannot_be_met(budget, sources, words):
  with pytest.raises(errors.UserError, match=words):
    budget.steps(budgets.Step(1000, 1e6), sources)


def _toy():
  config = config_lib.defaults()
  stack = _decoder().decoder
  pair = model_config.encoder_decoder(stack, stack)
  config_lib.set_model(config.model, pair)
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = LENGTH
  config.train.batch_size = ROWS
  return config
