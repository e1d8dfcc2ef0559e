"""Caches of decoding: cached states equal uncached ones, slots, lengths."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, layers_index, model_config
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import rope
from tests import toy_models

LLAMA = dict(
  post_norms=False,
  norm_gain='direct',
  activation='silu',
  attention_bias='qkvo',
  mlp_bias=True,
  scale_embeddings=False,
  rope_scaling=rope.Scaling('llama3', original_length=16),
  attention_softcap=None,
)
GEMMA3 = dict(
  pattern=('local', 'local', 'global'),
  qk_norm=True,
  rope_theta=1000.0,
  rope_scaling=rope.Scaling('linear', 4.0),
  local_rope_theta=100.0,
  attention_softcap=None,
)
EACH = {
  'positions': toy_models.positions('relative_each'),
  'pattern': ('local', 'global'),
}
# Fields of both stacks, and options of the pair; None for a decoder alone.
CASES = {
  'gemma2': ({'layers': 5}, None),
  'llama': (LLAMA, None),
  'llama pair': (LLAMA, {}),
  'global cross-attention': (GEMMA3, {'cross_layers': 'global'}),
  'merged': (
    {**GEMMA3, 'eoi_token': 7},
    {'cross_merged': True, 'shared_table': True},
  ),
  't5': (toy_models.T5, {'shared_table': True}),
  't5 decoder': ({**toy_models.T5, **EACH}, None),
  'experts': (dict(experts=4, experts_per_token=2, dense_layers=1), None),
}
LENGTH = 36  # More than twice the 16 slots of a local layer.


@pytest.mark.parametrize('case', CASES)
def test_cached_equals_uncached(case, small_stack, redraw, pack):
  fields, pair = CASES[case]
  stack = small_stack(**fields)
  tokens, segments, positions = pack([[LENGTH], [LENGTH]], LENGTH, seed=1)
  if pair is None:
    model = build.build(model_config.DecoderOnlyConfig(stack))
    encoder = None
  else:
    model = build.build(model_config.encoder_decoder(stack, stack, **pair))
    encoder = pack([[9], [6]], 9)
  params = redraw(model)
  unrolled = build.unroll(model)
  weights = build.unroll_params(model, params)
  cache = unrolled.init_cache(2, 48, 0 if encoder is None else 16)
  inputs, start = (), jnp.zeros(2, jnp.int32)
  rows = jnp.array([1, 0])  # Rows of the cache need not be in order.
  if encoder is None:
    # Prompts of different lengths, one of them longer than the window.
    start = jnp.array([3, 20])
    real = jnp.int32(jnp.arange(LENGTH) < start[:, None])
    entries = unrolled.prefill(weights, tokens, real, positions)
    cache = caches.insert(
      stack_of(unrolled), cache, rows, prompt=entries, lengths=start
    )
    start -= 1  # The last token of a prompt is read again.
  else:
    encoded = jax.jit(model.encode)(params, *encoder)
    inputs = encoded, encoder[1]
    cache = caches.insert(
      stack_of(unrolled),
      cache,
      rows,
      cross=unrolled.prefill_cross(weights, encoded),
      encoder_segments=encoder[1],
    )
  expected = jax.jit(model.decode)(params, tokens, segments, positions, *inputs)
  step = jax.jit(unrolled.decode_step)
  for i in range(LENGTH - start.max()):
    new = jnp.take_along_axis(tokens, (start + i)[:, None], axis=1)[:, 0]
    hidden, cache = step(weights, new[rows], cache)
    want = expected[jnp.arange(2), start + i]
    np.testing.assert_allclose(hidden[rows], want, atol=3e-5)
    if i == 4:  # Lengths may change on the way.
      cache = caches.resize(stack_of(unrolled), cache, 64, cache.source and 32)
  assert (cache.index[rows] == start + i + 1).all()


def stack_of(model):
  return model.config.decoder


def test_slots_hold_the_newest_positions():
  stack = toy_models.stack(window=5)
  assert caches.slots(stack, 'global', 64) == 64
  assert caches.slots(stack, 'local', 64) == 16
  assert caches.slots(stack, 'local', 8) == 8
  np.testing.assert_array_equal(
    caches.slot_positions(jnp.array([0, 2, 6]), 4),
    [[0, -3, -2, -1], [0, 1, 2, -1], [4, 5, 6, 3]],
  )


def test_rows_beyond_the_batch_are_dropped():
  stack = layers_index.unroll(toy_models.stack())
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params = toy_models.params(model.config)
  ones = jnp.ones((2, 3), jnp.int32)
  entries = model.prefill(params, ones, ones, jnp.tile(jnp.arange(3), (2, 1)))
  cache = caches.insert(
    stack,
    model.init_cache(2, 16),
    jnp.array([1, 2]),
    prompt=entries,
    lengths=jnp.array([3, 2]),
  )
  np.testing.assert_array_equal(cache.index, [0, 2])
  for leaf in jax.tree.leaves(cache.layers):
    assert (leaf[0] == 0).all()
    assert (leaf[1, :, :3] != 0).all()
