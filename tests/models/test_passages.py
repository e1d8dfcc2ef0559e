"""Fusion-in-Decoder: passages are read alone, and attended to together."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.models import build, execution, forward_flops, model_config
from encdec_adapt.ops import passage_segments
from tests import toy_models

LENGTH = 9
SIZES = [(5, 9, 2), (7, 9)]  # Tokens of the passages of two examples.
T5 = {**toy_models.T5, 'pattern': ('global',)}
CASES = {
  'bos': ({}, False),
  'eos': (T5, True),
  'window': ({'window_rule': 'centered', 'window': 6}, False),
  'merged': ({'cross_merged': True}, False),
}


def _reading(config, length, ends):
  read = passage_segments.Passages(length, 1, ends)
  encoder = dataclasses.replace(config.encoder, passages=read)
  return dataclasses.replace(config, encoder=encoder)


def _texts(ends):
  rng = np.random.default_rng(0)
  for sizes in SIZES:
    texts = [rng.integers(2, 60, size) for size in sizes]
    for text in texts:
      text[-1 if ends else 0] = 1
    yield texts


def _row(texts):
  """Tokens, segments and positions of a row with padding."""
  numbers = [np.full(len(x), i) for i, x in enumerate(texts, start=1)]
  positions = [np.arange(len(x)) for x in texts]
  fields = (np.concatenate(x) for x in (texts, numbers, positions))
  return [jnp.asarray(np.pad(x, (0, 3))[None], jnp.int32) for x in fields]


@pytest.mark.parametrize('attention', ['reference', 'chunked'])
@pytest.mark.parametrize('name', CASES)
def test_it_equals_passages_encoded_alone(name, attention):
  changes, ends = CASES[name]
  changes = dict(changes)
  merged = {x: changes.pop(x) for x in ('cross_merged',) if x in changes}
  stack = toy_models.stack(**changes)
  plain = model_config.encoder_decoder(stack, stack, **merged)
  params = toy_models.params(plain)
  compute = execution.ComputeConfig(
    'float32', attention=attention, attention_chunk=4
  )
  model = build.build(_reading(plain, LENGTH, ends), compute)
  whole = build.build(plain, compute)
  examples = list(_texts(ends))
  targets = _row([np.arange(3, 9), np.arange(4, 8)])
  row = _row([np.concatenate(texts) for texts in examples])
  states = model.encode(params, *row)
  # Alone, a passage is a row of the same encoder.
  alone = [
    whole.encode(params, *(x[:, : len(text)] for x in _row([text])))[0]
    for texts in examples
    for text in texts
  ]
  alone = jnp.pad(jnp.concatenate(alone), [(0, 3), (0, 0)])[None]
  np.testing.assert_allclose(states[:, :-3], alone[:, :-3], atol=2e-5)
  got, expected = (
    model.decode(params, *targets, encoded, row[1])
    for encoded in (states, alone)
  )
  np.testing.assert_allclose(got[:, :-3], expected[:, :-3], atol=2e-5)
  # The other passages count: with one text a row, states differ.
  together = whole.encode(params, *row)
  assert np.abs(together - states)[:, :-3].max() > 0.1


def test_the_encoder_costs_as_much_as_its_passages():
  stack = toy_models.stack(role='bidirectional', window=3)
  reading = dataclasses.replace(stack, passages=passage_segments.Passages(8))
  cost = forward_flops.stack_forward
  for count in (1, 4, 40):
    assert cost(reading, 8 * count) == count * cost(stack, 8)
  assert cost(reading, 20) == 2 * cost(stack, 8) + cost(stack, 4)
  assert cost(stack, 320) > 40 * cost(stack, 8)
  # The convention of the paper knows no passages.
  pair = model_config.encoder_decoder(reading, stack)
  plain = model_config.encoder_decoder(stack, stack)
  published = forward_flops.published
  assert published(pair, 320, 8) == published(plain, 320, 8)


def test_only_encoders_read_passages():
  reading = toy_models.stack(passages=passage_segments.Passages(8))
  plain = toy_models.stack()
  for make in (
    lambda: model_config.encoder_decoder(plain, reading),
    lambda: model_config.DecoderOnlyConfig(reading),
    lambda: model_config.encoder_decoder(reading, plain, causal_encoder=True),
  ):
    with pytest.raises(
      errors.UserError, match='only the bidirectional encoder'
    ):
      make()
