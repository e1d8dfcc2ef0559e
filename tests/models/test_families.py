"""Stacks of other families: what each option changes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.models import build, model_config, parameters
from tests.models.test_cache import GEMMA3, LLAMA

MERGED = dict(cross_merged=True, shared_table=True)
EXPERTS = dict(experts=4, experts_per_token=2)


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
    ({'norm_topk': True}, 'norm_topk is True'),
    ({'experts': 4}, 'experts_per_token is 0'),
    ({**EXPERTS, 'experts_per_token': 5}, 'experts_per_token is 5'),
    ({**EXPERTS, 'dense_layers': 3}, 'dense_layers is 3'),
    ({**EXPERTS, 'shared_expert_gate': True}, 'shared_expert_width'),
    ({**EXPERTS, 'mlp_bias': True}, 'mlp_bias'),
  ],
)
def test_fields_that_cannot_be(changes, message, small_stack):
  with pytest.raises(errors.UserError, match=message):
    small_stack(**changes)
