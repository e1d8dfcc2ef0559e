"""Policy losses: TRL's values, dense gradients, masks, microbatches, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, row_fields
from encdec_adapt.training.losses import policy
from encdec_adapt.training.recipes import policy_recipe
from encdec_adapt.training.sections import rollout_options
from tests import gemma_ids, toy_models
from tests.training import conftest
from tests.training.test_preference import POLICY, REFERENCE

# Log-probabilities of the policy that has sampled, beside those of
# `test_preference`, with the lengths of the rows.
OLD = """
-1.4240108 -2.0819008 -0.4342487 -0.4739797 -1.1005654
-2.3648188 -1.6224805 -2.5120242 -1.1961095 -2.1729102
-1.3799253 -1.5921142 0.3817972 -0.4484257 -1.0153190
-1.9531479 -1.6042050 -2.2351110 -0.3391381 -0.6969013"""
WEIGHTS = np.float32(np.arange(5) < np.array([[5], [3], [2], [4]]))
ADVANTAGES = np.float32([1, -1, 0.5, -0.5])


def _tokens(old=OLD, importance=1.0):
  """The tokens of four completions, as groups of two."""
  policy_, reference, old, weights = (
    jnp.asarray(np.array(x, np.float32).reshape(2, 2, 5))
    for x in (POLICY.split(), REFERENCE.split(), old.split(), WEIGHTS)
  )
  ones = jnp.full_like(weights, importance)
  return policy.Tokens(policy_, old, reference, ones, weights, ones)


def _value(kind, tokens):
  loss = conftest.make_loss(kind)
  advantages = jnp.asarray(ADVANTAGES.reshape(2, 2))
  losses = loss.completion_loss(advantages, tokens)
  # Completions of at most 8 tokens.
  weights = jnp.pad(tokens.weights, [(0, 0), (0, 0), (0, 3)])
  return float(losses.sum() / loss.divisors({'weights': weights})['mean'])


@pytest.mark.parametrize(
  'kind, value',
  [
    ('rloo', 0.0503531),
    ('grpo', 0.0143556),
    ('grpo:beta=0.04,kl=k3_ratio', 0.0657128),
    ('grpo:divisor=token', -0.0576101),
    ('grpo:divisor=token,beta=0.04,kl=k3_ratio', -0.0095454),
    ('grpo:divisor=constant', -0.0252044),
    ('grpo:divisor=constant,beta=0.04,kl=k3_ratio', -0.0041761),
  ],
)
def test_values_are_those_of_trl(kind, value):
  # The old log-probabilities differ, so that some ratios are clipped.
  assert _value(kind, _tokens()) == pytest.approx(value, abs=2e-7)


def test_importance_weighs_tokens():
  half = _tokens(importance=0.5)
  assert _value('grpo', half) == pytest.approx(0.0143556 / 2, abs=2e-7)
  # Of whole completions, the gradient is that of weighted log-probabilities
  # where the ratio is 1.
  equal = half._replace(old=half.log_probs)
  gradients = [
    jax.grad(
      lambda x, t: (
        conftest.make_loss('rloo')
        .completion_loss(jnp.ones((2, 2)), t._replace(log_probs=x))
        .sum()
      )
    )(tokens.log_probs, tokens)
    for tokens in (equal, equal._replace(importance=2 * equal.importance))
  ]
  np.testing.assert_allclose(gradients[0], -0.5 * half.weights)
  np.testing.assert_allclose(gradients[1], -half.weights)


def test_advantages():
  rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
  kl = jnp.array([[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
  # Minus the mean of the others; the KL costs 0.05 each.
  expected = [[0.9 - 1 / 3, -1.9 / 3, -1.9 / 3, 1 - 0.9 / 3], [0.0] * 4]
  np.testing.assert_allclose(
    conftest.make_loss('rloo').advantages(rewards, kl), expected, atol=1e-6
  )
  deviation = np.std([1, 0, 0, 1], ddof=1) + 1e-4
  centred = np.array([[0.5, -0.5, -0.5, 0.5], [0.0] * 4])
  np.testing.assert_allclose(
    conftest.make_loss('grpo').advantages(rewards, kl),
    centred / deviation,
    atol=1e-6,
  )
  loss = conftest.make_loss('grpo:deviation=none')
  plain = loss.advantages(rewards, kl)
  np.testing.assert_allclose(plain, centred, atol=1e-6)


# -- On a model ----------------------------------------------------------------

TOKENS = 6
KINDS = (
  'rloo:beta=0.1',
  'rloo:beta=0',
  'grpo:beta=0.1',
  'grpo:beta=0.1,kl=k3_ratio,deviation=none,divisor=constant',
  'grpo:divisor=token',
)


ROWS = policy_recipe.CompletionRows(
  row_fields.PAIRS,
  dataclasses.replace(conftest.LENGTHS, decoder=TOKENS),
  3,
  TOKENS,
  policy_recipe.AXES,
)


def _loss(kind):
  return conftest.make_loss(kind, temperature=0.7)


def _batch(rows, filler=0, seed=0, cut=()):
  """Groups of three completions of 1 to 6 tokens; those in `cut` weigh 0."""
  rng = np.random.default_rng(seed)

  def tokens(least, most):
    count = rng.integers(least, most + 1)
    return rng.integers(5, conftest.VOCAB, count, dtype=np.int32)

  groups = []
  for row in range(rows - filler):
    prompt, group = tokens(1, 8), []
    for sample in range(3):
      completion = tokens(1, TOKENS)
      weights = np.full(len(completion), (row, sample) not in cut, np.float32)
      group.append([framing.Pair(prompt, completion, weights=weights)])
    groups.append(group)
  groups += [[[], [], []]] * filler
  batch = ROWS.of_groups(groups, gemma_ids.FRAMING, teacher=True)
  batch['rewards'] = rng.random((rows, 3), np.float32)
  batch['rewards'][rows - filler :] = 0
  # The sampler is a little off.
  batch['sampler_log_probs'] = -4 + rng.random(
    batch['weights'].shape, np.float32
  )
  return batch


def _dense(kind, params, frozen, batch):
  """The loss, written out from materialised logits."""
  model, (name, _, options) = conftest.MODEL, kind.partition(':')
  options = dict(x.split('=') for x in options.split(',') if x)
  beta, weights = float(options.get('beta', 0)), batch['weights']
  targets = batch['targets'].reshape(-1, TOKENS)

  def log_probs(params):
    hidden = model.architecture.predict(model, params, batch)
    logits = model.logits(params, hidden) / 0.7
    values = jnp.take_along_axis(
      jax.nn.log_softmax(logits), targets[..., None], -1
    )
    return values.reshape(weights.shape)

  log_pi, log_ref = log_probs(params), log_probs(frozen)
  rewards, count = batch['rewards'], (weights.max(-1) > 0).sum()
  stop = jax.lax.stop_gradient
  if name == 'rloo':
    r = rewards - beta * stop(((log_pi - log_ref) * weights).sum(-1))
    advantages = r - (r.sum(-1, keepdims=True) - r) / 2
    # The gradient of the ratio is that of the sum of log-probabilities.
    score = (log_pi * weights).sum(-1)
    return (
      -(advantages * (score - stop(score) + 1) * (weights.max(-1) > 0)).sum()
      / count
    )
  advantages = rewards - rewards.mean(-1, keepdims=True)
  if options.get('deviation') != 'none':
    advantages /= rewards.std(-1, ddof=1, keepdims=True) + 1e-4
  ratio = jnp.exp(log_pi - stop(log_pi))
  d = log_ref - log_pi
  k3 = (jnp.exp(d) - d - 1) * (ratio if 'kl' in options else 1)
  values = (-ratio * advantages[..., None] + beta * k3) * weights
  divisor = options.get('divisor')
  if divisor == 'token':
    return values.sum() / weights.sum()
  if divisor == 'constant':
    return values.sum() / (count * TOKENS)
  return (values.sum(-1) / jnp.maximum(weights.sum(-1), 1)).sum() / count


@pytest.fixture(scope='module')
def params():
  return [toy_models.params(conftest.PAIR, seed) for seed in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_losses_and_gradients_equal_dense_formulas(kind, params):
  policy_params, frozen = params
  loss = _loss(kind)
  batch = jax.tree.map(jnp.asarray, _batch(4, filler=1, cut={(0, 1), (2, 0)}))
  references = {name: frozen for name in loss.references}

  def actual(params):
    terms = conftest.sums(loss, conftest.MODEL, params, batch, references)
    return conftest.value(loss, terms, batch)

  value, gradients = jax.jit(jax.value_and_grad(actual))(policy_params)
  # Without the filler: a group of equal rewards has no deviation.
  dense_batch = {name: x[:3] for name, x in batch.items()}
  dense, expected = jax.jit(
    jax.value_and_grad(lambda p: _dense(kind, p, frozen, dense_batch))
  )(policy_params)
  assert float(value) == pytest.approx(float(dense), rel=1e-4, abs=1e-6)
  scale = max(float(abs(x).max()) for x in jax.tree.leaves(expected))
  assert scale > 1e-3
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale),
    gradients,
    expected,
  )


# -- Keys ----------------------------------------------------------------------


@pytest.mark.parametrize(
  'rollouts, objective, message',
  [
    ({'samples': 1}, 'pairs', 'samples is 1 with .*at least 2'),
    ({'top_k': 20}, 'pairs', 'top_k and top_p are not read'),
    ({}, 'preferences', 'no prompt with a single answer'),
    ({}, 'causal_lm', 'no prompt with a single answer'),
    ({}, 'pairs:meap=separate', 'without masks'),
  ],
)
def test_what_does_not_suit_policies_is_refused(rollouts, objective, message):
  config = config_lib.defaults()
  config.loss.kind = 'rloo'
  config.train.rollouts.update(rollouts)
  config.data.objective, config.data.source = objective, ''
  config.data.decoder_length = 8
  config.data.encoder_length = 8 * (objective != 'causal_lm')
  with pytest.raises(errors.UserError, match=message):
    config_lib.load(config, sources=False)


@pytest.mark.parametrize(
  'rollouts, message',
  [
    ({'temperature': 0.0}, 'temperature is 0.0; it must be above 0'),
    ({'cut': 'drop'}, "cut is 'drop'; it must be one of keep, mask, penalty"),
    ({'cut': 'penalty'}, 'cut_penalty 0.0; set both'),
    ({'cut_penalty': 0.5}, "cut is 'keep' and .*cut_penalty 0.5; set both"),
  ],
)
def test_wrong_options_of_sampling_are_refused(rollouts, message):
  with pytest.raises(errors.UserError, match=message):
    rollout_options.Rollouts(**rollouts)


def test_a_reference_is_read_where_it_is_needed():
  assert _loss('rloo').references == ('teacher',)
  assert not _loss('rloo:beta=0').references
  assert not _loss('grpo').references
  loss = conftest.make_loss('grpo', measures_kl=True)
  assert loss.references == ('teacher',)
