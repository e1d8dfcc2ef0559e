"""Reward models: literal values, dense gradients, microbatches and meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import perplexity, preference_scores
from encdec_adapt.models import build, model_config
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.losses import reward
from encdec_adapt.training.metrics import comparison_metrics
from tests import gemma_ids, toy_models
from tests.training import conftest, preference_cases

LOSS = reward.Reward()
MODEL = build.build(model_config.reward_model(conftest.PAIR))
INIT = MODEL.init  # Held, so that it is compiled once.


def _batch(rows, filler=0, seed=0):
  batch = preference_cases.make_batch(rows, filler, seed)
  rng = np.random.default_rng(seed)
  batch['margins'][: rows - filler, 0] = rng.random(rows - filler)
  return batch


def test_the_loss_has_the_values_of_its_formula():
  states = jnp.array([[1.0], [0.2], [-0.3], [0.4], [9.0], [0.0]])[:, None]
  outputs = loss_lib.Outputs(states, jnp.ones((8, 1)), MODEL.config.decoder)
  batch = {
    'weights': jnp.ones((3, 2, 4)).at[2].set(0),
    'margins': jnp.array([[0.5, 0], [0, 0], [0, 0]]),
  }
  terms = LOSS.terms(outputs, {}, batch)
  # -log sigmoid(0.8 - 0.5) and -log sigmoid(-0.7); the third row is filler.
  assert float(terms['loss']) == pytest.approx(0.5543552 + 1.1031861, rel=1e-6)
  assert float(terms['accuracy']) == 1
  assert float(terms['chosen']) == pytest.approx(0.7)


def _dense_rewards(params, tokens, prompts):
  """The head's output at the last of BOS and all targets, row by row."""

  def fields(ids):
    ids = jnp.asarray(ids)[None]
    return ids, jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]

  rewards = []
  for prompt, group in zip(prompts, tokens, strict=True):
    for answer in group:
      rows = {
        'encoder': fields([gemma_ids.BOS, *prompt]),
        'decoder': fields([gemma_ids.BOS, *answer]),
      }
      hidden = MODEL.architecture.states(MODEL, params, rows)
      rewards.append(hidden[0, -1] @ params['decoder']['head']['table'][0])
  return jnp.stack(rewards).reshape(-1, 2)


@pytest.mark.long
def test_gradients_equal_those_of_rows_of_each_answer():
  params = toy_models.params(MODEL.config)
  batch = _batch(3, filler=1)
  counts = batch['weights'].sum(-1).astype(int)[:2]
  answers = [
    [row[:n] for row, n in zip(*group, strict=True)]
    for group in zip(batch['targets'][:2], counts, strict=True)
  ]
  sizes = (batch['encoder_segments'] > 0).sum(1)
  prompts = [batch['encoder_tokens'][i, 1 : sizes[i]] for i in range(2)]

  arrays = jax.tree.map(jnp.asarray, batch)

  def actual(params):
    terms = conftest.sums(LOSS, MODEL, params, arrays)
    return conftest.value(LOSS, terms, arrays)

  def expected(params):
    rewards = _dense_rewards(params, answers, prompts)
    margins = rewards[:, 0] - rewards[:, 1] - batch['margins'][:2, 0]
    return jnp.mean(jnp.log1p(jnp.exp(-margins)))

  (value, gradients), (dense, dense_gradients) = (
    jax.jit(jax.value_and_grad(f))(params) for f in (actual, expected)
  )
  assert float(value) == pytest.approx(float(dense), rel=1e-5)
  scale = max(float(abs(x).max()) for x in jax.tree.leaves(dense_gradients))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale),
    gradients,
    dense_gradients,
  )


