"""Losses and gradients against TRL's on the same logits, and trajectories.

TRL's methods run on trainers without a model, which are given its outputs.
Masked completions are left out: TRL counts them in divisors, and we do not.
"""

import collections
import dataclasses
import types

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.models import build, execution
from encdec_adapt.objectives import framing, preferences
from encdec_adapt.training import train_section
from encdec_adapt.training.losses import (
  distillation,
  policy,
  preference,
  reward,
)
from encdec_adapt.training.losses import loss as loss_lib
from tests import gemma_ids, toy_models

_REASON = 'equality with TRL needs pip install -e .[peer]'
torch = pytest.importorskip('torch', reason=_REASON)
pytest.importorskip('trl', reason=_REASON)

import trl  # noqa: E402
from trl.experimental import cpo, gkd, orpo  # noqa: E402

from tests.parity import trl_trainers  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.slow]

P, T, V = 3, 5, 11
STACK = toy_models.stack(vocab_size=V, final_softcap=None)
_RNG = np.random.default_rng(0)
# Of policy, reference and the policy that has sampled, two answers a prompt.
LOGITS, REFERENCE = 2 * _RNG.normal(size=(2, P, 2, T, V)).astype(np.float32)
OLD = LOGITS + 0.3 * _RNG.normal(size=LOGITS.shape).astype(np.float32)
TARGETS = _RNG.integers(0, V, (P, 2, T), np.int32)
COUNTS = np.array([[5, 2], [3, 4], [1, 5]])
WEIGHTS = (np.arange(T) < COUNTS[..., None]).astype(np.float32)
ADVANTAGES = np.array([[1, -1], [0.5, -0.5], [-0.7, 0.7]], np.float32)
IMPORTANCE = _RNG.uniform(0.3, 2, TARGETS.shape).astype(np.float32)


# -- Theirs --------------------------------------------------------------------


def _split(x):
  """Chosen answers, then rejected ones, as TRL has them."""
  x = torch.as_tensor(x)
  return torch.cat([x[:, 0], x[:, 1]])


def _their_log_probs(logits):
  log_probs = torch.log_softmax(torch.as_tensor(logits), -1)
  ids = torch.tensor(TARGETS).long()[..., None]
  return log_probs.gather(-1, ids)[..., 0] * torch.tensor(WEIGHTS)


def _trainer(kind, **fields):
  """A trainer of one process, with fields in place of what it would make."""
  trainer = kind.__new__(kind)

  def same(x, **_):
    return x

  vars(trainer).update(
    accelerator=types.SimpleNamespace(
      device='cpu',
      gather=same,
      gather_for_metrics=same,
      reduce=same,
      num_processes=1,
    ),
    model=types.SimpleNamespace(training=True),
    _metrics={'train': collections.defaultdict(list)},
    _total_train_tokens=0,
    _tp_size=1,
    aux_loss_enabled=False,
    **fields,
  )
  return trainer


def _dpo(logits, types_, beta=0.1, smoothing=0.0):
  """Losses of `DPOTrainer`, by name with their weights."""
  mask = torch.nn.functional.pad(_split(WEIGHTS), (1, 0)).long()
  ids = torch.nn.functional.pad(_split(TARGETS), (1, 0)).long()
  zeros = torch.zeros(2 * P, T)
  outputs = types.SimpleNamespace(
    log_probs=_split(_their_log_probs(logits)),
    entropy=zeros,
    mean_logits=zeros,
    is_top1=zeros.bool(),
  )
  trainer = _trainer(
    trl.DPOTrainer,
    beta=beta,
    label_smoothing=smoothing,
    loss_types=list(types_),
    loss_weights=list(types_.values()),
    f_divergence_type='reverse_kl',
    precompute_ref_logps=True,
    ld_alpha=None,
    use_weighting=False,
  )
  reference = _their_log_probs(REFERENCE).sum(-1)
  inputs = {
    'input_ids': ids,
    'attention_mask': torch.ones_like(ids),
    'completion_mask': mask,
    'ref_chosen_logps': reference[:, 0],
    'ref_rejected_logps': reference[:, 1],
  }
  return trainer._compute_loss(lambda **_: outputs, inputs, False)


