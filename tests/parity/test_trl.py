"""Losses and gradients against TRL's on the same logits, and trajectories.

TRL's methods run on trainers without a model, which are given its outputs.
Masked completions are left out: TRL counts them in divisors, and we do not.
"""

import collections
import types

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.losses import (
  policy,
  reward,
)
from tests import toy_models
from tests.training import conftest, preference_cases, test_policy

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
LABELS = np.where(WEIGHTS > 0, TARGETS, -100)
ADVANTAGES = np.array([[1, -1], [0.5, -0.5], [-0.7, 0.7]], np.float32)
IMPORTANCE = _RNG.uniform(0.3, 2, TARGETS.shape).astype(np.float32)
MARGINS = np.array([[0.5, 0], [0.2, 0], [0, 0]], np.float32)


# -- Theirs --------------------------------------------------------------------


def _trainer(kind, **fields):
  """A trainer of one process, with fields in place of what it would make."""
  trainer = kind.__new__(kind)
  same = lambda x, **_: x  # noqa: E731
  accelerator = types.SimpleNamespace(device='cpu', num_processes=1)
  for name in ('gather', 'gather_for_metrics', 'reduce'):
    setattr(accelerator, name, same)
  training = types.SimpleNamespace(training=True)
  metrics = {'train': collections.defaultdict(list)}
  vars(trainer).update(accelerator=accelerator, model=training)
  vars(trainer).update(_metrics=metrics, _total_train_tokens=0, _tp_size=1)
  vars(trainer).update(aux_loss_enabled=False, **fields)
  return trainer


def _split(x):
  """Chosen answers, then rejected ones, as TRL has them."""
  x = torch.as_tensor(x)
  return torch.cat([x[:, 0], x[:, 1]])


def _rows(x):
  return torch.as_tensor(x).flatten(0, 1)


def _log_probs(logits):
  log_probs = torch.log_softmax(torch.as_tensor(logits), -1)
  ids = torch.tensor(TARGETS).long()[..., None]
  return log_probs.gather(-1, ids)[..., 0] * torch.tensor(WEIGHTS)


def _dpo(logits, beta=0.1, label_smoothing=0.0, **types_):
  """Losses of `DPOTrainer`, by name with their weights."""
  pad = lambda x: torch.nn.functional.pad(_split(x), (1, 0)).long()  # noqa: E731
  zeros = torch.zeros(2 * P, T)
  outputs = types.SimpleNamespace(
    log_probs=_split(_log_probs(logits)), entropy=zeros, mean_logits=zeros
  )
  outputs.is_top1 = zeros.bool()
  options = dict(beta=beta, label_smoothing=label_smoothing, ld_alpha=None)
  options |= dict(f_divergence_type='reverse_kl', use_weighting=False)
  trainer = _trainer(
    trl.DPOTrainer,
    **options,
    loss_types=list(types_),
    loss_weights=list(types_.values()),
    precompute_ref_logps=True,
  )
  inputs = {'input_ids': pad(TARGETS), 'completion_mask': pad(WEIGHTS)}
  inputs['attention_mask'] = torch.ones(2 * P, T)
  chosen, rejected = _log_probs(REFERENCE).sum(-1).T
  inputs |= {'ref_chosen_logps': chosen, 'ref_rejected_logps': rejected}
  return trainer._compute_loss(lambda **_: outputs, inputs, False)


def _without_reference(logits, kind=cpo.CPOTrainer, **fields):
  """The loss of a trainer of encoder-decoders that reads no reference."""
  options = dict(loss_type='simpo', alpha=0.0, label_smoothing=0.0)
  options |= dict(padding_value=0, pad_token_id=0, decoder_start_token_id=0)
  trainer = _trainer(kind, is_encoder_decoder=True, **options | fields)
  chosen, rejected = torch.tensor(LABELS).long().transpose(0, 1)
  prompt = torch.ones(P, 1, dtype=torch.long)
  batch = {'prompt_input_ids': prompt, 'prompt_attention_mask': prompt}
  batch |= {'chosen_labels': chosen, 'rejected_labels': rejected}
  outputs = types.SimpleNamespace(logits=_split(logits))
  return trainer.get_batch_loss_metrics(lambda *_, **__: outputs, batch)[0]


