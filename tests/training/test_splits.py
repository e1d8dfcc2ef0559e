"""Losses of groups and teachers: microbatches and meshes equal one batch."""

import functools

import jax
import numpy as np
import pytest

from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training.recipes import policy_recipe
from tests import toy_models
from tests.training import conftest, preference_cases, test_policy, test_reward

pytestmark = pytest.mark.sharded

DEFAULT = ('dpo:cross_entropy=0.3', 'grpo:beta=0.1')
NIGHTLY = (  # Each compiles three programs.
  'reward',
  *preference_cases.KINDS,
  *(kind for kind in test_policy.KINDS if kind not in DEFAULT),
  'grpo:beta=0.1,truncate=2',
  'distill',
  'distill:divergence=reverse',
  'distill:divergence=js',
)
MESHES = (
  (None, 4),
  (mesh_lib.MeshConfig(fsdp=2, sequence=2, tensor=2), 4),
)


def _case(kind):
  """The loss, axes of its fields, and its batches by seed."""
  name, filled = kind.partition(':')[0], dict(rows=16, filler=3)
  if name == 'reward':
    batches = functools.partial(test_reward._batch, **filled)
    return test_reward.LOSS, preference_cases.AXES, batches
  if name in ('rloo', 'grpo'):
    loss, cut = test_policy._loss(kind), {(1, 1)}
    batches = functools.partial(test_policy._batch, **filled, cut=cut)
    return loss, policy_recipe.AXES, batches
  loss = conftest.make_loss(kind)
  if name == 'distill':
    return loss, {}, functools.partial(conftest.make_batch, 16)
  batches = functools.partial(preference_cases.make_batch, **filled)
  return loss, preference_cases.AXES, batches


def _trained(kind, mesh, microbatches):
  """Metrics of two steps, and the parameters after them."""
  loss, axes, batches = _case(kind)
  made = test_reward if kind == 'reward' else conftest
  trainer = conftest.Trainer(
    mesh,
    loss=loss,
    model=made.MODEL,
    axes=axes,
    microbatches=microbatches,
    models={'teacher': conftest.MODEL},
  )
  state = trainer.init(trainer.where.place(made.INIT, jax.random.key(0)))
  frozen = toy_models.params(conftest.PAIR, 1)
  metrics = []
  for seed in range(2):
    state, values = trainer.step(
      state, batches(seed=seed), dict.fromkeys(loss.references, frozen)
    )
    metrics.append({name: float(value) for name, value in values.items()})
  return metrics, conftest.host(state.params)


@pytest.mark.long
@pytest.mark.parametrize(
  'kind',
  [*DEFAULT, *(pytest.param(x, marks=pytest.mark.slow) for x in NIGHTLY)],
)
def test_microbatches_and_a_mesh_equal_one_batch(kind):
  expected, params = _trained(kind, None, 1)
  for mesh, microbatches in MESHES:
    metrics, trained = _trained(kind, mesh, microbatches)
    for step, other in zip(metrics, expected, strict=True):
      assert step == pytest.approx(other, rel=2e-4, abs=2e-5)
    for path, value in trained.items():
      np.testing.assert_allclose(value, params[path], atol=5e-5, err_msg=path)
  fields = _case(kind)[2](seed=0)
  sides = [
    fields[f'{side}_segments'].ravel() for side in ('encoder', 'decoder')
  ]
  padding = np.mean(np.concatenate(sides) == 0)
  assert expected[0]['padding'] == pytest.approx(padding)