def _without_reference(logits, kind, **fields):
  """The loss of a trainer of encoder-decoders that reads no reference."""
  labels = np.where(WEIGHTS > 0, TARGETS, -100)
  prompt = torch.ones(P, 1, dtype=torch.long)
  trainer = _trainer(
    kind,
    is_encoder_decoder=True,
    padding_value=0,
    pad_token_id=0,
    decoder_start_token_id=0,
    **fields,
  )
  batch = {
    'prompt_input_ids': prompt,
    'prompt_attention_mask': prompt,
    'chosen_labels': torch.tensor(labels[:, 0]).long(),
    'rejected_labels': torch.tensor(labels[:, 1]).long(),
  }
  outputs = types.SimpleNamespace(logits=_split(logits))
  return trainer.get_batch_loss_metrics(lambda *_, **__: outputs, batch)[0]


def _cpo(logits, share=0.0, **fields):
  fields |= dict(loss_type='simpo', alpha=0.0, label_smoothing=0.0)
  return _without_reference(logits, cpo.CPOTrainer, cpo_alpha=share, **fields)


def _cpo_of_ratios(logits, loss_type, beta, smoothing=0.0):
  """The formulas of `CPOTrainer`, which has no reference, on log-ratios."""
  trainer = _trainer(
    cpo.CPOTrainer,
    alpha=0.0,
    beta=beta,
    loss_type=loss_type,
    label_smoothing=smoothing,
  )
  ratios = _their_log_probs(logits) - _their_log_probs(REFERENCE)
  return trainer.cpo_loss(*ratios.sum(-1).T)[0].mean()


def _policy(kind, logits, **fields):
  """The loss of `GRPOTrainer` or `RLOOTrainer` with old log-probabilities."""
  log_probs = _their_log_probs(logits).reshape(2 * P, T)
  old, reference = (
    _their_log_probs(x).reshape(2 * P, T) for x in (OLD, REFERENCE)
  )
  mask = torch.tensor(WEIGHTS).reshape(2 * P, T)
  args = types.SimpleNamespace(
    delta=None,
    steps_per_generation=1,
    use_bias_correction_kl=fields.pop('ratio', True),
  )
  trainer = _trainer(
    kind,
    **dict(beta=0.0, use_vllm=False) | fields,
    args=args,
    epsilon_low=0.2,
    epsilon_high=0.2,
    vllm_importance_sampling_correction=True,
    max_completion_length=T,
    importance_sampling_level='token',
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    current_gradient_accumulation_steps=1,
    _entropy_bonus_enabled=False,
    _get_per_token_logps_and_entropies=lambda *_, **__: (
      log_probs,
      torch.zeros_like(log_probs),
      None,
    ),
  )
  inputs = {
    'prompt_ids': mask[:, :1],
    'prompt_mask': mask[:, :1],
    'completion_ids': mask,
    'completion_mask': mask,
    'advantages': torch.tensor(ADVANTAGES).reshape(-1),
    'old_per_token_logps': old,
    'old_logps': old.sum(-1),
    'ref_per_token_logps': reference,
    'importance_sampling_ratio': torch.tensor(IMPORTANCE).reshape(2 * P, T),
    'num_items_in_batch': mask.sum(),
  }
  return trainer._compute_loss(None, inputs)


def _grpo(logits, loss_type, **fields):
  return _policy(trl.GRPOTrainer, logits, loss_type=loss_type, **fields)


def _rloo(logits):
  return _policy(trl.RLOOTrainer, logits)