def _of_ratios(logits, label_smoothing=0.0, **fields):
  """The formulas of `CPOTrainer`, which has no reference, on log-ratios."""
  options = dict(alpha=0.0, label_smoothing=label_smoothing)
  trainer = _trainer(cpo.CPOTrainer, **options, **fields)
  ratios = _log_probs(logits) - _log_probs(REFERENCE)
  return trainer.cpo_loss(*ratios.sum(-1).T)[0].mean()


def _policy(logits, kind=trl.GRPOTrainer, ratio=True, beta=0.0, **fields):
  """The loss of `GRPOTrainer` or `RLOOTrainer` with old log-probabilities."""
  log_probs, old, reference = (
    _rows(_log_probs(x)) for x in (logits, OLD, REFERENCE)
  )
  mask, zeros = _rows(WEIGHTS), torch.zeros(2 * P, T)
  options = dict(beta=beta, epsilon_low=0.2, epsilon_high=0.2, use_vllm=False)
  options |= dict(vllm_importance_sampling_correction=True)
  options |= dict(importance_sampling_level='token', max_completion_length=T)
  options |= dict(top_entropy_quantile=1.0, off_policy_mask_threshold=None)
  options |= dict(current_gradient_accumulation_steps=1)
  args = types.SimpleNamespace(delta=None, steps_per_generation=1)
  args.use_bias_correction_kl = ratio
  trainer = _trainer(kind, args=args, **options | fields)
  trainer._entropy_bonus_enabled = False
  trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
    (log_probs, zeros, None)
  )
  inputs = {'prompt_ids': mask, 'prompt_mask': mask, 'completion_ids': mask}
  inputs |= {'completion_mask': mask, 'advantages': _rows(ADVANTAGES)}
  inputs |= {'old_per_token_logps': old, 'ref_per_token_logps': reference}
  inputs |= {'importance_sampling_ratio': _rows(IMPORTANCE)}
  inputs |= {'old_logps': old.sum(-1), 'num_items_in_batch': mask.sum()}
  return trainer._compute_loss(None, inputs)


def _gkd(logits, **options):
  loss = gkd.GKDTrainer.generalized_jsd_loss
  return loss(_rows(logits), _rows(REFERENCE), _rows(LABELS), **options)


# -- Ours ----------------------------------------------------------------------


def _outputs(logits):
  """Outputs of a model with logits as its states."""
  states = jnp.asarray(logits).reshape(2 * P, T, V)
  return loss_lib.Outputs(states, jnp.eye(V), STACK)


_READERS = {'teacher': lambda batch: _outputs(REFERENCE)}


def _our_preference(kind, logits):
  loss = conftest.make_loss(kind)
  batch = {'targets': jnp.array(TARGETS), 'weights': jnp.array(WEIGHTS)}
  terms = loss.terms(_outputs(logits), _READERS, batch)
  return conftest.value(loss, terms, batch)


def _our_policy(kind, logits):
  """The loss of given old log-probabilities and advantages."""
  loss, weights = conftest.make_loss(kind), jnp.array(WEIGHTS)
  ids = jnp.array(TARGETS)[..., None]
  log_probs = [
    jnp.take_along_axis(jax.nn.log_softmax(x), ids, -1)[..., 0]
    for x in (logits, OLD, REFERENCE)
  ]
  importance = jnp.array(IMPORTANCE) if loss.truncate else weights
  entropy = jnp.zeros_like(weights)  # The loss does not read it.
  tokens = policy.Tokens(*log_probs, importance, weights, entropy)
  losses = loss.completion_loss(jnp.array(ADVANTAGES), tokens)
  return losses.sum() / loss.divisors({'weights': weights})['mean']


