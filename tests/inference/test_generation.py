"""The cached loop against a loop that knows no cache."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.inference import generation, sampling
from encdec_adapt.models import build, model_config
from encdec_adapt.ops import partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from tests import toy_models

# A scanned block and a tail; windows shorter than what is generated; random
# models with a tied head repeat themselves.
STACK = toy_models.stack(
  layers=3, vocab_size=23, vocab_multiple=8, window=3, tied_head=False
)
CONFIGS = toy_models.pair_and_decoder(STACK)
RNG = jax.random.key(11)
NEVER = np.array([-1])  # an EOS that no model generates
SAMPLED = sampling.SamplingConfig(temperature=1.5, top_k=12, top_p=0.95)
PROMPTS = [[2, 9, 8, 7, 6], [2, 5], [2, 20, 21]]
STEPS = 7


@functools.cache
def _loaded(kind):
  return toy_models.load(CONFIGS[kind], scale=0.4)


def _padded(prompts, length=5):
  """Tokens, segments and positions [B, length], padded on the right."""
  tokens, segments, positions = np.zeros((3, len(prompts), length), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
    segments[row, : len(prompt)] = 1
    positions[row, : len(prompt)] = np.arange(len(prompt))
  return tokens, segments, positions


def _generate(kind, prompts=PROMPTS, length=5, rng=RNG, **options):
  loaded = _loaded(kind)
  return generation.generate(
    loaded.model,
    loaded.params,
    *_padded(prompts, length),
    rng=rng,
    max_tokens=STEPS,
    **{'bos': 2, 'eos': NEVER, 'pad': 0, **options},
  )


@pytest.mark.parametrize('config', [sampling.SamplingConfig(), SAMPLED])
@pytest.mark.parametrize('kind', CONFIGS)
def test_tokens_have_the_uncached_log_probs(kind, config):
  got = _generate(kind, sampling=config)
  for row, prompt in enumerate(PROMPTS):
    tokens, _, _ = _padded([prompt])
    mask = tokens > 0
    start, source = [2], (tokens, mask)
    if kind == 'decoder_only':
      start, source = prompt, ()
    text = [*start, *got.tokens[row].tolist()]
    logits = _loaded(kind).logits(_padded([text], 12)[0], *source)
    log_probs = jax.nn.log_softmax(logits[0])[len(start) - 1 : len(text) - 1]
    chosen = np.asarray(got.tokens[row])
    if config.temperature == 0:
      np.testing.assert_array_equal(chosen, log_probs.argmax(axis=1))
    want = np.take_along_axis(log_probs, chosen[:, None], axis=1)[:, 0]
    # Programs that are not optimised round a little more: 2.4e-5 was seen.
    np.testing.assert_allclose(got.log_probs[row], want, atol=5e-5)
  assert got.lengths.tolist() == [STEPS] * 3
  # The rows differ, or the prompts would not have been read.
  assert len({tuple(row) for row in got.tokens.tolist()}) == 3


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
  loaded, padded = _loaded(kind), [jnp.asarray(x) for x in _padded(prompts)]

  @jax.jit
  def run(params):
    with partition.use(mesh, rules_lib.RULES['fsdp'].as_dict()):
      generated = generation.generate_tokens(
        loaded.model,
        params,
        *padded,
        rng=RNG,
        max_tokens=STEPS,
        bos=2,
        eos=NEVER,
        pad=0,
      )
      return generated, loaded.model.init_cache(len(prompts), STEPS)

  found, cache = run(loaded.params)
  # Rows over fsdp, heads over tensor, of the scanned block and of the tail.
  for group, layers in (('blocks', (1,)), ('tail', ())):
    key = cache.layers[group]['layer_0'].key
    assert key.addressable_shards[0].data.shape == (*layers, 1, STEPS, 1, 8)
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


def test_a_prefix_decoder_reads_the_prompt_from_both_sides():
  config = model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role='prefix')
  )
  model, params = build.build(config), _loaded('decoder_only').params
  options = dict(rng=RNG, max_tokens=STEPS, bos=2, eos=NEVER, pad=0)
  got = generation.generate(model, params, *_padded(PROMPTS), **options)
  causal = _generate('decoder_only')
  assert (np.asarray(got.tokens) != np.asarray(causal.tokens)).any()
  for row, prompt in enumerate(PROMPTS):
    text = _padded([[*prompt, *got.tokens[row].tolist()]], 12)
    prefix = jnp.int32(text[2] < len(prompt)) * text[1]
    hidden = model.decode(params, *map(jnp.asarray, text), prefix=prefix)
    logits = model.logits(params, hidden)[0, len(prompt) - 1 :]
    np.testing.assert_array_equal(
      got.tokens[row], logits[:STEPS].argmax(axis=1)
    )
