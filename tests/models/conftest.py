"""Small shapes, redrawn parameters and packed rows for the models' tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, model_config
from tests import toy_models

SMALL = toy_models.stack(layers=3, vocab_size=53, window=3, query_scale=5.0)


@pytest.fixture(scope='session')
def small_stack():
  """A function (**changes) -> a small StackConfig, three layers."""
  return lambda **changes: dataclasses.replace(SMALL, **changes)


@pytest.fixture(scope='session')
def small_pair():
  """A small encoder-decoder with stacks that differ in every field."""
  shape = dict(layers=4, width=24, mlp_width=16, heads=2, kv_heads=1)
  pattern = ('global', 'local', 'local')
  encoder = dataclasses.replace(
    SMALL, **shape, head_dim=4, pattern=pattern, window=2
  )
  return model_config.encoder_decoder(encoder, SMALL)


@pytest.fixture(scope='session')
def redraw():
  """A function (model) -> parameters in which every leaf matters."""
  return lambda model: toy_models.params(model.config, scale=0.3)


@pytest.fixture(scope='session')
def pack():
  """A function (rows of segment lengths, length, seed) -> tokens, segments,
  positions, each [B, length]."""

  def make(rows: list[list[int]], length: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, SMALL.vocab_size, (len(rows), length))
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, lengths in enumerate(rows):
      start = 0
      for number, size in enumerate(lengths, 1):
        segments[row, start : start + size] = number
        positions[row, start : start + size] = np.arange(size)
        start += size
    tokens[segments == 0] = 0
    return tuple(
      jnp.asarray(x, jnp.int32) for x in (tokens, segments, positions)
    )

  return make


@pytest.fixture(scope='session')
def run():
  """A function (model) -> jitted fn(params, encoder triple or None, decoder
  triple) -> logits."""

  def make(model: build.Model):
    def logits(params, encoder, decoder):
      inputs = ()
      if encoder is not None:
        inputs = (model.encode(params, *encoder), encoder[1])
      return model.logits(params, model.decode(params, *decoder, *inputs))

    return jax.jit(logits)

  return make