def _our_distillation(kind, logits, temperature=1.0):
  """The divergence; its gradient is that of the loss."""
  mark = ',' if ':' in kind else ':'
  loss = conftest.make_loss(f'{kind}{mark}temperature={temperature}')
  batch = {'targets': TARGETS, 'weights': WEIGHTS}
  batch = {name: jnp.array(x.reshape(2 * P, T)) for name, x in batch.items()}
  terms = loss.terms(_outputs(logits), _READERS, batch)
  # The loss is multiplied by the square, and of forward KL it lacks the entropy
  # of the teacher.
  objective = conftest.value(loss, terms, batch) / temperature**2
  value = terms['distillation'] / WEIGHTS.sum()
  return jax.lax.stop_gradient(value - objective) + objective


def _assert_equal(ours, theirs, at=LOGITS):
  """Compares values and gradients."""
  value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.array(at))
  inputs = torch.tensor(at, requires_grad=True)
  expected = theirs(inputs)
  expected.backward()
  scale = abs(inputs.grad.numpy()).max()
  assert scale > 1e-3
  assert float(value) == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
  np.testing.assert_allclose(
    gradient, inputs.grad.numpy(), rtol=0, atol=1e-6 * max(1, scale)
  )


_GRPO = dict(loss_type='grpo')
_SIMPO = dict(beta=2.0, simpo_gamma=1.0)


@pytest.mark.parametrize(
  'kind, theirs, options',
  [
    ('dpo:beta=0.3', _dpo, dict(sigmoid=1, beta=0.3)),
    ('dpo:cross_entropy=0.5', _dpo, dict(sigmoid=1, sft=0.5)),
    (
      'dpo:beta=0.3,smoothing=0.2',
      _of_ratios,
      dict(loss_type='sigmoid', beta=0.3, label_smoothing=0.2),
    ),
    ('robust:smoothing=0.2', _dpo, dict(robust=1, label_smoothing=0.2)),
    ('hinge:beta=0.2', _dpo, dict(hinge=1, beta=0.2)),
    ('ipo:beta=0.3,log_probs=mean', _dpo, dict(ipo=1, beta=0.3)),
    ('ipo:beta=0.3', _of_ratios, dict(loss_type='ipo', beta=0.3)),
    ('simpo', _without_reference, dict(cpo_alpha=0, **_SIMPO)),
    (
      'simpo:cross_entropy=0.3',
      _without_reference,
      dict(cpo_alpha=0.3, **_SIMPO),
    ),
    (
      'orpo:weight=0.4',
      _without_reference,
      dict(kind=orpo.ORPOTrainer, beta=0.4),
    ),
    ('rloo', _policy, dict(kind=trl.RLOOTrainer)),
    ('grpo', _policy, _GRPO),
    ('grpo:beta=0.1,kl=k3_ratio', _policy, dict(beta=0.1, **_GRPO)),
    ('grpo:beta=0.1', _policy, dict(beta=0.1, ratio=False, **_GRPO)),
    (
      'grpo:beta=0.1,truncate=2',
      _policy,
      dict(beta=0.1, ratio=False, use_vllm=True, **_GRPO),
    ),
    ('grpo:divisor=token', _policy, dict(loss_type='dapo')),
    (
      'grpo:divisor=constant,beta=0.1,kl=k3_ratio',
      _policy,
      dict(loss_type='dr_grpo', beta=0.1),
    ),
    ('distill', _gkd, dict(beta=0)),
    ('distill', _gkd, dict(beta=0, temperature=2.0)),
    ('distill:divergence=reverse', _gkd, dict(beta=1)),
    ('distill:divergence=js', _gkd, dict(beta=0.5, temperature=2.0)),
    ('distill:divergence=js,beta=0.1', _gkd, dict(beta=0.1)),
  ],
)
def test_losses_and_gradients(kind, theirs, options):
  ours, arguments = {_policy: _our_policy}.get(theirs, _our_preference), {}
  if theirs is _gkd:
    ours = _our_distillation
    arguments = {'temperature': options.get('temperature', 1.0)}
  _assert_equal(
    lambda x: ours(kind, x, **arguments), lambda x: theirs(x, **options)
  )


