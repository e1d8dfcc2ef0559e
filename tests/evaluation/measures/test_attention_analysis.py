"""Attention analysis against dense softmax, and against zeroed kernels."""

import dataclasses
import functools
import types

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation.measures import (
  attention_analysis,
  attention_scores,
)
from encdec_adapt.evaluation.results import contrasts
from encdec_adapt.generation import model_in_memory
from encdec_adapt.lab import report_figures
from encdec_adapt.models import build, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import activations, masks
from encdec_adapt.tokenizers import vocabulary_pair
from tests import gemma_ids, tiny, toy_models

STACK = toy_models.stack(
  layers=3, pattern=('local', 'global'), attention_softcap=5.0
)
CONFIGS = toy_models.pair_and_decoder(STACK)
CONFIGS['merged'] = model_config.encoder_decoder(
  STACK, STACK, cross_merged=True
)
LENGTHS = framing.Lengths(encoder=12, decoder=8)
ROWS = [(11, 8), (5, 3), (8, 6)]
MASK = 3


def _model(kind):
  model = build.build(CONFIGS[kind])
  params = toy_models.params(CONFIGS[kind], seed=2, scale=0.3)
  return build.unroll(model), build.unroll_params(model, params)


def _batch(kind):
  rng = np.random.default_rng(0)
  rows = []
  for sizes in ROWS:
    inputs, targets = (rng.integers(4, 60, n).astype(np.int32) for n in sizes)
    pair = framing.Pair(inputs, targets)
    rows.append(
      framing.frame_row([pair], LENGTHS, gemma_ids.FRAMING, teacher=True)
    )
  batch = framing.stack_rows(rows) | {'row': np.arange(len(ROWS))}
  found = attention_analysis.annotate(
    CONFIGS[kind], batch, MASK, gemma_ids.FRAMING.encoder
  )
  return jax.tree.map(jnp.asarray, found)


def _dense(model, q, k, mask):
  """Softmax over all scores, [B, N, T, S]."""
  cfg = model.config.decoder
  k = jnp.repeat(k, cfg.heads // cfg.kv_heads, axis=2)
  scores = jnp.einsum('BTNH,BSNH->BNTS', q, k) * cfg.query_scale**-0.5
  scores = activations.softcap(scores, cfg.attention_softcap)
  visible = masks.dense_mask(mask)[:, None]
  shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
  return jnp.where(visible.any(-1, keepdims=True), shares, 0)


@pytest.mark.long
@pytest.mark.parametrize('kind', CONFIGS)
def test_received_attention_is_the_dense_softmax(kind):
  model, params = _model(kind)
  batch = _batch(kind)
  expected, seen = [], []

  def visit(layer, q, k, mask, bias):
    seen.append(layer)
    shares = _dense(model, q, k, mask)
    by_key = jnp.einsum('BNTS,BT->BNS', shares, batch['queries'])
    expected.append(by_key[..., k.shape[1] - batch['parts'].shape[1] :])
    for chunk in (3, 4, 64):
      found = attention_scores.received(
        q,
        k,
        mask,
        batch['queries'],
        scale=model.config.decoder.query_scale**-0.5,
        softcap=model.config.decoder.attention_softcap,
        chunk=chunk,
      )
      np.testing.assert_allclose(found.by_key, by_key, atol=1e-5)
      nats = -jax.scipy.special.xlogy(shares, shares).sum(-1)
      entropy = jnp.einsum('BNT,BT->BN', nats, batch['queries'])
      np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)

  with attention_analysis.intercept(model, visit):
    model.architecture.predict(model, params, batch)
  numbers = attention_analysis.layer_numbers(model)
  assert seen == list(numbers.values()) == [0, 1, 2]
  found = attention_analysis.measure(model, params, batch, chunk=4)
  mean = np.mean([x.mean(1) for x in expected], axis=0)
  np.testing.assert_allclose(found['received'], mean, atol=1e-5)
  shares = np.asarray(found['shares'])
  np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
  np.testing.assert_array_equal(shares[..., 0], 0)  # Padding.
  assert (shares[..., -1] > 0).any() == (kind != 'encoder_decoder')


