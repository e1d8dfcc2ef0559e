"""Loss per target token against a dense sum over the targets."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets, record_writing
from encdec_adapt.evaluation.measures import held_out, perplexity
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.losses import cross_entropy
from encdec_adapt.training.metrics import token_metrics
from tests import gemma_ids, toy_models

STACK = toy_models.stack(layers=1, vocab_size=19, vocab_multiple=8)
CONFIGS = toy_models.pair_and_decoder(STACK)
METRICS = token_metrics.TargetTokens(cross_entropy.CrossEntropy(chunk=8))
LENGTHS = framing.Lengths(encoder=8, decoder=6)


def _pair(inputs, targets):
  return framing.Pair(np.array(inputs, np.int32), np.array(targets, np.int32))


ROWS = [
  [_pair([5, 6, 7], [8, 9, 1])],
  [_pair([10], [11, 12]), _pair([13, 14], [15, 16, 17])],
  [_pair([18, 5, 9, 9, 4], [3, 3, 7, 8, 9, 10])],
]


@functools.cache
def _loaded(kind):
  return toy_models.load(CONFIGS[kind], seed=3)


@functools.cache
def _evaluator(kind, devices=1):
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(), devices=jax.devices()[:devices]
  )
  where = state_lib.Placement(
    _loaded(kind).model, mesh, rules_lib.RULES['fsdp']
  )
  return perplexity.Evaluator(where, METRICS), where


def _frame(pairs, lengths):
  return framing.frame_row(
    pairs, lengths, gemma_ids.FRAMING, teacher=lengths.encoder > 0
  )


def _batches(size, rows=ROWS, lengths=LENGTHS):
  framed = [_frame(pairs, lengths) for pairs in rows]
  while len(framed) % size:
    framed.append(_frame([], lengths))
  for start in range(0, len(framed), size):
    batch = framing.stack_rows(framed[start : start + size])
    yield {**batch, 'row': np.arange(start, start + size, dtype=np.int32)}


def _by_hand(kind):
  """Loss and accuracy, one pair and one target at a time."""
  losses, right = [], []
  for pair in itertools.chain(*ROWS):
    batch = framing.stack_rows([_frame([pair], LENGTHS)])
    tokens = {
      side: (batch[f'{side}_tokens'], batch[f'{side}_segments'] > 0)
      for side in ('encoder', 'decoder', 'teacher')
    }
    if kind == 'decoder_only':
      # It predicts from BOS and the whole prefix on.
      first, (own, mask), source = len(pair.inputs), tokens['teacher'], ()
    else:
      first, (own, mask), source = 0, tokens['decoder'], tokens['encoder']
    logits = np.asarray(
      _loaded(kind).logits(own, *source, decoder_mask=mask)[0]
    )
    for place, target in enumerate(pair.targets, start=first):
      scores = logits[place]
      losses.append(np.log(np.exp(scores).sum()) - scores[target])
      right.append(scores.argmax() == target)
  return np.mean(losses), np.mean(right), len(losses)


@pytest.mark.parametrize('kind', CONFIGS)
@pytest.mark.parametrize('size', [1, 2, 3])
def test_equals_a_sum_by_hand_for_any_batch_size(kind, size):
  got = _evaluator(kind)[0](_loaded(kind).params, _batches(size))
  loss, accuracy, count = _by_hand(kind)
  assert got.weight == count == 14
  np.testing.assert_allclose(got.values['loss'], loss, rtol=2e-6)
  np.testing.assert_allclose(got.values['accuracy'], accuracy, rtol=1e-6)
  assert got.ratios.shape[2] == len(ROWS)


def test_texts_of_a_packed_row_are_scored_by_document(tmp_path):
  """As those in rows of their own."""
  pairs, scores = list(itertools.chain(*ROWS)), []
  for i, name in enumerate('abac'):
    pairs[i] = pairs[i]._replace(documents=(f'{name}::0',))
  part = record_sets.Part('prefix_lm', 'text:x')
  for cuts in ([0, 1, 2, 3, 4], [0, 1, 3, 4]):
    spec = record_sets.RecordSpec('text:x', 'eval', 'prefix_lm', 8, 6)
    spec = dataclasses.replace(spec, shards=1, pack=len(cuts) < 5)
    folder = tmp_path / str(cuts)
    (key,) = record_writing.shard_keys(spec, [part])
    with record_writing.ShardWriter(folder, spec, key) as writer:
      for start, stop in itertools.pairwise(cuts):
        writer.write(pairs[start:stop])
      content = [part], {key: writer.finish()}, gemma_ids.DESCRIBED
    record_writing.write_manifest(folder, spec, *content)
    evaluation = held_out.HeldOutEvaluation(record_sets.RecordSet.open(folder))
    loaded = _loaded('encoder_decoder')
    scores.append(evaluation.scores(loaded, 2, lambda *_: None))
  # Inputs of packed rows are not exchanged.
  singles = [x for x in scores[0] if x.metric != held_out.SHUFFLED]
  for single, packed in zip(singles, scores[1], strict=True):
    assert packed.groups == single.groups
    np.testing.assert_allclose(packed.scores, single.scores, rtol=1e-5)
  assert scores[1][0].groups == tuple('abac')


def test_scores_are_the_linearised_ratio():
  weight = [2.0, 3.0]
  ratios = [[[4, 9], weight], [[1, 2], weight], [[0, 1], [1, 1]]]
  result = perplexity.Result(METRICS.names, np.array(ratios))
  loss, accuracy, exact = result.scores('held_out')
  assert loss.value == result.values['loss'] == pytest.approx(13 / 5)
  # 13 / 5 plus the residuals 4 - 2 * 13 / 5 and 9 - 3 * 13 / 5 over 5 / 2.
  assert loss.scores == pytest.approx((2.12, 3.08))
  assert loss.stderr == pytest.approx(0.48)
  assert (accuracy.value, exact.value) == (3 / 5, 1 / 2)
  assert exact.scores == (0.0, 1.0)


def test_a_causal_batch():
  rows = [[_pair([], [4, 5, 6, 1])], [_pair([], [7, 8])]]
  lengths = framing.Lengths(encoder=0, decoder=6)
  evaluator, _ = _evaluator('decoder_only')
  params = _loaded('decoder_only').params
  got = evaluator(params, _batches(2, rows, lengths))
  # The same texts as pairs whose prefix is BOS alone.
  want = evaluator(params, _batches(2, rows))
  assert got.weight == want.weight == 6
  np.testing.assert_allclose(got.values['loss'], want.values['loss'], rtol=2e-6)


@pytest.mark.sharded
def test_a_mesh_gives_the_same():
  evaluator, where = _evaluator('encoder_decoder', devices=4)
  params = _loaded('encoder_decoder').params
  want = _evaluator('encoder_decoder')[0](params, _batches(3))
  sharded = jax.device_put(params, where.shardings(params))
  got = evaluator(sharded, _batches(4))
  np.testing.assert_allclose(got.ratios, want.ratios, rtol=2e-6)


def test_f1_of_counts():
  # Right label by row, given label by column.
  table = np.array([[4, 1, 0], [2, 3, 0], [0, 0, 0]])
  macro, micro = held_out.f1(table)
  # 2 * 4 / (5 + 6), and 2 * 3 / (5 + 4); the third label does not occur.
  assert macro == pytest.approx((8 / 11 + 6 / 9) / 2)
  assert micro == pytest.approx(6 / 9)
  assert held_out.f1(np.diag([3, 0, 0])) == (1.0, 0.0)


def test_nothing_to_evaluate_is_refused():
  evaluator, _ = _evaluator('encoder_decoder')
  params = _loaded('encoder_decoder').params
  with pytest.raises(errors.UserError, match='no target tokens'):
    evaluator(params, [])
  with pytest.raises(errors.UserError, match='no target tokens'):
    evaluator(params, _batches(3, [[], [], []]))
