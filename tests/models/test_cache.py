"""Cached logits equal uncached ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, model_config


def decode_cached(model, params, triple, length, sizes, **cross):
  """States of successive `decode_step`s of these sizes, joined."""
  step = jax.jit(model.decode_step)
  cache = model.init_cache(triple[0].shape[0], length)
  states, start = [], 0
  for size in sizes:
    tokens, segments, positions = (x[:, start : start + size] for x in triple)
    hidden, cache = step(
      params,
      tokens,
      segments=segments,
      positions=positions,
      cache=cache,
      **cross,
    )
    states.append(hidden)
    start += size
  assert int(cache.index) == start
  return jnp.concatenate(states, axis=1)


LLAMA = dict(
  post_norms=False,
  norm_gain='direct',
  activation='silu',
  attention_bias='qkvo',
  mlp_bias=True,
  scale_embeddings=False,
  rope_scaling='llama3:8,1,4,16',
  attention_softcap=None,
)
GEMMA3 = dict(
  pattern=('local', 'local', 'global'),
  qk_norm=True,
  rope_theta=1000.0,
  rope_scaling='linear:4',
  local_rope_theta=100.0,
  attention_softcap=None,
)
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
}


@pytest.mark.parametrize('case', CASES)
def test_cached_equals_uncached(case, small_stack, redraw, pack):
  fields, pair = CASES[case]
  stack, rows = small_stack(**fields), pack([[9], [7]], 9, seed=1)
  if pair is None:
    model = build.build(model_config.DecoderOnlyConfig(stack))
    params, inputs, cross = redraw(model), (), {}
  else:
    model = build.build(model_config.encoder_decoder(stack, stack, **pair))
    params, encoder = redraw(model), pack([[9], [6]], 9)
    inputs = jax.jit(model.encode)(params, *encoder), encoder[1]
    cross = {'cross': jax.jit(model.prefill_cross)(params, *inputs)}
  expected = jax.jit(model.decode)(params, *rows, *inputs)
  # A prompt of several tokens, then one at a time.
  got = decode_cached(model, params, rows, 11, (5, 1, 1, 1, 1), **cross)
  real = np.asarray(rows[1]) > 0
  np.testing.assert_allclose(got[real], expected[real], atol=2e-5)


def test_more_tokens_than_the_cache_holds_are_refused(
  small_stack, redraw, pack
):
  model = build.build(model_config.DecoderOnlyConfig(small_stack()))
  with pytest.raises(ValueError, match='12 tokens.*length 8'):
    decode_cached(model, redraw(model), pack([[12]], 12), 8, (12,))