@pytest.mark.parametrize('scale', [0, 1])
def test_reward_models(scale):
  loss, margins = reward.Reward(), scale * MARGINS
  batch = {'weights': jnp.array(WEIGHTS), 'margins': jnp.array(margins)}

  def ours(rewards):
    states = rewards.reshape(-1, 1, 1)
    outputs = loss_lib.Outputs(states, jnp.ones((8, 1)), STACK)
    return conftest.value(loss, loss.terms(outputs, {}, batch), batch)

  def theirs(rewards):
    args = types.SimpleNamespace(center_rewards_coefficient=None)
    trainer = _trainer(trl.RewardTrainer, args=args)
    outputs = types.SimpleNamespace(logits=_split(rewards)[:, None])
    inputs = {'attention_mask': torch.ones(2 * P, T)}
    if scale:
      inputs['margin'] = torch.tensor(margins[:, 0])
    return trainer.compute_loss(lambda **_: outputs, inputs)

  _assert_equal(ours, theirs, at=LOGITS[:, :, 0, 0])


# -- Trajectories --------------------------------------------------------------


def _groups(batch):
  """Tokens of prompts with BOS, and of their completions."""
  sizes = (batch['encoder_segments'] > 0).sum(-1)
  counts = (batch['weights'] > 0).sum(-1)
  return [
    (
      prompt[:size].tolist(),
      [row[:n].tolist() for row, n in zip(*group, strict=True)],
    )
    for prompt, size, *group in zip(
      batch['encoder_tokens'], sizes, batch['targets'], counts, strict=True
    )
  ]


@pytest.mark.parametrize(
  'kind, beta',
  [
    ('dpo:beta=0.3', 0.3),
    ('grpo:beta=0.04,divisor=token,kl=k3_ratio', 0.04),
    ('rloo:beta=0.05', 0.05),
  ],
)
def test_ten_steps(kind, beta, saved, tmp_path):
  _, folder, ours = saved('gemma2')
  name, rate, options = kind.partition(':')[0], 3e-3, {}
  if name == 'dpo':
    loss = conftest.make_loss(kind)
    batch = preference_cases.make_batch(4)
  else:
    loss = test_policy._loss(kind)
    batch = test_policy._batch(4)
    options = {'temperature': 0.7, 'num_generations': 3}
    options['max_completion_length'] = test_policy.TOKENS
  trainer = trl_trainers.make(
    getattr(trl_trainers, name.title()),
    folder,
    _groups(batch),
    batch.get('rewards', np.zeros(0)).reshape(-1).tolist(),
    max_grad_norm=0.0,
    beta=beta,
    **options,
  )
  trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), rate)
  references = dict.fromkeys(loss.references, ours.params)
  arrays = jax.tree.map(jnp.asarray, batch)

  @jax.jit
  @jax.value_and_grad
  def objective(params):
    terms = conftest.sums(loss, ours.model, params, arrays, references)
    return conftest.value(loss, terms, arrays)

  params, values, expected = ours.params, [], []
  for _ in range(10):
    value, gradients = objective(params)
    params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
    values.append(float(value))
    expected.append(trainer.step())
  np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4)
  # Parameters tell more: the loss of RLOO is 0 where the ratio is 1.
  trainer.model.save_pretrained(tmp_path)
  trained = encdec_adapt.load(tmp_path).params
  flat = [
    traverse_util.flatten_dict(x, sep='/')
    for x in (params, trained, ours.params)
  ]
  for path in flat[0]:
    value, other, start = (np.asarray(x[path]) for x in flat)
    np.testing.assert_allclose(value, other, rtol=0, atol=1e-6, err_msg=path)
    assert abs(value - start).max() > 1e-5, path
