"""Completions are a function of step and row, with the trainer's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.models import build
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import environment
from encdec_adapt.tokenizers import chat_format, vocabulary_pair
from encdec_adapt.training import rollouts
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe
from tests import tiny, toy_models

STACK = toy_models.stack(vocab_size=tiny.VOCAB, vocab_multiple=8)
CONFIGS = toy_models.pair_and_decoder(STACK)
TOKENS, SAMPLES, TEMPERATURE = 6, 3, 0.7
ROWS = (3, 0, 1, -1)


@pytest.fixture(scope='module')
def records(tmp_path_factory):
  folder = tmp_path_factory.mktemp('rollouts')
  tiny.make_records(folder, 8, pack=False)
  opened = vocabulary_pair.open_vocabulary(folder / 'vocabulary.model')
  return record_sets.RecordSet.open(folder / 'prefix_lm' / 'train'), opened


def _sample(records, kind, mesh, step=0, rows=ROWS, **options):
  """Samples, and the placement of the model."""
  record_set, vocabulary = records
  count = int(np.prod([getattr(mesh, x) for x in mesh_lib.AXES]))
  placement = state_lib.Placement(
    build.build(CONFIGS[kind]),
    mesh_lib.make_mesh(mesh, jax.devices()[:count]),
    rules_lib.RULES['fsdp'],
  )
  config = recipe.Sampling(
    samples=SAMPLES, tokens=TOKENS, temperature=TEMPERATURE
  )
  sampler = rollouts.Sampler(placement, record_set, vocabulary, config, 5)
  pairs = [None if i < 0 else record_set.read([i])[0][0] for i in rows]
  # Prompts of other lengths, so that some have padding.
  pairs = [
    pair and pair._replace(inputs=pair.inputs[: 15 - 3 * i])
    for i, pair in zip(rows, pairs, strict=True)
  ]
  params = placement.place(lambda x: x, toy_models.params(CONFIGS[kind]))
  return sampler(params, pairs, rows, step, **options), pairs, placement


ONE = mesh_lib.MeshConfig(fsdp=1)


@pytest.fixture(scope='module', params=CONFIGS)
def sampled(request, records):
  return request.param, *_sample(records, request.param, ONE)


@pytest.mark.long
def test_log_probabilities_are_the_trainers(sampled, records):
  """Of logits divided by the temperature, at the tokens of each completion."""
  kind, samples, pairs, placement = sampled
  groups = [
    [
      []
      if pair is None
      else [framing.Pair(pair.inputs, samples.completion(i, j))]
      for j in range(SAMPLES)
    ]
    for i, pair in enumerate(pairs)
  ]
  lengths = framing.Lengths(16, TOKENS)
  batch = framing.stack_rows(
    [
      framing.frame_group(x, lengths, records[0].framing, teacher=True)
      for x in groups
    ]
  )
  model, params = placement.model, toy_models.params(CONFIGS[kind])

  @jax.jit
  def log_probs(params, batch):
    hidden = model.architecture.predict(model, params, batch)
    logits = model.logits(params, hidden) / TEMPERATURE
    targets = batch['targets'].reshape(-1, TOKENS)[..., None]
    values = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(values, targets, -1)[..., 0]

  expected = log_probs(params, batch).reshape(samples.log_probs.shape)
  expected = np.where(batch['weights'] > 0, expected, 0)[:3]
  np.testing.assert_allclose(samples.log_probs[:3], expected, atol=2e-5)
  assert (batch['weights'].sum(-1)[:3] == samples.counts[:3]).all()
  assert (samples.counts[~samples.ended] == TOKENS).all()


def test_draws_depend_on_step_row_and_sample_alone(sampled, records):
  kind, samples, *_ = sampled
  texts = {samples.completion(0, j).tobytes() for j in range(SAMPLES)}
  assert len(texts) == SAMPLES
  other, *_ = _sample(records, kind, ONE, rows=(1, 3, 2, -1))
  for field in ('tokens', 'counts', 'ended'):
    mine, theirs = getattr(samples, field), getattr(other, field)
    np.testing.assert_array_equal(mine[[2, 0]], theirs[[0, 1]])
  later, *_ = _sample(records, kind, ONE, step=1)
  assert (later.tokens != samples.tokens).any()
  greedy, *_ = _sample(records, kind, ONE, greedy=True)
  np.testing.assert_array_equal(greedy.tokens[:, 1:], samples.tokens[:, 1:])
  assert (greedy.tokens[:, 0] != samples.tokens[:, 0]).any()


def test_a_turn_of_a_chat_ends_with_its_token(sampled, records, monkeypatch):
  kind, samples, *_ = sampled
  end = int(samples.tokens[0, 0, 1])
  monkeypatch.setattr(chat_format, 'end_of_turn', lambda _: end)
  spec = dataclasses.replace(records[0].spec, objective='chat')
  monkeypatch.setattr(records[0], 'spec', spec)
  chat, *_ = _sample(records, kind, ONE)
  ids = samples.completion(0, 0).tolist()
  ids = ids[: ids.index(end) + 1]
  assert chat.completion(0, 0).tolist() == ids and chat.ended[0, 0]
  # Steps of the other rows leave nothing after its end.
  assert chat.log_probs[0, 0, : len(ids)].all()
  assert not chat.tokens[0, 0, len(ids) :].any()
  assert not chat.log_probs[0, 0, len(ids) :].any()


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('sizes', [{'fsdp': 2}, {'fsdp': 2, 'tensor': 2}])
def test_on_a_mesh_the_completions_are_the_same(sampled, records, sizes):
  """Heads divide over fsdp and tensor, or else over tensor alone."""
  kind, samples, *_ = sampled
  mesh = mesh_lib.MeshConfig(**sizes)
  sharded, _, placement = _sample(records, kind, mesh)
  wide = rollouts.sampling_rules(placement).heads == ('fsdp', 'tensor')
  assert wide == (sizes == {'fsdp': 2})
  np.testing.assert_array_equal(sharded.tokens, samples.tokens)
  np.testing.assert_allclose(sharded.log_probs, samples.log_probs, atol=1e-4)


def test_caches_that_a_device_cannot_hold_are_refused(records, monkeypatch):
  monkeypatch.setattr(environment, 'memory_free', lambda: 50_000)
  text = f'tokens is {TOKENS}, and .* of which 48.8 KiB are free'
  with pytest.raises(errors.UserError, match=text):
    _sample(records, 'encoder_decoder', ONE)
