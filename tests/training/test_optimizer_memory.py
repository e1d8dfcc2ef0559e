"""Optimizer state that takes less of a device's memory: steps and resume."""

import jax
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.sharding import memory
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import optimizers, schedules
from tests.training.conftest import Trainer, host, make_batch

MESH = mesh_lib.MeshConfig(replica=2, fsdp=4)
SCHEDULE = schedules.ScheduleConfig('constant', 1e-2, 2)


def _trainer(kind, **changes):
  config = optimizers.OptimizerConfig(kind, SCHEDULE, eps=1e-3, **changes)
  return Trainer(MESH, optimizer=config)


def _steps(trainer, state, *seeds):
  for seed in seeds:
    state, _ = trainer.step(state, make_batch(16, seed))
  return state


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'kind, changes',
  [
    pytest.param('adamw', {}, marks=pytest.mark.slow),
    ('adamw', dict(moment_dtype='bfloat16', second_moment_dtype='bfloat16')),
    ('adafactor', {}),
  ],
)
def test_state_on_the_host_gives_the_same_updates_and_stays_there(
  kind, changes, tmp_path
):
  held = _trainer(kind, offload=True, **changes)
  plain = _trainer(kind, **changes)
  state = _steps(held, held.init(), 0)
  abstract = held.phases.abstract(1)
  with manager.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state, data={}, meta={})
    checkpoints.wait()
    expected = _steps(held, state, 1)
    restored = checkpoints.at(1).restore(abstract)
  # Counts are read before the update, and stay.
  device = jax.devices()[0].default_memory().kind
  for tree in (restored, expected):
    assert {
      (leaf.ndim > 0, leaf.sharding.memory_kind)
      for leaf in jax.tree.leaves(tree.groups)
    } == {(True, memory.HOST), (False, device)}
  for leaf, wanted in zip(
    jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True
  ):
    assert leaf.sharding == wanted.sharding and leaf.dtype == wanted.dtype
  found = _steps(held, restored, 1)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
    found,
    expected,
  )
  wanted = host(_steps(plain, plain.init(), 0, 1).params)
  for path, value in host(found.params).items():
    np.testing.assert_allclose(value, wanted[path], atol=1e-6, err_msg=path)


def test_a_backend_without_the_hosts_memory_is_refused(monkeypatch):
  monkeypatch.setattr(memory, 'HOST', 'somewhere_else')
  with pytest.raises(errors.UserError, match="offload.*'somewhere_else'"):
    _trainer('adamw', offload=True).init()
