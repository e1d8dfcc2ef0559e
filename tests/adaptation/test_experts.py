"""A decoder with experts becomes an encoder-decoder, and learns."""

import dataclasses

import jax
import numpy as np
import pytest

from encdec_adapt.models import build, model_config
from encdec_adapt.training import losses, optimizers, schedules
from encdec_adapt.training import state as state_lib
from tests.adaptation import sources
from tests.training import conftest as training

STACK = dataclasses.replace(
  training.STACK,
  layers=2,
  experts=4,
  experts_per_token=2,
  expert_mlp_width=12,
  shared_expert_width=8,
  dense_layers=1,
)
SOURCE = model_config.DecoderOnlyConfig(STACK)
TARGET = model_config.encoder_decoder(STACK, STACK)


@pytest.fixture(scope='module')
def adapted():
  """The source's parameters, the target's, and the coverage report."""
  params = jax.jit(build.build(SOURCE).init)(jax.random.key(0))
  made, coverage = sources.adapt(TARGET, (SOURCE, params))
  return params, made, coverage


def test_every_expert_is_copied_into_both_stacks(adapted):
  params, made, coverage = adapted
  source, target = (
    sources.by_name(SOURCE, params),
    sources.by_name(TARGET, made),
  )
  names = [name for name in source if '/experts/' in name]
  # Router, three kernels, three of the shared one, in the second layer.
  assert len(names) == 7
  for name in names:
    for stack in ('encoder', 'decoder'):
      copy = target[stack + name.removeprefix('decoder')]
      np.testing.assert_array_equal(copy, source[name], name)
  counts = coverage.parameters()
  assert (counts['fresh'], counts['constant']) == (0, 0)
  assert 'encoder/layers/1/experts/gate' in coverage.table()
  assert 'encoder/layers/0/mlp/gate' in coverage.table()


@pytest.mark.long
def test_training_lowers_the_loss_and_reports_the_load(adapted):
  _, made, _ = adapted
  trainer = training.Trainer(
    model=build.build(TARGET),
    microbatches=2,
    loss=losses.LossConfig(load_balance=0.02, router_z_loss=1e-3, chunk=16),
    optimizer=optimizers.OptimizerConfig(
      'adamw', schedules.ScheduleConfig('constant', 1e-2, 0, 100)
    ),
  )
  state = trainer.init(jax.tree.map(np.array, made))
  router = 'decoder/blocks/layer_0/experts/router'
  before = np.array(state_lib.flatten(state.params)[router])
  batch, seen = training.make_batch(8), []
  for _ in range(8):
    state, metrics = trainer.step(state, batch)
    seen.append({name: float(value) for name, value in metrics.items()})
  assert seen[-1]['cross_entropy'] < seen[0]['cross_entropy'] - 0.3
  for values in seen:
    assert 0.9 < values['load_balance'] < 4
    parts = values['cross_entropy'] + 0.02 * values['load_balance']
    parts += 1e-3 * values['router_z_loss']
    assert values['loss'] == pytest.approx(parts, rel=1e-5)
  assert not np.array_equal(state_lib.flatten(state.params)[router], before)
