"""Each architecture reads the fields of its table, and no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import architecture, build, heads, model_config
from encdec_adapt.objectives import framing
from tests import gemma_ids, toy_models

STACK = toy_models.stack(window=16)
LENGTHS = framing.Lengths(6, 5)
KINDS = architecture.BY_NAME


def _config(kind, head=heads.Tokens()):
  if kind == 'encoder_decoder':
    pair = model_config.encoder_decoder(STACK, STACK)
    return model_config.with_head(pair, head)
  role = KINDS[kind].role
  return model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role=role, head=head)
  )


def _batch(lengths=LENGTHS):
  pairs = [framing.Pair(np.arange(5, 10), np.arange(20, 24))]
  if not lengths.encoder:
    pairs = [framing.Pair(np.zeros(0, np.int32), np.arange(20, 24))]
  row = framing.frame_row(
    pairs, lengths, gemma_ids.FRAMING, teacher=lengths.encoder > 0
  )
  return jax.tree.map(jnp.asarray, framing.stack_rows([row]))


@pytest.mark.parametrize(
  'config, lengths, expected',
  [
    (_config('encoder_decoder'), LENGTHS, {'encoder', 'decoder'}),
    (_config('decoder_only'), LENGTHS, {'teacher'}),
    (_config('prefix_decoder'), LENGTHS, {'teacher'}),
    (_config('encoder_only'), LENGTHS, {'encoder'}),
    (_config('decoder_only', heads.Labels(3)), LENGTHS, {'encoder'}),
    (
      _config('encoder_decoder', heads.Labels(3, 'last')),
      LENGTHS,
      {'encoder'},
    ),
    (_config('decoder_only'), framing.Lengths(0, 5), {'decoder'}),
  ],
)
def test_a_model_reads_the_sides_of_its_architecture(config, lengths, expected):
  kind, model = config.architecture, build.build(config)
  assert set(kind.sides(lengths.encoder > 0).values()) == expected
  params, batch = toy_models.params(config), _batch(lengths)
  predict = jax.jit(lambda batch: kind.predict(model, params, batch))
  states = predict(batch)
  for name in batch:
    if name.endswith('_tokens'):
      changed = predict(batch | {name: batch[name] + 1})
      side = name.removesuffix('_tokens')
      assert bool((changed != states).any()) == (side in expected), name


@pytest.mark.parametrize('kind', KINDS)
def test_a_kind_is_known_by_its_name(kind):
  config = _config(kind)
  assert config.architecture is KINDS[kind]
  assert config.architecture.prompt_stack in config.stacks
  assert config.architecture.positions(7, 3).keys() == config.stacks.keys()


def test_a_classifier_keeps_the_name_of_its_stack():
  kind = _config('decoder_only', heads.Labels(3)).architecture
  assert kind.name == 'decoder_only' and kind.has_encoder
  assert not kind.generates
