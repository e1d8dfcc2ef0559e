"""Checkpoints in a bucket of a fake store: commit, manifest, damage, kill."""

import jax
import numpy as np
import pytest

from encdec_adapt.checkpoints import checksums, manager, step_folders
from encdec_adapt.cli import errors
from encdec_adapt.files import paths


def _make(seed):
  return {
    'x': jax.random.normal(jax.random.key(seed), (64, 16)),
    'step': jax.numpy.asarray(seed),
  }


def _save(checkpoints, step, seed=None):
  seed = step if seed is None else seed
  checkpoints.save(step, _make(seed), data={'row': step}, meta={'seed': seed})
  checkpoints.wait()


def _assert_is(checkpoints, step, seed):
  restored = checkpoints.at(step).restore(jax.eval_shape(lambda: _make(0)))
  for name, value in _make(seed).items():
    np.testing.assert_array_equal(restored[name], value)
  assert checkpoints.at(step).read_meta() == {'seed': seed}


def _largest(store, prefix):
  return max(store.names(prefix), key=lambda n: len(store.objects[n].data))


def test_saved_kept_and_read_by_others(bucket, store):
  folder = paths.join(bucket, manager.FOLDER)
  with manager.Checkpoints(folder, keep=2, keep_every=2) as checkpoints:
    assert checkpoints.latest() is None
    for step in range(1, 5):
      _save(checkpoints, step)
    assert checkpoints.all_steps() == [2, 3, 4]
  assert store.names(f'{store.key(folder)}/1/') == []
  # The manifest comes after all that it lists.
  here = {n: o.generation for n, o in store.objects.items() if '/4/' in n}
  assert max(here, key=here.get).endswith(f'/4/{checksums.FILE}')
  with manager.Checkpoints(folder) as checkpoints:
    assert checkpoints.latest() == 4
    _assert_is(checkpoints, 4, 4)
  found = manager.open_latest(bucket)
  assert (found.step, found.read_data()) == (4, {'row': 4})
  params = manager.open_latest(f'{folder}/2').restore(
    {'x': jax.ShapeDtypeStruct((64, 16), np.float32)}, partial=True
  )
  np.testing.assert_array_equal(params['x'], _make(2)['x'])


def test_damage_is_moved_aside_and_the_step_saved_again(bucket, store, capsys):
  with manager.Checkpoints(bucket) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  name = _largest(store, f'{store.key(bucket)}/6/state/')
  data = bytearray(store.objects[name].data)
  data[len(data) // 2] ^= 1
  store.put(name, bytes(data))
  before = paths.tree(paths.at(bucket) / '6')
  with manager.Checkpoints(bucket) as checkpoints:
    assert checkpoints.latest() == 3
    warning = capsys.readouterr().err
    assert 'step 6 is damaged' in warning and 'other contents' in warning
    assert checkpoints.all_steps() == [3]
    aside = paths.at(bucket) / 'damaged-00000006'
    assert paths.tree(aside) == before
    _save(checkpoints, 6, seed=60)
    assert checkpoints.latest() == 6
    _assert_is(checkpoints, 6, 60)


@pytest.mark.parametrize('object_missing', ['manifest', 'data'])
def test_a_committed_step_without_a_manifest(bucket, store, object_missing):
  with manager.Checkpoints(bucket) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  folder = paths.at(bucket) / '6'
  (folder / checksums.FILE).unlink()
  if object_missing == 'data':
    paths.at(f'{bucket}/6/data/metadata').unlink()
  with manager.Checkpoints(bucket) as checkpoints:
    assert checkpoints.latest() == (6 if object_missing == 'manifest' else 3)
    assert checksums.has_manifest(folder) == (object_missing == 'manifest')


def test_half_a_step_is_no_step_and_removed(bucket, store):
  with manager.Checkpoints(bucket) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  (paths.at(bucket) / '6' / step_folders.COMMITTED).unlink()
  assert step_folders.steps(paths.at(bucket)) == [3]
  assert manager.open_latest(bucket).step == 3
  with manager.Checkpoints(bucket) as checkpoints:
    assert store.names(f'{store.key(bucket)}/6/') == []
    assert checkpoints.latest() == 3
    _save(checkpoints, 6, seed=7)
    _assert_is(checkpoints, 6, 7)


def test_a_bucket_that_refuses_a_save_is_an_error(bucket, store):
  with manager.Checkpoints(bucket) as checkpoints:
    store.refuses = 403
    with pytest.raises(manager.CheckpointError, match='step 1 was not'):
      _save(checkpoints, 1)
    store.refuses = 0
    _save(checkpoints, 1)
    assert checkpoints.latest() == 1


def test_there_is_no_checkpoint(bucket):
  with pytest.raises(
    errors.UserError, match='no undamaged checkpoint in gs://'
  ):
    manager.open_latest(bucket)
