"""Optimizer state and step count of a source, carried to a new job."""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.adaptation import weight_plan
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.models import build, model_config
from encdec_adapt.stored import carried_state, model_on_disk
from encdec_adapt.training import optimizers, schedules
from tests import toy_models
from tests.training import conftest

STEP = 40_000
# Wide enough for Adafactor to factor its moments.
STACK = toy_models.stack(
  layers=8, width=128, mlp_width=128, pattern=('local', 'global')
)
SOURCE = model_config.DecoderOnlyConfig(STACK)
HALF = dataclasses.replace(STACK, layers=4)
TARGETS = {
  'the same weights': model_config.DecoderOnlyConfig(
    dataclasses.replace(STACK, role='prefix')
  ),
  'a pair': model_config.encoder_decoder(HALF, STACK),
}


def _trainer(model, kind):
  schedule = schedules.ScheduleConfig('rsqrt', 0.1, 10)
  optimizer = optimizers.OptimizerConfig(kind, schedule)
  return conftest.Trainer(model=build.build(model), optimizer=optimizer)


def _random(tree):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: (
      jnp.asarray(rng.random(leaf.shape, np.float32))
      if leaf.ndim
      else jnp.int32(STEP)
    ),
    tree,
  )


@pytest.fixture(scope='module', params=optimizers.KINDS)
def saved(request, tmp_path_factory):
  """The kind of an optimizer, its state, and the run that has saved it."""
  path = tmp_path_factory.mktemp(request.param)
  trainer = _trainer(SOURCE, request.param)
  state = trainer.init(toy_models.params(SOURCE))
  state = state.replace(step=jnp.int32(STEP), groups=_random(state.groups))
  with manager.Checkpoints(path / manager.FOLDER) as checkpoints:
    checkpoints.save(STEP, state, data={}, meta={})
  stored = model_on_disk.StoredModel(
    path, SOURCE, None, dict, manager.open_latest(path), name='run'
  )
  return request.param, state, stored, trainer.where


@pytest.mark.parametrize('target', TARGETS.values(), ids=TARGETS)
def test_moments_follow_their_weights(saved, target):
  kind, source, stored, placement = saved
  coverage = None
  if target.architecture.encodes_prompt:
    coverage = weight_plan.make_plan(target, SOURCE)
  job = _trainer(target, kind)
  arguments = stored, placement, coverage, job.phases
  carried_state.check(*arguments)
  state = job.phases.create(
    toy_models.params(target), **carried_state.read(*arguments)
  )
  group, theirs = state.groups['all'], source.groups['all']
  assert state.step == group.count == group.inner.count == STEP
  # rsqrt goes on: 10,000 flat steps, then sqrt(10,000 / 40,000).
  schedule = job.phases.optimizer.config.schedule
  rate = schedules.make_schedule(schedule, 100)(state.step, group.count)
  assert float(rate) == pytest.approx(0.05)
  names = ('mu', 'nu') if kind == 'adamw' else ('v_row', 'v_col', 'v')
  for name in names:
    ours, old = (getattr(x.inner, name) for x in (group, theirs))
    if coverage is None:
      jax.tree.map(np.testing.assert_array_equal, ours, old)
      continue
    # Layers 0, 3, 4 and 7 of 8, of which 3 and 7 are global: the second and the
    # fourth. Cross-attention's are those of self-attention.
    for stack, rows in (('encoder', [1, 3]), ('decoder', [0, 1, 2, 3])):
      for part, of in (
        ('mlp/up', 'mlp/up'),
        ('attention/key', 'attention/key'),
        ('cross_attention/key', 'attention/key'),
      ):
        path = f'{stack}/blocks/layer_1/{part}'
        if path not in ours:  # An encoder has no cross-attention.
          continue
        expected = old[f'decoder/blocks/layer_1/{of}']
        if expected.shape != (1,):  # Of other moments than its own.
          expected = expected[jnp.array(rows)]
          np.testing.assert_array_equal(ours[path], expected)
    table = ours['encoder/embedder/table']
    if table.shape != (1,):
      np.testing.assert_array_equal(table, old['decoder/embedder/table'])
  # The state is one that the step takes.
  abstract = job.phases.abstract(0)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
    lambda x: (x.shape, x.dtype), abstract
  )


def test_states_that_cannot_go_on(saved):
  kind, _, stored, placement = saved
  target = TARGETS['a pair']
  coverage = weight_plan.make_plan(target, SOURCE)
  fresh = weight_plan.make_plan(target, SOURCE, cross_attention='fresh')
  other = next(x for x in optimizers.KINDS if x != kind)
  folder = dataclasses.replace(stored, checkpoint=None)
  for source, plan, optimizer, words in (
    (folder, coverage, kind, 'a folder of weights'),
    (stored, fresh, kind, 'cross_attention/.* is fresh'),
    (stored, coverage, other, 'not that of config.optimizer'),
  ):
    job = _trainer(target, optimizer).phases
    with pytest.raises(errors.UserError, match=words):
      carried_state.check(source, placement, plan, job)