def _gkd(logits, beta, temperature=1.0):
  labels = np.where(WEIGHTS > 0, TARGETS, -100)
  return gkd.GKDTrainer.generalized_jsd_loss(
    *(torch.as_tensor(x).reshape(2 * P, T, V) for x in (logits, REFERENCE)),
    labels=torch.tensor(labels).reshape(2 * P, T),
    beta=beta,
    temperature=temperature,
  )


# -- Ours ----------------------------------------------------------------------


def _outputs(logits):
  """Outputs of a model whose states are logits."""
  states = jnp.asarray(logits).reshape(2 * P, T, V)
  return loss_lib.Outputs(states, jnp.eye(V), STACK)


def _preference(kind, logits):
  loss = preference.Preference(kind=kind)
  references = {name: _outputs(REFERENCE) for name in loss.references}
  batch = {'targets': jnp.array(TARGETS), 'weights': jnp.array(WEIGHTS)}
  terms = loss.terms(_outputs(logits), references, batch)
  return loss.objective(terms, loss.divisors(batch))


def _our_policy(kind, logits):
  """The loss of given old log-probabilities and advantages."""
  loss = policy.Policy(kind=kind)
  form = loss.form
  log_probs, old, reference = (
    jnp.take_along_axis(
      jax.nn.log_softmax(x), jnp.array(TARGETS)[..., None], -1
    )[..., 0]
    for x in (logits, OLD, REFERENCE)
  )
  importance = IMPORTANCE if form.truncate else np.ones_like(IMPORTANCE)
  tokens = policy.Tokens(
    log_probs, old, reference, jnp.array(importance), jnp.array(WEIGHTS)
  )
  losses = form.loss(jnp.array(ADVANTAGES), tokens)
  return losses.sum() / loss.weight({'weights': tokens.weights})


def _distillation(kind, logits, temperature=1.0):
  """The divergence, whose gradient is that of the loss."""
  loss = distillation.Distillation(kind=kind, temperature=temperature)
  batch = {
    'targets': jnp.array(TARGETS.reshape(2 * P, T)),
    'weights': jnp.array(WEIGHTS.reshape(2 * P, T)),
  }
  references = {'teacher': _outputs(REFERENCE)}
  terms = loss.terms(_outputs(logits), references, batch)
  # The loss is multiplied by the square, and of forward KL it lacks the entropy
  # of the teacher.
  objective = loss.objective(terms, loss.divisors(batch)) / temperature**2
  value = terms['distillation'] / WEIGHTS.sum()
  return jax.lax.stop_gradient(value - objective) + objective


# Name in `kind`, options of the key `temperature`, and TRL's loss.
CASES = {
  'dpo:beta=0.3': lambda x: _dpo(x, {'sigmoid': 1.0}, beta=0.3),
  'dpo + cross_entropy@0.5': lambda x: _dpo(x, {'sigmoid': 1.0, 'sft': 0.5}),
  'dpo:beta=0.3,smoothing=0.2': lambda x: _cpo_of_ratios(
    x, 'sigmoid', beta=0.3, smoothing=0.2
  ),
  'robust:beta=0.3,smoothing=0.2': lambda x: _dpo(
    x, {'robust': 1.0}, beta=0.3, smoothing=0.2
  ),
  'hinge:beta=0.2': lambda x: _dpo(x, {'hinge': 1.0}, beta=0.2),
  'ipo:beta=0.3,log_probs=mean': lambda x: _dpo(x, {'ipo': 1.0}, beta=0.3),
  'ipo:beta=0.3': lambda x: _cpo_of_ratios(x, 'ipo', beta=0.3),
  'simpo:gamma=0.5': lambda x: _cpo(x, beta=2.0, simpo_gamma=0.5),
  'simpo + cross_entropy@0.3': lambda x: _cpo(
    x, share=0.3, beta=2.0, simpo_gamma=1.0
  ),
  'orpo:lambda=0.4': lambda x: _without_reference(
    x, orpo.ORPOTrainer, beta=0.4
  ),
  'rloo': _rloo,
  'grpo': lambda x: _grpo(x, 'grpo'),
  'grpo:beta=0.04,kl=k3_ratio': lambda x: _grpo(x, 'grpo', beta=0.04),
  'grpo:beta=0.04': lambda x: _grpo(x, 'grpo', beta=0.04, ratio=False),
  'grpo:divisor=token': lambda x: _grpo(x, 'dapo'),
  'grpo:divisor=token,beta=0.04,kl=k3_ratio': lambda x: _grpo(
    x, 'bnpo', beta=0.04
  ),
  'grpo:divisor=constant,beta=0.04': lambda x: _grpo(
    x, 'dr_grpo', beta=0.04, ratio=False
  ),
  'grpo:beta=0.04,truncate=2': lambda x: _grpo(
    x, 'grpo', beta=0.04, ratio=False, use_vllm=True
  ),
  'distill': lambda x: _gkd(x, 0),
  'distill:divergence=reverse': lambda x: _gkd(x, 1),
  'distill:divergence=js': lambda x: _gkd(x, 0.5),
  'distill:divergence=js,beta=0.1': lambda x: _gkd(x, 0.1),
}


