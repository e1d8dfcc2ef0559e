"""Optimizer state that takes less of a device's memory: steps and resume."""

import dataclasses

import jax
import numpy as np
import pytest

from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import errors
from encdec_adapt.sharding import memory
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import optimizers, schedules
from tests.training.conftest import Trainer, host, make_batch

MESH = mesh_lib.MeshConfig(replica=2, fsdp=4)
CONFIGS = {
  kind: optimizers.OptimizerConfig(
    kind, schedules.ScheduleConfig('constant', 1e-2, 2, 100), eps=1e-3
  )
  for kind in optimizers.KINDS
}


def _trainer(kind, **changes):
  return Trainer(MESH, optimizer=dataclasses.replace(CONFIGS[kind], **changes))


def _steps(trainer, state, seeds):
  for seed in seeds:
    state, _ = trainer.step(state, make_batch(16, seed))
  return state


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('kind', optimizers.KINDS)
def test_state_on_the_host_gives_the_same_updates_and_stays_there(kind):
  held, plain = _trainer(kind, offload=True), _trainer(kind)
  state = _steps(held, held.init(), (0, 1))
  # Counts are read before the update, and stay.
  device = jax.devices()[0].default_memory().kind
  assert {
    (leaf.ndim > 0, leaf.sharding.memory_kind)
    for leaf in jax.tree.leaves(state.groups)
  } == {(True, memory.HOST), (False, device)}
  expected = host(_steps(plain, plain.init(), (0, 1)).params)
  for path, value in host(state.params).items():
    np.testing.assert_allclose(value, expected[path], atol=1e-6, err_msg=path)


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'kind, changes',
  [
    (
      'adamw',
      dict(
        moment_dtype='bfloat16', second_moment_dtype='bfloat16', offload=True
      ),
    ),
    ('adafactor', dict(offload=True)),
  ],
)
def test_resume_is_exact_and_stays_on_the_host(kind, changes, tmp_path):
  trainer = _trainer(kind, **changes)
  state = _steps(trainer, trainer.init(), (0,))
  abstract = trainer.phases.abstract(1)
  with manager.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state, data={}, meta={})
    checkpoints.wait()
    expected = _steps(trainer, state, (1,))
    restored = checkpoints.at(1).restore(abstract)
  for leaf, wanted in zip(
    jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True
  ):
    assert leaf.sharding == wanted.sharding and leaf.dtype == wanted.dtype
  found = _steps(trainer, restored, (1,))
  jax.tree.map(
    lambda one, other: np.testing.assert_array_equal(
      np.asarray(one), np.asarray(other)
    ),
    found,
    expected,
  )


def test_a_backend_without_the_hosts_memory_is_refused(monkeypatch):
  monkeypatch.setattr(memory, 'HOST', 'somewhere_else')
  with pytest.raises(errors.UserError, match="offload.*'somewhere_else'"):
    _trainer('adamw', offload=True).init()