def test_an_ablated_layer_is_one_whose_output_kernel_is_zero():
  model, params = _model('encoder_decoder')
  batch = _batch('encoder_decoder')
  losses = jax.jit(attention_analysis.ablated_loss, static_argnums=0)
  whole = losses(model, params, batch, -1)
  for path, layer in attention_analysis.layer_numbers(model).items():
    flat = traverse_util.flatten_dict(params, sep='/')
    name = f'decoder/{path}/cross_attention/output'
    zeroed = flat | {name: jnp.zeros_like(flat[name])}
    zeroed = traverse_util.unflatten_dict(zeroed, sep='/')
    expected = losses(model, zeroed, batch, -1)
    found = losses(model, params, batch, layer)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not np.allclose(found, whole, rtol=1e-4)


@pytest.mark.long
def test_an_ablated_merged_layer_does_not_depend_on_the_inputs():
  model, params = _model('merged')
  one = dataclasses.replace(
    model,
    config=dataclasses.replace(
      model.config,
      decoder=dataclasses.replace(
        model.config.decoder, layers=1, pattern=('local', 'local')
      ),
    ),
  )
  batch = _batch('merged')
  other = batch | {'encoder_tokens': batch['noised']}
  found = [
    attention_analysis.ablated_loss(one, params, x, 0) for x in (batch, other)
  ]
  np.testing.assert_allclose(*found, rtol=1e-6)
  found = [
    attention_analysis.ablated_loss(one, params, x, -1) for x in (batch, other)
  ]
  assert not np.allclose(*found, rtol=1e-5)


@pytest.mark.parametrize('kind', CONFIGS)
def test_inputs_are_annotated(kind):
  batch = _batch(kind)
  batch = {name: np.asarray(x) for name, x in batch.items()}
  parts, masked = batch['parts'], batch['masked'] > 0
  # BOS, then five tokens: two, one, one and one of them in the quarters.
  own = [6] * 3 if kind == 'decoder_only' else []
  literal = [1, 2, 2, 3, 4, 5, *own]
  np.testing.assert_array_equal(parts[1][: len(literal)], literal)
  assert not parts[1][len(literal) :].any()
  # 15 % of 11, 5 and 8 tokens, at least one, and only of inputs.
  np.testing.assert_array_equal(masked.sum(1), [1, 1, 1])
  assert set(parts[masked]) <= {2, 3, 4, 5}
  assert (batch['noised'][masked] == MASK).all()
  np.testing.assert_allclose(batch['queries'].sum(1), 1, rtol=1e-6)
  assert (batch['queries'] > 0).sum(1).tolist() == [n for _, n in ROWS]


def test_measures_are_literal():
  plain = np.array([[4.0, 2.0, 1.0, 3.0], [8.0, 4.0, 2.0, 6.0]])
  noised = np.array([[4.0, 0.5, 1.0, 4.0]] * 2)
  masked = np.array([[False, True, False, True]] * 2)
  kept = np.array([[True, False, True, False]] * 2)
  found = {
    score.metric: score
    for score in attention_analysis.meap_scores(plain, noised, masked, kept)
  }
  # Means at masked positions: 2.5 and 5 before, 2.25 and 2.25 after.
  decay = found['score_decay']
  assert decay.value == pytest.approx(3 / 7.5)
  # Two models have other attention, and are compared row by row.
  other, *_ = attention_analysis.meap_scores(2 * noised, noised, masked, kept)
  differences, weights = contrasts.sums([[decay], [other]])
  assert differences.sum() / weights.sum() == pytest.approx(
    other.value - decay.value
  )
  # Variances of (4, 1) and (8, 2) before, of (4, 1) twice after.
  increase = found['variance_increase']
  assert increase.scores == pytest.approx((0, 2.25 - 9))
  assert increase.value == pytest.approx(-6.75 / 2)
  # One degree of freedom: the p-value of t is 1 - 2 atan(|t|) / pi, t = -1.
  assert found['variance_increase_p'].value == pytest.approx(0.5)