def _assert_equal(ours, theirs, at=LOGITS):
  """Compares values and gradients in the logits."""
  value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.array(at))
  inputs = torch.tensor(at, requires_grad=True)
  expected = theirs(inputs)
  expected.backward()
  expected_gradient = inputs.grad.numpy()
  assert abs(expected_gradient).max() > 1e-3
  assert float(value) == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
  scale = max(1, abs(expected_gradient).max())
  np.testing.assert_allclose(
    gradient, expected_gradient, rtol=0, atol=1e-6 * scale
  )


@pytest.mark.parametrize('kind', CASES)
def test_losses_and_gradients(kind):
  name = kind.partition(':')[0].partition(' ')[0]
  functions = dict.fromkeys(policy.FORMS, _our_policy)
  functions['distill'] = _distillation
  ours = functions.get(name, _preference)
  _assert_equal(lambda x: ours(kind, x), CASES[kind])


@pytest.mark.parametrize('kind, beta', [('forward', 0), ('js', 0.3)])
def test_distillation_at_a_temperature(kind, beta):
  options = f'distill:divergence={kind}' + (',beta=0.3' if beta else '')
  _assert_equal(
    lambda x: _distillation(options, x, temperature=2.0),
    lambda x: _gkd(x, beta, temperature=2.0),
  )


@pytest.mark.parametrize('margins', [False, True])
def test_reward_models(margins):
  margins = np.array([[0.5, 0], [0.2, 0], [0, 0]], np.float32) * margins
  loss = reward.Reward(kind='reward')
  batch = {'weights': jnp.array(WEIGHTS), 'margins': jnp.array(margins)}
  rewards = LOGITS[:, :, 0, 0]

  def ours(rewards):
    outputs = loss_lib.Outputs(
      rewards.reshape(-1, 1, 1), jnp.ones((8, 1)), STACK
    )
    return loss.objective(loss.terms(outputs, {}, batch), loss.divisors(batch))

  def theirs(rewards):
    args = types.SimpleNamespace(center_rewards_coefficient=None)
    trainer = _trainer(trl.RewardTrainer, args=args)
    outputs = types.SimpleNamespace(logits=_split(rewards)[:, None])
    inputs = {'attention_mask': torch.ones(2 * P, T)}
    if margins.any():
      inputs['margin'] = torch.tensor(margins[:, 0])
    return trainer.compute_loss(lambda **_: outputs, inputs)

  _assert_equal(ours, theirs, at=rewards)


# -- Trajectories --------------------------------------------------------------

LENGTHS = framing.Lengths(encoder=8, decoder=8)
EOS = gemma_ids.FRAMING.decoder.eos
ROLLOUTS = train_section.TrainConfig(
  rollouts='samples=3,tokens=8,temperature=0.7'
).sampling


