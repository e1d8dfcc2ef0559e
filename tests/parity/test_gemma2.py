"""Logits of Gemma 2 against transformers: fp32, eager attention."""

import dataclasses

import jax
import numpy as np
import pytest

from encdec_adapt.models import build, config, presets

pytestmark = pytest.mark.parity

STACK = presets.stack(
  'toy_small',
  layers=5,
  width=32,
  mlp_width=48,
  heads=4,
  kv_heads=2,
  head_dim=12,
  vocab_size=67,
  window=4,
  query_scale=7.0,
  attention_softcap=5.0,
  final_softcap=8.0,
)
LENGTHS = (14, 9)  # both beyond 2W


@pytest.fixture(scope='module')
def case(hugging_face):
  """The torch model and our parameters."""
  hf = hugging_face
  settings = hf.transformers.Gemma2Config(**hf.settings(STACK))
  settings._attn_implementation = 'eager'
  model = hf.redraw(hf.transformers.Gemma2ForCausalLM(settings))
  weights = {k: v.detach().numpy() for k, v in model.named_parameters()}
  norms = hf.gemma2_norms
  params = hf.stack(STACK, weights.__getitem__, 'model', norms)
  return model, {'decoder': params}


def ours(stack, params, triple):
  model = build.build(config.DecoderOnlyConfig(stack), attention_chunk=5)

  @jax.jit
  def logits(params):
    return model.logits(params, model.decode(params, *triple))

  return np.asarray(logits(params))


def theirs(hf, model, triple):
  tokens, segments, _ = (hf.torch.tensor(np.asarray(x)).long() for x in triple)
  with hf.torch.no_grad():
    out = model(input_ids=tokens, attention_mask=segments, use_cache=False)
  return out.logits.numpy()


def test_logits(hugging_face, case, rows):
  model, params = case
  triple = rows(LENGTHS, 14, STACK.vocab_size)
  real = np.asarray(triple[1]) > 0
  expected = theirs(hugging_face, model, triple)[real]
  got = ours(STACK, params, triple)[real]
  np.testing.assert_allclose(got, expected, rtol=0, atol=hugging_face.tolerance)
  assert np.abs(expected).max() > 2  # the final cap is at work


@pytest.mark.parametrize(
  'change',
  [
    {'window': 5},
    {'query_scale': 12.0},
    {'attention_softcap': None},
    {'final_softcap': None},
    {'rope_theta': 11000.0},
    {'pattern': ('global', 'local')},
  ],
  ids=str,
)
def test_the_comparison_would_notice(hugging_face, case, rows, change):
  model, params = case
  triple = rows(LENGTHS, 14, STACK.vocab_size)
  real = np.asarray(triple[1]) > 0
  got = ours(dataclasses.replace(STACK, **change), params, triple)[real]
  expected = theirs(hugging_face, model, triple)[real]
  assert np.abs(got - expected).max() > 10 * hugging_face.tolerance
