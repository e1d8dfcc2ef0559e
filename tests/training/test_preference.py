"""Preference losses: TRL's values, dense gradients, microbatches and meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.models import (
  architecture,
  build,
  model_config,
)
from encdec_adapt.training.metrics import comparison_metrics, held_out_metrics
from tests import toy_models
from tests.training import conftest, preference_cases

# Log-probabilities of policy and reference, a row for each answer: chosen and
# rejected of a first example are rows 0 and 2. Lengths are 5, 3, 2 and 4.
POLICY = """
-1.4887698 -2.3046653 -0.2654323 -0.3960915 -0.9222685
-1.9022360 -1.4702802 -2.6893342 -1.3668840 -1.8969188
-1.0466805 -1.2051519 -0.0669773 -0.5065768 -0.8816653
-1.5555654 -2.0930028 -2.4000342 -0.4830884 -0.8468058"""
REFERENCE = """
-2.0448256 -2.7455819 -1.1912997 -2.6224675 -1.2582250
-1.6587212 -2.8582144 -0.1084945 -0.5556931 -1.1202521
-0.9153001 -2.7960012 -0.5277305 -0.8095007 -0.4520393
-0.0951585 -0.6243893 -2.7893970 -2.1693275 -2.2270088"""
LENGTHS = np.array([[5, 2], [3, 4]])


def _sums(text):
  rows = np.array(text.split(), np.float32).reshape(2, 2, 5).swapaxes(0, 1)
  return np.where(np.arange(5) < LENGTHS[..., None], rows, 0).sum(-1)


@pytest.mark.parametrize(
  'kind, value',
  [
    ('dpo', 0.6379921),
    ('ipo', 17.5338821),
    ('ipo:log_probs=mean', 25.5399876),
    ('hinge', 0.8778650),
    ('robust:smoothing=0.1', 0.6227252),
  ],
)
def test_values_are_those_of_trl(kind, value):
  loss = conftest.make_loss(kind)
  sums = [_sums(text) for text in (POLICY, REFERENCE)]
  if loss.log_probs == 'mean':
    sums = [x / LENGTHS for x in sums]
  scores = loss.scores(*map(jnp.asarray, sums))
  losses = loss.margin_loss(scores[:, 0] - scores[:, 1])
  assert float(losses.mean()) == pytest.approx(value, rel=1e-6)


@pytest.fixture(scope='module')
def models():
  """A pair, parameters of policy and reference, and a batch with filler."""
  model = build.build(conftest.PAIR)
  params = [toy_models.params(conftest.PAIR, seed) for seed in (0, 1)]
  return model, params, preference_cases.make_batch(8, filler=2)


@pytest.mark.parametrize('kind', preference_cases.KINDS)
def test_losses_and_gradients_equal_dense_formulas(kind, models):
  model, (params, frozen), batch = models
  batch = jax.tree.map(jnp.asarray, batch)
  loss = conftest.make_loss(kind)
  references = {name: frozen for name in loss.references}
  dense_batch = {name: x[:6] for name, x in batch.items()}

  def actual(params):
    terms = conftest.sums(loss, model, params, batch, references)
    return conftest.value(loss, terms, batch)

  def expected(params):
    log_probs, reference = (
      preference_cases.dense_log_probs(model, x, dense_batch)
      for x in (params, frozen)
    )
    lengths = dense_batch['weights'].sum(-1)
    return preference_cases.dense_loss(kind, log_probs, reference, lengths)

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
@pytest.mark.parametrize('kind', architecture.BY_NAME.values(), ids=str)
def test_a_group_reads_its_prompt_once(kind):
  if not kind.generates:
    return
  config = conftest.PAIR
  if not kind.encodes_prompt:
    stack = dataclasses.replace(conftest.STACK, role=kind.role)
    config = model_config.DecoderOnlyConfig(stack)
  model, params = build.build(config), toy_models.params(config)
  group = jax.tree.map(jnp.asarray, preference_cases.make_batch(4))
  # Each answer in a row of its own, with its prompt.
  rows = {
    name: x.reshape(-1, x.shape[-1])
    if name in preference_cases.AXES
    else jnp.repeat(x, 2, axis=0)
    for name, x in group.items()
  }

  def loss(params, batch):
    hidden = model.architecture.predict(model, params, batch)
    # Weights that differ between the answers of a prompt.
    weights = rows['weights'] * jnp.arange(1, 9)[:, None]
    return jnp.sum(jnp.square(hidden) * weights[..., None])

  run = jax.jit(jax.value_and_grad(loss))
  (value, gradients), (alone, expected) = run(params, group), run(params, rows)
  assert float(value) == pytest.approx(float(alone), rel=1e-5)
  scale = max(float(abs(x).max()) for x in jax.tree.leaves(expected))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale),
    gradients,
    expected,
  )


@pytest.mark.long
def test_training_raises_held_out_accuracy(models):
  model, _, _ = models
  loss, axes, frozen = (
    conftest.make_loss('dpo'),
    preference_cases.AXES,
    {'teacher': model},
  )
  trainer = conftest.Trainer(loss=loss, axes=axes, models=frozen)
  state = trainer.init()
  references = {'teacher': jax.tree.map(jnp.copy, state.params)}
  batch = preference_cases.make_batch(8, filler=1)
  likelihoods = comparison_metrics.Likelihoods(loss)
  evaluator = perplexity.Evaluator(trainer.where, likelihoods, axes, frozen)
  results = [evaluator(state.params, [batch], references)]
  for _ in range(8):
    state, metrics = trainer.step(state, batch, references)
  results.append(evaluator(state.params, [batch], references))
  first, last = (result.values for result in results)
  # The policy is the reference: no answer is preferred, and half count.
  assert first['loss'] == pytest.approx(np.log(2), rel=1e-5)
  assert (first['accuracy'], results[0].weight) == (0.5, 7)
  assert last['accuracy'] > 0.8 and last['loss'] < first['loss']
  rank = functools.partial(held_out_metrics.rank, likelihoods)
  assert rank(last['accuracy']) < rank(first['accuracy'])
  assert set(metrics) >= {'chosen', 'rejected', 'cross_entropy'}


def test_orpo_has_a_gradient_of_answers_that_are_certain():
  loss = conftest.make_loss('orpo')

  def compute(log_probs):
    margin = loss.scores(log_probs, 0.0) - loss.scores(-1.0, 0.0)
    return loss.margin_loss(margin)

  value, gradient = jax.value_and_grad(compute)(jnp.float32(0))
  assert np.isfinite(value) and np.isfinite(gradient)