@pytest.mark.long
def test_training_raises_held_out_accuracy():
  trainer = conftest.Trainer(loss=LOSS, model=MODEL, axes=preference_cases.AXES)
  state = trainer.init(trainer.where.place(INIT, jax.random.key(0)))
  batch = _batch(8, filler=1)
  evaluator = perplexity.Evaluator(
    trainer.where, comparison_metrics.Comparisons(LOSS), preference_cases.AXES
  )
  first = evaluator(state.params, [batch]).values
  for _ in range(12):
    state, _ = trainer.step(state, batch)
  result = evaluator(state.params, [batch])
  last = result.values
  assert last['accuracy'] > 0.8 and last['loss'] < first['loss']
  assert last['brier'] < first['brier'] and result.weight == 7
  lengths = batch['weights'].sum(-1)[:7]
  difference = (lengths[:, 0] - lengths[:, 1]).mean()
  assert last['length_difference'] == pytest.approx(difference, rel=1e-5)
  scores = preference_scores.scores('held_out', result)
  sizes = [x.n for x in scores if x.metric.startswith('accuracy_chosen')]
  assert sum(sizes) == 7


def test_calibration_and_lengths_of_literal_margins():
  margins = np.array([0.1, -0.1, 1.0, 3.0, -3.0])
  rows = {
    'accuracy': margins > 0,
    'margin': margins,
    'length_difference': np.array([-2, 0, 3, 1, -1]),
  }
  ratios = np.stack([[x, np.ones(5)] for x in rows.values()])
  result = perplexity.Result(tuple(rows), ratios.astype(float))
  every = preference_scores.scores('t', result)
  scores = {x.metric: (x.value, x.n) for x in every}
  assert scores['accuracy_chosen_shorter'] == (0.5, 2)
  assert scores['accuracy_chosen_equal'] == (0, 1)
  assert scores['accuracy_chosen_longer'] == (1, 2)
  # sigmoid(0.1), sigmoid(1) and sigmoid(3).
  assert scores['accuracy_at_0.5'] == (0.5, 2)
  assert scores['confidence_at_0.5'] == (pytest.approx(0.5249792), 2)
  assert scores['confidence_at_0.7'] == (pytest.approx(0.7310586), 1)
  assert scores['accuracy_at_0.9'] == (0.5, 2)
  assert 'accuracy_at_0.6' not in scores
  curve = preference_scores.curves({'m': every})['t']['m']
  assert [x[:2] for x in curve] == [
    (pytest.approx(sigmoid), right)
    for sigmoid, right in ((0.5249792, 0.5), (0.7310586, 1), (0.9525741, 0.5))
  ]
  plain = dataclasses.replace(result, metrics=('loss', 'accuracy', 'other'))
  assert not preference_scores.scores('t', plain)


def _config(**changes):
  config = config_lib.defaults()
  config.loss.kind = 'reward'
  config.data.objective = 'preferences'
  config.data.source = 'preferences:x#p,c,r'
  config.data.encoder_length = config.data.decoder_length = 8
  for key, value in changes.items():
    config.update_from_flattened_dict({key.replace('__', '.'): value})
  return config


def test_the_loss_decides_the_head_of_the_model():
  settings = config_lib.load(_config(), sources=False)
  assert settings.model.decoder.outputs == 1
  assert settings.model.decoder.final_softcap is None
  assert not settings.model.architecture.generates
  # A saved run states it.
  stated = config_lib.with_implied(_config(), settings.model)
  assert stated.model.head.kind == 'reward'
  assert config_lib.load(stated, sources=False).model == settings.model
  for changes, message in (
    ({'model__kind': 'encoder_only'}, 'feeds models of kind decoder_only'),
    (
      {'data__objective': 'pairs', 'data__source': 'pairs:x#a,b'},
      'rows are not preferences',
    ),
    ({'evaluation__samples': 50.0}, 'answers nothing'),
    (
      {'model__kind': 'encoder_decoder', 'init__mode': 'adapt'},
      'make the pair first',
    ),
  ):
    with pytest.raises(errors.UserError, match=message):
      config_lib.load(_config(**changes), sources=False)