def _ids(rng, least, most, end=True):
  """Random tokens, with an end or cut short."""
  tokens = rng.integers(3, 56, rng.integers(least, most)).tolist()
  return tokens + [EOS] * end


def _preferences():
  """Groups for TRL, and the batch."""
  rng = np.random.default_rng(0)
  examples = [
    (_ids(rng, 1, 7, end=False), [_ids(rng, 1, 7), _ids(rng, 1, 7)])
    for _ in range(4)
  ]
  rows = [
    preferences.Preferences.frame(
      [preferences.Preference(*map(np.int32, (prompt, *answers)))],
      LENGTHS,
      gemma_ids.FRAMING,
      teacher=True,
    )
    for prompt, answers in examples
  ]
  return examples, framing.stack_rows(rows)


def _rollouts(loss):
  """Groups for TRL, their rewards, and the batch."""
  rng = np.random.default_rng(0)
  groups = [
    (
      _ids(rng, 1, 7, end=False),
      [_ids(rng, 1, 7, end=bool(i)) for i in range(3)],
    )
    for _ in range(4)
  ]
  rewards = rng.random((4, 3), np.float32)
  pairs = [
    [[framing.Pair(*map(np.int32, (prompt, answer)))] for answer in answers]
    for prompt, answers in groups
  ]
  batch = loss.make_batch(pairs, LENGTHS, gemma_ids.FRAMING, teacher=True)
  return groups, rewards, batch | {'rewards': rewards}


@pytest.mark.parametrize(
  'kind, rate, options',
  [
    ('dpo:beta=0.3', 3e-3, {'beta': 0.3}),
    ('grpo:beta=0.04,divisor=token,kl=k3_ratio', 3e-3, {'beta': 0.04}),
    ('rloo:beta=0.05', 3e-3, {'beta': 0.05}),
  ],
)
def test_ten_steps(kind, rate, options, saved, tmp_path):
  _, folder, ours = saved('gemma2')
  model = build.build(
    ours.config, execution.ComputeConfig('float32', 'none', attention_chunk=5)
  )
  name, rewards = kind.partition(':')[0], np.zeros(0)
  if name == 'dpo':
    loss = preference.Preference(kind=kind)
    groups, batch = _preferences()
  else:
    loss = policy.Policy(kind=kind, rollouts=ROLLOUTS)
    groups, rewards, batch = _rollouts(loss)
    options |= {'temperature': 0.7, 'num_generations': 3}
    options |= {'max_completion_length': 8}
  trainer = trl_trainers.make(
    getattr(trl_trainers, name.title()),
    folder,
    [([gemma_ids.BOS, *prompt], answers) for prompt, answers in groups],
    rewards.reshape(-1).tolist(),
    max_grad_norm=0.0,
    **options,
  )
  trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), rate)

  loss = dataclasses.replace(loss, models=dict.fromkeys(loss.references, model))
  references = {name: ours.params for name in loss.references}
  batch = jax.tree.map(jnp.asarray, batch)

  @jax.jit
  @jax.value_and_grad
  def objective(params):
    terms = loss.sums(model, params, batch, references)
    return loss.objective(terms, loss.divisors(batch))

  params, values, expected = ours.params, [], []
  for _ in range(10):
    value, gradients = objective(params)
    params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
    values.append(float(value))
    expected.append(trainer.step())
  np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4)
  trainer.model.save_pretrained(tmp_path)
  # Parameters tell more: the loss of RLOO is 0 where the ratio is 1.
  trained = encdec_adapt.load(tmp_path).params
  flat = [
    traverse_util.flatten_dict(x, sep='/')
    for x in (params, trained, ours.params)
  ]
  for path in flat[0]:
    value, other, start = (np.asarray(x[path]) for x in flat)
    np.testing.assert_allclose(value, other, rtol=0, atol=1e-6, err_msg=path)
    assert abs(value - start).max() > 1e-5, path
