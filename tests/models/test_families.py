"""Stacks of other families: what each option changes, cached as uncached."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.models import build, model_config, parameters

LLAMA = dict(
  post_norms=False,
  norm_gain='direct',
  activation='silu',
  attention_bias='qkvo',
  mlp_bias=True,
  scale_embeddings=False,
  rope_scaling='llama3',
  rope_factor=8.0,
  rope_original_length=16,
  attention_softcap=None,
)
GEMMA3 = dict(
  pattern=('local', 'local', 'global'),
  qk_norm=True,
  rope_theta=1000.0,
  rope_scaling='linear',
  rope_factor=4.0,
  local_rope_theta=100.0,
  attention_softcap=None,
)
MERGED = dict(cross_merged=True, shared_table=True)
CASES = {
  'llama': (LLAMA, None),
  'llama pair': (LLAMA, {}),
  'gemma3 pair': (GEMMA3, {}),
  'merged': ({**GEMMA3, 'eoi_token': 7}, MERGED),
  'global cross-attention': (GEMMA3, dict(cross_layers='global')),
}


@pytest.mark.parametrize('case', CASES)
def test_cached_equals_uncached(case, small_stack, redraw, pack):
  fields, pair = CASES[case]
  stack = small_stack(**fields)
  if pair is None:
    model = build.build(model_config.DecoderOnlyConfig(stack))
  else:
    model = build.build(model_config.encoder_decoder(stack, stack, **pair))
  params = redraw(model)
  inputs = pack([[9], [6]], 9)
  tokens, segments, positions = pack([[7], [7]], 7, seed=1)

  @jax.jit
  def both(params):
    encoded, extra = (), {}
    if pair is not None:
      encoded = (model.encode(params, *inputs), inputs[1])
      extra = {'cross': model.prefill_cross(params, *encoded)}
    whole = model.decode(params, tokens, segments, positions, *encoded)
    cache = model.init_cache(*tokens.shape)
    steps = []
    for i in range(tokens.shape[1]):
      at = slice(i, i + 1)
      hidden, cache = model.decode_step(
        params,
        tokens[:, at],
        segments=segments[:, at],
        positions=positions[:, at],
        cache=cache,
        **extra,
      )
      steps.append(hidden)
    return whole, jnp.concatenate(steps, axis=1)

  np.testing.assert_allclose(*both(params), atol=2e-5)


@pytest.mark.parametrize(
  'field, value',
  [
    ('norm_gain', 'one_plus'),
    ('activation', 'gelu_tanh'),
    ('scale_embeddings', True),
    ('rope_scaling', 'none'),
    ('rope_factor', 2.0),
  ],
)
def test_every_setting_reaches_the_logits(
  field, value, small_stack, redraw, pack, run
):
  one = model_config.DecoderOnlyConfig(small_stack(**LLAMA))
  other = dataclasses.replace(
    one, decoder=dataclasses.replace(one.decoder, **{field: value})
  )
  assert parameters.parameter_table(one) == parameters.parameter_table(other)
  params, rows = redraw(build.build(one)), pack([[24]], 24)
  first, second = (
    run(build.build(model))(params, None, rows) for model in (one, other)
  )
  assert jnp.abs(first - second).max() > 1e-3


def test_only_local_layers_have_the_local_rotation(
  small_stack, redraw, pack, run
):
  stack = small_stack(**{**GEMMA3, 'pattern': ('local',)})
  changed = dataclasses.replace(stack, rope_theta=7.0, rope_factor=2.0)
  models = [
    build.build(model_config.DecoderOnlyConfig(s)) for s in (stack, changed)
  ]
  params, rows = redraw(models[0]), pack([[12]], 12)
  first, second = (run(model)(params, None, rows) for model in models)
  np.testing.assert_array_equal(first, second)


def test_a_shared_table_is_counted_once(small_stack):
  stack = small_stack(qk_norm=True, eoi_token=7)
  pair = model_config.encoder_decoder(stack, stack, **MERGED)
  table = parameters.parameter_table(pair)
  assert 'encoder/embedder/table' not in table
  assert not [path for path in table if 'cross' in path]
  counts = parameters.count_by_stack(pair)
  assert counts['encoder'].embedding == 0
  assert counts['decoder'].embedding == 53 * 16 + 16
  assert counts['decoder'].cross == 0


def test_the_eoi_vector_replaces_the_scaled_row(small_stack, redraw, pack, run):
  stack = small_stack(eoi_token=7)
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params, rows = redraw(model), pack([[5]], 5)
  embedder = params['decoder']['embedder']
  with_token = (rows[0].at[0, 2].set(7), *rows[1:])
  before = run(model)(params, None, with_token)
  embedder['eoi'] = embedder['eoi'] + 1
  after = run(model)(params, None, with_token)
  np.testing.assert_array_equal(before[:, :2], after[:, :2])
  assert jnp.abs(before - after)[:, 2:].max() > 1e-3


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rope_factor': 0.0}, 'rope_factor is 0.0'),
    ({'rope_low_factor': 4.0}, 'must be below rope_high_factor'),
    ({'eoi_token': 53}, 'eoi_token is 53.*below vocab_size, 53'),
    ({'cross_merged': True, 'cross_width': 8}, 'must be the'),
  ],
)
def test_fields_that_cannot_be(changes, message, small_stack):
  with pytest.raises(errors.UserError, match=message):
    small_stack(**changes)


def test_unequal_stacks_cannot_share_a_table(small_stack):
  with pytest.raises(errors.UserError, match='equal vocab_size'):
    model_config.encoder_decoder(
      small_stack(), small_stack(vocab_size=60), shared_table=True
    )