def test_rows_without_two_tokens_of_inputs_do_not_count():
  def rows(parts, masked):
    shape = len(parts), len(parts[0])
    return {
      'row': np.arange(len(parts)),
      'weights': np.ones(shape),
      'parts': np.array(parts),
      'masked': np.array(masked),
      'received': np.full(shape, 0.25),
      'noised': np.full(shape, 0.5),
      'shares': np.ones((*shape[:1], 1, 1, len(attention_analysis.PARTS))),
      'entropy': np.ones((*shape[:1], 1, 1)),
    }

  one, two = ([1, 2, 0], [0, 1, 0]), ([1, 2, 4], [0, 1, 0])
  summarize = functools.partial(
    attention_analysis._summarize,
    [0],
    groups_of=lambda numbers: [f'group {i}' for i in numbers],
  )
  found = summarize(rows(*zip(one, two, strict=True)))
  assert {score.n for score in found} == {1}
  assert {x.groups for x in found if x.scores} == {('group 1',)}
  assert np.isfinite([score.value for score in found]).all()
  with pytest.raises(errors.UserError, match='none of 1 rows has two tokens'):
    summarize(rows([one[0]], [one[1]]))


def test_scores_of_a_long_row_need_no_whole_matrix():
  length, chunk, shape = 4096, 64, jax.ShapeDtypeStruct
  q = shape((1, length, 4, 8), jnp.float32)
  k = shape((1, length, 2, 8), jnp.float32)
  ids = shape((1, length), jnp.int32)

  def run(q, k, ids, weights):
    spec = masks.causal(ids, ids)
    return attention_scores.received(
      q, k, spec, weights, scale=1.0, softcap=None, chunk=chunk
    )

  weights = shape((1, length), jnp.float32)
  compiled = jax.jit(run).lower(q, k, ids, weights).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < 8 * 4 * 4 * chunk * length  # Not 4 * 4 * length**2.


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('records')
  tiny.make_records(folder, rows=16)
  return folder


@pytest.mark.long
@pytest.mark.parametrize(
  'kind, objective',
  [(kind, 'prefix_lm') for kind in CONFIGS] + [('decoder_only', 'causal_lm')],
)
def test_scores_of_records(kind, objective, folder):
  stack = dataclasses.replace(STACK, vocab_size=tiny.VOCAB)
  config = toy_models.pair_and_decoder(stack).get(
    kind
  ) or model_config.encoder_decoder(stack, stack, cross_merged=True)
  choice = vocabulary_pair.Choice(str(folder / 'vocabulary.model'))
  loaded = toy_models.load(config, scale=0.3)
  stored = types.SimpleNamespace(
    prompt_side=config.architecture.prompt_stack,
    require_vocabularies=choice.open,
  )
  loaded = model_in_memory.LoadedModel(loaded.model, loaded.params, stored)
  record_set = record_sets.RecordSet.open(folder / objective / 'eval')
  found = [
    attention_analysis.AttentionEvaluation(record_set, 5).scores(
      loaded, batch_size, lambda done, total: None
    )
    for batch_size in (2, 8)
  ]
  values = {score.metric: score for score in found[0]}
  # Rows do not depend on the batch they are in, nor on how many are filled.
  for score in found[1]:
    assert score.value == pytest.approx(values[score.metric].value, abs=1e-4)
    assert score.n == 5
    assert len(score.groups) == len(score.scores)
  shares = [x.value for name, x in values.items() if name.startswith('share/')]
  assert sum(shares) == pytest.approx(1, abs=1e-5)
  is_pair = kind != 'decoder_only'
  assert ('layer_02/ablation' in values) == is_pair
  drawn = attention_analysis.figures({'one': found[0], 'other': []})
  assert np.shape(drawn['one']['inputs']) == (3, 4)
  assert len(drawn['one']['ablation']) == 3 * is_pair
  report_figures.draw_attention(drawn, path=folder / f'{kind}.png')
