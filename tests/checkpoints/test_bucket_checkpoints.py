"""Checkpoints in a bucket: commit, kills, refused saves.

What disks and buckets have in common is in test_manager.
"""

import jax
import pytest

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checksums, manager, step_folders
from encdec_adapt.files import paths


def _save(checkpoints, step):
  checkpoints.save(step, {'x': jax.numpy.arange(8.0)}, data={}, meta={})
  checkpoints.wait()


def test_the_manifest_is_written_last(bucket, store):
  with manager.Checkpoints(bucket) as checkpoints:
    _save(checkpoints, 4)
  generations = {n: o.generation for n, o in store.objects.items()}
  names = store.names(f'{store.key(bucket)}/4/')
  assert max(names, key=generations.get).endswith(checksums.FILE)


def test_half_a_step_is_removed(bucket, store):
  with manager.Checkpoints(bucket) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  (paths.at(bucket) / '6' / step_folders.COMMITTED).unlink()
  assert manager.open_latest(bucket).step == 3
  with manager.Checkpoints(bucket) as checkpoints:
    assert store.names(f'{store.key(bucket)}/6/') == []
    _save(checkpoints, 6)
    assert checkpoints.latest().step == 6


def test_a_save_that_the_bucket_refuses_is_an_error(bucket, store):
  with manager.Checkpoints(bucket) as checkpoints:
    store.refuses = 403
    with pytest.raises(manager.CheckpointError, match='step 1 was not'):
      _save(checkpoints, 1)
    store.refuses = 0
  with pytest.raises(
    errors.UserError, match='gs://.* has no undamaged checkpoint'
  ):
    manager.open_latest(bucket)
