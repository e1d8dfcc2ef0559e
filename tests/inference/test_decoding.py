"""Decoding by merged kernels against the model as it is trained."""

import dataclasses

import jax
import numpy as np
import pytest

from encdec_adapt.inference import decoding, quantization
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import model_config
from encdec_adapt.ops import products
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from tests import toy_models

IDS = engine_lib.SpecialIds(bos=2, eos=(-1,), pad=0)
PROMPTS = [np.array([2, 5, 9, 4]), np.array([2, 7, 3, 8, 11, 6])]
COUNT = 10


def _stack(**changes):
  return toy_models.stack(
    **dict(vocab_size=23, vocab_multiple=8, window=3, tied_head=False) | changes
  )


def _pair(**changes):
  return model_config.encoder_decoder(*[_stack(**changes)] * 2)


RULES = rules_lib.RULES['fsdp']
ALL = {'query_key_value', 'gate_up'}
# Model, merged kernels, devices by mesh axis, rules, options.
CASES = {
  'pair': (_pair(), ALL, {}, RULES, {}),
  'biases and norms': (
    model_config.DecoderOnlyConfig(
      _stack(attention_bias='qkv', qk_norm=True, mlp_bias=True)
    ),
    *(ALL, {}, RULES, {}),
  ),
  't5': (_pair(**toy_models.T5), {'query_key_value'}, {}, RULES, {}),
  'merged attention': (
    model_config.encoder_decoder(_stack(), _stack(), cross_merged=True),
    *(ALL, {}, RULES, {}),
  ),
  'experts': (
    _pair(experts=4, experts_per_token=2, shared_expert_width=8),
    *({'query_key_value'}, {}, RULES, {}),
  ),
  'int8': (_pair(), ALL, {}, RULES, {'int8': True}),
  'sharded alike': (_pair(kv_heads=4), ALL, {'tensor': 4}, RULES, {}),
  'sharded apart': (
    _pair(kv_heads=1),
    {'query', 'key_value', 'gate_up'},
    {'tensor': 2},
    dataclasses.replace(RULES, kv_heads=()),
    {},
  ),
}


# Cases that compute copies of each row's token, as GPUs do.
COPIES = ('t5', 'merged attention', 'experts', 'sharded apart')


@pytest.mark.sharded
@pytest.mark.parametrize('case', CASES)
def test_merged_kernels_give_the_same_tokens(case, monkeypatch):
  config, merged, sizes, rules, options = CASES[case]
  if case in COPIES:
    monkeypatch.setitem(products.LEAST_ROWS, 'cpu', 5)
  loaded = toy_models.load(config, scale=0.4)
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(**{'fsdp': 1, **sizes}),
    jax.devices()[: int(np.prod([*sizes.values()]))],
  )
  engine = engine_lib.Engine(
    loaded.model,
    loaded.params,
    IDS,
    rows=2,
    mesh=mesh,
    rules=rules,
    **options,
  )
  layer = engine.params['decoder']['tail']['layer_1']
  assert merged <= {*layer['attention'], *layer.get('mlp', {})}
  requests = [engine_lib.Request(prompt, COUNT) for prompt in PROMPTS]
  results = dict(engine.run(requests))
  params = loaded.params
  if options:
    params = quantization.rounded(params, loaded.model.table)
  reference = dataclasses.replace(loaded, params=params)
  for i, prompt in enumerate(PROMPTS):
    tokens, start, source = results[i].tokens, prompt, ()
    if hasattr(config, 'encoder'):
      start, source = [2], (prompt[None],)
    logits = reference.logits(np.array([[*start, *tokens]]), *source)
    expected = jax.nn.log_softmax(logits[0, len(start) - 1 : -1])
    np.testing.assert_array_equal(tokens, expected.argmax(axis=1))
    expected = np.take_along_axis(expected, tokens[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(results[i].log_probs, expected, atol=1e-4)
  # Parts of a product are on the devices of their heads and features.
  arguments = engine._decode_arguments(engine._state, 1)
  program = engine.programs.get(decoding.decode, *arguments, vocab_size=23)
  lines = [x for x in program.as_text().splitlines() if '/layer_' in x]
  assert lines and not [x for x in lines if 'collective-permute' in x]
