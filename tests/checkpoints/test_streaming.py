"""Leaves that are made while a checkpoint is written."""

import weakref

import jax
import numpy as np
import pytest

from encdec_adapt.checkpoints import manager, streaming
from encdec_adapt.files import lazy_array


@pytest.fixture(autouse=True)
def registered():
  streaming.register()


class _Array(np.ndarray):
  """Can be pointed at without being kept."""


def _save(folder, params):
  with manager.Checkpoints(folder) as checkpoints:
    checkpoints.save(0, {'params': params}, data={}, meta={})


def test_leaves_are_read_back_and_never_in_memory_together(tmp_path):
  made, alive = [], []

  def leaf(value):
    def make(_):
      alive.append(sum(reference() is not None for reference in made))
      array = np.full((64, 3), value, np.float32).view(_Array)
      made.append(weakref.ref(array))
      return array

    return lazy_array.LazyArray((64, 3), np.dtype(np.float32), make)

  _save(tmp_path, {'a': {str(i): leaf(i) for i in range(20)}})
  assert len(made) == 20
  assert max(alive) <= 2
  found = manager.open_latest(tmp_path)
  shape = jax.ShapeDtypeStruct((64, 3), np.float32)
  params = found.restore_params({'a': {str(i): shape for i in range(20)}})
  for i in range(20):
    np.testing.assert_array_equal(params['a'][str(i)], i)
  found.read_through()


def test_a_leaf_that_cannot_be_made_leaves_no_checkpoint(tmp_path):
  def make(_):
    raise ValueError('no such tensor')

  leaf = lazy_array.LazyArray((2,), np.dtype(np.float32), make)
  with pytest.raises(manager.CheckpointError, match='no such tensor'):
    _save(tmp_path, {'a': leaf})
  assert not [path for path in tmp_path.iterdir() if path.name.isdecimal()]
