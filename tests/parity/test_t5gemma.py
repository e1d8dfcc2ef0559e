"""Logits and gradients of T5Gemma against transformers: fp32, eager."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, config, presets

pytestmark = pytest.mark.parity

# Every field differs between the stacks; 5.23 eager has the inclusive window.
DECODER = presets.stack(
  'toy_small',
  layers=3,
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
ENCODER = dataclasses.replace(
  DECODER,
  layers=4,
  width=24,
  mlp_width=40,
  heads=2,
  kv_heads=1,
  head_dim=16,
  vocab_size=59,
  window=3,
  window_rule='inclusive',
  query_scale=20.0,
  attention_softcap=4.0,
  rope_theta=500.0,
)
PAIR = config.encoder_decoder(ENCODER, DECODER)


@pytest.fixture(scope='module')
def model(hugging_face):
  """The torch model, weights redrawn."""
  hf = hugging_face
  module = hf.transformers.models.t5gemma.T5GemmaModuleConfig
  settings = hf.transformers.T5GemmaConfig(
    encoder=module(**hf.settings(PAIR.encoder)),
    decoder=module(**hf.settings(PAIR.decoder)),
    vocab_size=DECODER.vocab_size,
  )
  for part in (settings, settings.encoder, settings.decoder):
    part._attn_implementation = 'eager'
  return hf.redraw(hf.transformers.T5GemmaForConditionalGeneration(settings))


@pytest.fixture
def batch(rows):
  """Encoder and decoder rows, padded on the right, beyond 2W + 1."""
  encoder = rows((13, 10), 13, ENCODER.vocab_size)
  decoder = rows((9, 12), 12, DECODER.vocab_size, seed=1)
  return encoder, decoder


def our_params(hf, model, read):
  """Our tree of read(torch parameter)."""
  arrays = {k: read(v).numpy() for k, v in model.named_parameters()}
  return {
    name: hf.stack(stack, arrays.__getitem__, f'model.{name}', hf.t5gemma_norms)
    for name, stack in PAIR.stacks.items()
  }


def our_logits(pair, params, batch):
  encoder, decoder = batch
  built = build.build(pair, attention_chunk=5)
  encoded = built.encode(params, *encoder)
  hidden = built.decode(params, *decoder, encoded, encoder[1])
  return built.logits(params, hidden)


def their_logits(hf, model, batch):
  encoder, decoder = (
    [hf.torch.tensor(np.asarray(x)).long() for x in triple] for triple in batch
  )
  return model(
    input_ids=encoder[0],
    attention_mask=encoder[1],
    decoder_input_ids=decoder[0],
    decoder_attention_mask=decoder[1],
    use_cache=False,
  ).logits


def largest_difference(hf, model, batch, pair):
  """Largest difference of logits at real tokens, and largest logit."""
  params = our_params(hf, model, lambda weight: weight.detach())
  real = np.asarray(batch[1][1]) > 0
  with hf.torch.no_grad():
    expected = their_logits(hf, model, batch).numpy()[real]
  got = jax.jit(lambda p: our_logits(pair, p, batch))(params)
  return np.abs(np.asarray(got)[real] - expected).max(), np.abs(expected).max()


def test_logits(hugging_face, model, batch):
  difference, scale = largest_difference(hugging_face, model, batch, PAIR)
  assert difference < hugging_face.tolerance
  assert scale > 2  # the final cap is at work


@pytest.mark.parametrize(
  'stack, change',
  [
    ('encoder', {'window_rule': 'exclusive'}),
    ('encoder', {'role': 'causal'}),
    ('encoder', {'query_scale': 16.0}),
    ('encoder', {'attention_softcap': None}),
    ('encoder', {'rope_theta': 600.0}),
    ('decoder', {'window': 5}),
    ('decoder', {'query_scale': 12.0}),
  ],
  ids=str,
)
def test_the_comparison_would_notice(hugging_face, model, batch, stack, change):
  changed = dataclasses.replace(PAIR.stacks[stack], **change)
  pair = dataclasses.replace(PAIR, **{stack: changed})
  difference, _ = largest_difference(hugging_face, model, batch, pair)
  assert difference > 10 * hugging_face.tolerance


def test_exclusive_rule_of_the_next_window(hugging_face, model, batch):
  """|q-k| < W + 1 is |q-k| <= W: both rules meet the same reference."""
  encoder = dataclasses.replace(
    PAIR.encoder, window_rule='exclusive', window=ENCODER.window + 1
  )
  pair = dataclasses.replace(PAIR, encoder=encoder)
  difference, _ = largest_difference(hugging_face, model, batch, pair)
  assert difference < hugging_face.tolerance


def test_gradients_of_all_parameters(hugging_face, model, batch):
  hf = hugging_face
  weights = np.asarray(batch[1][1])[..., None] * np.random.default_rng(
    2
  ).normal(size=(2, 12, DECODER.vocab_size)).astype(np.float32)
  model.zero_grad()
  (their_logits(hf, model, batch) * hf.torch.tensor(weights)).sum().backward()
  expected = our_params(hf, model, lambda weight: weight.grad)
  params = our_params(hf, model, lambda weight: weight.detach())
  got = jax.jit(
    jax.grad(lambda p: jnp.sum(our_logits(PAIR, p, batch) * weights))
  )(params)

  def compare(path, a, b):
    name = jax.tree_util.keystr(path)
    assert np.abs(b).max() > 0, name
    np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-4 * np.abs(b).max(), err_msg=name
    )

  jax.tree_util.tree_map_with_path(compare, got, expected)
