"""The cached loop against a loop that knows no cache."""

import functools

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.inference import generation, sampling
from encdec_adapt.models import build, model_config, parameters
from encdec_adapt.ops import partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib

# A scanned block and a tail; windows shorter than what is generated.
STACK = model_config.StackConfig(
  layers=3,
  width=16,
  mlp_width=24,
  heads=4,
  kv_heads=2,
  head_dim=4,
  vocab_size=23,
  vocab_multiple=8,
  window=3,
  tied_head=False,  # random tied models repeat themselves
  query_scale=4.0,
)
CONFIGS = {
  'encoder_decoder': model_config.encoder_decoder(STACK, STACK),
  'decoder_only': model_config.DecoderOnlyConfig(STACK),
}
RNG = jax.random.key(11)
NEVER = np.array([-1])  # an EOS that no model generates
SAMPLED = sampling.SamplingConfig(temperature=1.5, top_k=12, top_p=0.95)
PROMPTS = [[2, 9, 8, 7, 6], [2, 5], [2, 20, 21]]
STEPS = 7


@functools.cache
def _model(kind):
  config = CONFIGS[kind]
  rng = np.random.default_rng(0)
  flat = {
    path: jnp.asarray(0.4 * rng.normal(size=info.shape), info.dtype)
    for path, info in parameters.parameter_table(config).items()
  }
  return build.build(config), traverse_util.unflatten_dict(flat, sep='/')


def _padded(prompts, length=5):
  """Tokens, segments and positions [B, length], padded on the right."""
  tokens, segments, positions = np.zeros((3, len(prompts), length), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
    segments[row, : len(prompt)] = 1
    positions[row, : len(prompt)] = np.arange(len(prompt))
  return tokens, segments, positions


def _generate(kind, prompts=PROMPTS, length=5, rng=RNG, **options):
  model, params = _model(kind)
  return generation.generate(
    model,
    params,
    *_padded(prompts, length),
    rng=rng,
    max_tokens=STEPS,
    **{'bos': 2, 'eos': NEVER, 'pad': 0, **options},
  )


@functools.cache
def _uncached_logits(kind):
  """Jitted `f(prompt row, continuation row) -> logits` without any cache."""
  model, params = _model(kind)

  @jax.jit
  def encoder_decoder(prompt, continued):
    encoded = model.encode(params, *prompt)
    return model.logits(
      params, model.decode(params, *continued, encoded, prompt[1])
    )

  @jax.jit
  def decoder_only(prompt, continued):
    del prompt
    return model.logits(params, model.decode(params, *continued))

  return {'encoder_decoder': encoder_decoder, 'decoder_only': decoder_only}[
    kind
  ]


@pytest.mark.parametrize('kind', CONFIGS)
def test_greedy_equals_the_argmax_of_an_uncached_loop(kind):
  got = _generate(kind)
  logits_of = _uncached_logits(kind)
  for row, prompt in enumerate(PROMPTS):
    start = prompt if kind == 'decoder_only' else [2]
    text, log_probs = list(start), []
    for _ in range(STEPS):
      logits = logits_of(_padded([prompt]), _padded([text], 12))
      log_prob = jax.nn.log_softmax(logits[0, len(text) - 1])
      text.append(int(jnp.argmax(log_prob)))
      log_probs.append(log_prob[text[-1]])
    assert got.tokens[row].tolist() == text[len(start) :]
    np.testing.assert_allclose(got.log_probs[row], log_probs, atol=2e-5)
  assert got.lengths.tolist() == [STEPS] * 3
  # The rows differ, or the prompts would not have been read.
  assert len({tuple(row) for row in got.tokens.tolist()}) == 3


@pytest.mark.parametrize('kind', CONFIGS)
def test_sampled_tokens_have_the_uncached_log_probs(kind):
  got = _generate(kind, sampling=SAMPLED)
  logits_of = _uncached_logits(kind)
  for row, prompt in enumerate(PROMPTS):
    start = prompt if kind == 'decoder_only' else [2]
    text = start + got.tokens[row].tolist()
    logits = logits_of(_padded([prompt]), _padded([text], 12))
    log_probs = jax.nn.log_softmax(logits[0])[len(start) - 1 : len(text) - 1]
    want = np.take_along_axis(
      log_probs, np.asarray(got.tokens[row])[:, None], axis=1
    )
    # Programs that are not optimised round a little more: 2.4e-5 was seen.
    np.testing.assert_allclose(got.log_probs[row], want[:, 0], atol=5e-5)


@pytest.mark.parametrize('kind', CONFIGS)
def test_rows_do_not_depend_on_their_batch(kind):
  together = _generate(kind, sampling=SAMPLED)
  again = _generate(kind, sampling=SAMPLED)
  np.testing.assert_array_equal(together.tokens, again.tokens)
  other = _generate(kind, sampling=SAMPLED, rng=jax.random.key(12))
  assert (together.tokens != other.tokens).any()
  # Alone, and in a row with less padding.
  alone = _generate(kind, [PROMPTS[2]], 3, rows=np.array([2]), sampling=SAMPLED)
  np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])
  np.testing.assert_allclose(
    alone.log_probs[0], together.log_probs[2], atol=2e-5
  )


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('kind', CONFIGS)
def test_on_a_mesh_the_tokens_are_the_same(kind):
  prompts = [*PROMPTS, [2, 3, 4, 11]]
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(fsdp=4, tensor=2))
  model, params = _model(kind)

  padded = [jax.numpy.asarray(field) for field in _padded(prompts)]

  @jax.jit
  def run(params):
    with partition.use(mesh, rules_lib.named('fsdp').as_dict()):
      generated = generation.generate_tokens(
        model,
        params,
        *padded,
        rng=RNG,
        max_tokens=STEPS,
        bos=2,
        eos=NEVER,
        pad=0,
      )
      return generated, model.init_cache(len(prompts), STEPS)

  found, cache = run(params)
  # Rows over fsdp, heads over tensor, of the scanned block and of the tail.
  for group, layers in (('blocks', (1,)), ('tail', ())):
    key = cache.layers[group]['layer_0'].key
    assert key.addressable_shards[0].data.shape == (*layers, 1, STEPS, 1, 4)
  expected = _generate(kind, prompts)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)


@pytest.mark.parametrize('kind', CONFIGS)
def test_ended_rows_emit_pad_and_fillers_nothing(kind):
  free = np.asarray(_generate(kind).tokens)
  ends = [free[0, 2], free[1, 1]]  # Any of several tokens ends a row.
  got = _generate(kind, eos=np.array(ends), pad=3)
  for row in range(3):
    where = np.flatnonzero(np.isin(free[row], ends))
    length = where[0] + 1 if len(where) else STEPS
    want = np.where(np.arange(STEPS) < length, free[row], 3)
    np.testing.assert_array_equal(got.tokens[row], want)
    assert got.lengths[row] == length
    assert (got.log_probs[row, length:] == 0).all()
  assert got.lengths.min() <= 3

  filled = _generate(kind, [PROMPTS[0], [], PROMPTS[2]])
  np.testing.assert_array_equal(filled.tokens[0], free[0])
  np.testing.assert_array_equal(filled.tokens[1], np.zeros(STEPS))
  assert filled.lengths.tolist() == [STEPS, 0, STEPS]
  assert np.isfinite(filled.log_probs).all()
