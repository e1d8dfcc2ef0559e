"""Saves, manifests, damage, retention and partial restore of checkpoints."""

import errno
import functools
import itertools
import pathlib
import resource
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checkpoint_section, checksums, manager
from encdec_adapt.checkpoints.orbax_folder import OrbaxFolder
from encdec_adapt.files import paths

_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@flax.struct.dataclass
class _State:
  step: jax.Array
  params: dict
  groups: dict
  key: jax.Array


def _open(folder, **keys):
  """Opens checkpoints with these keys of `config.checkpoint`."""
  config = checkpoint_section.CheckpointConfig(**keys)
  return manager.Checkpoints(folder, config)


def _sharding(mesh_shape, *axes):
  mesh = jax.make_mesh(
    mesh_shape, ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def _make(seed):
  key = jax.random.key(seed)
  params = {
    'decoder': {
      'kernel': jax.random.normal(key, (8, 16)),
      'scale': jnp.arange(16, dtype=jnp.bfloat16),
    },
    'encoder': {'kernel': jax.random.normal(key, (16, 8))},
  }
  # Optimizer state under flat paths, as training keeps it.
  flat = {'decoder/kernel': params['decoder']['kernel'] + 1}
  return _State(
    step=jnp.asarray(seed, jnp.int32),
    params=params,
    groups={'all': _OPTIMIZER.init(flat)},
    key=key,
  )


@functools.cache
def _maker(mesh_shape):
  shardings = jax.tree.map(lambda leaf: leaf.sharding, _abstract(mesh_shape))
  return jax.jit(_make, out_shardings=shardings)


def _state(seed, mesh_shape=(4, 2)):
  return _maker(mesh_shape)(seed)


def _abstract(mesh_shape=(4, 2)):
  def place(leaf):
    axes = ('fsdp', 'tensor') if len(leaf.shape) == 2 else ()
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=_sharding(mesh_shape, *axes)
    )

  return jax.tree.map(place, jax.eval_shape(lambda: _make(0)))


def _plain(tree):
  def plain(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)

  return jax.tree.map(plain, tree)


def _assert_equal(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(np.testing.assert_array_equal, _plain(left), _plain(right))


def _save(checkpoints, step, seed=None, loss=None):
  seed = step if seed is None else seed
  content = {'data': {'row': 8 * step}, 'meta': {'seed': seed}}
  checkpoints.save(step, _state(seed), **content, loss=loss)
  checkpoints.wait()


def _save_steps(folder, *steps):
  with manager.Checkpoints(folder) as checkpoints:
    for step in steps:
      _save(checkpoints, step)


@pytest.fixture(params=['disk', 'bucket'])
def place(request, tmp_path):
  """A folder of either kind."""
  if request.param == 'disk':
    return tmp_path
  return paths.at(request.getfixturevalue('bucket'))


@pytest.mark.long
def test_the_best_of_all_steps_is_kept_and_opened(place, capsys):
  losses = {1: 3.0, 2: 1.5, 3: None, 4: 1.5, 5: 2.0, 6: float('nan')}
  with _open(place, keep=1, keep_best=True) as checkpoints:
    for step in (1, 2, 3):
      _save(checkpoints, step, loss=losses[step])
  # As after a kill: nothing is remembered.
  with _open(place, keep=1, keep_best=True) as checkpoints:
    assert checkpoints.latest().step == 3
    for step in (4, 5, 6):
      _save(checkpoints, step, loss=losses[step])
    assert checkpoints.all_steps() == [2, 6]
  best = manager.open_best(place)
  assert (best.step, best.read_loss()) == (2, 1.5)
  _flip(_largest(place / '2' / 'state'))
  newest = manager.open_best(place)
  assert (newest.step, newest.read_loss()) == (6, None)
  assert f'skipping {place / "2"}' in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize('keep_best, used', [(False, 3), (True, 2)])
def test_discarded_steps_are_neither_the_best_nor_the_newest(
  place, keep_best, used
):
  with _open(place, keep=9, keep_best=keep_best) as checkpoints:
    for step, loss in {2: 2.0, 3: 3.0, 4: 1.0}.items():
      _save(checkpoints, step, loss=loss)
    assert checkpoints.discard(4) == used
    assert checkpoints.all_steps() == [2, 3]
    assert checkpoints.discard(2) is None and not checkpoints.all_steps()


def _largest(folder):
  files = [folder / name for name in paths.tree(folder)]
  return max(files, key=paths.size)


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


def test_round_trip_of_the_newest_and_every_third(place):
  with _open(place, keep=2, keep_every=3) as checkpoints:
    assert checkpoints.latest() is None
    for step in range(1, 6):
      _save(checkpoints, step)
    assert checkpoints.all_steps() == [3, 4, 5]
  assert {name.split('/')[0] for name in paths.tree(place)} == {'3', '4', '5'}
  with manager.Checkpoints(place) as checkpoints:
    assert checkpoints.latest().step == 5
    restored = checkpoints.at(5).restore(_abstract())
    _assert_equal(restored, _state(5))
    assert checkpoints.at(5).read_data() == {'row': 40}
    assert checkpoints.at(5).read_meta() == {'seed': 5}


@pytest.fixture
def saved(tmp_path):
  """A folder with steps 3 and 6."""
  _save_steps(tmp_path, 3, 6)
  return tmp_path


@pytest.mark.sharded
@pytest.mark.parametrize('mesh_shape', [(2, 4), (1, 1), (8, 1)])
def test_restore_onto_another_mesh(tmp_path, mesh_shape):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 5)
    restored = checkpoints.at(5).restore(_abstract(mesh_shape))
  _assert_equal(restored, _state(5))
  kernel = restored.params['decoder']['kernel']
  assert kernel.sharding == _sharding(mesh_shape, 'fsdp', 'tensor')


def test_the_old_step_is_there_until_the_new_one_is_complete(
  tmp_path, monkeypatch
):
  def fail(_):
    raise OSError('no manifest today')

  with _open(tmp_path, keep=1) as checkpoints:
    _save(checkpoints, 1)
    monkeypatch.setattr(checksums, 'write', fail)
    with pytest.raises(manager.CheckpointError, match='no manifest today'):
      _save(checkpoints, 2)
    assert checkpoints.all_steps() == [1, 2]


def test_a_damaged_step_is_moved_aside_and_saved_again(place, capsys):
  _save_steps(place, 3, 6)
  before = paths.tree(place / '6')
  _flip(_largest(place / '6' / 'state'))
  with manager.Checkpoints(place) as checkpoints:
    assert checkpoints.latest().step == 3
    assert 'step 6 is damaged' in capsys.readouterr().err
    assert paths.tree(place / 'damaged-00000006') == before
    assert checkpoints.all_steps() == [3]
    _save(checkpoints, 6, seed=60)
  with manager.Checkpoints(place) as checkpoints:
    assert checkpoints.latest().step == 6
    _assert_equal(checkpoints.at(6).restore(_abstract()), _state(60))


def test_a_readable_step_without_a_manifest_gets_one(place):
  _save_steps(place, 6)
  (place / '6' / checksums.FILE).unlink()
  with manager.Checkpoints(place) as checkpoints:
    assert checkpoints.latest().step == 6
    assert checksums.problems(place / '6') == []
    _assert_equal(checkpoints.at(6).restore(_abstract()), _state(6))


@pytest.mark.parametrize('damage', [_truncate, pathlib.Path.unlink])
@pytest.mark.parametrize('item', ['state', 'data'])
def test_an_unreadable_step_without_a_manifest_is_moved_aside(
  saved, damage, item
):
  (saved / '6' / checksums.FILE).unlink()
  # The contents themselves, not the descriptions beside them.
  folder = saved / '6' / item
  damage(_largest(folder / 'd') if item == 'state' else folder / 'metadata')
  with manager.Checkpoints(saved) as checkpoints:
    assert checkpoints.latest().step == 3
    assert (saved / 'damaged-00000006').is_dir()


def test_a_step_that_the_disk_cannot_read_is_not_moved(saved, monkeypatch):
  path = saved / '6' / 'meta' / 'metadata'
  entry = checksums._entry

  def stale(name, *arguments, **options):
    if name == path:
      raise OSError(errno.ESTALE, 'Stale file handle')
    return entry(name, *arguments, **options)

  with manager.Checkpoints(saved) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(checksums, '_entry', stale)
      said = f'{path} cannot be read .Stale file handle.'
      with pytest.raises(errors.UserError, match=said):
        checkpoints.latest()
    assert checkpoints.latest().step == 6


def test_leftovers_of_kills_are_removed(saved):
  (saved / '9.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  (saved / 'deleting-00000001' / 'state').mkdir(parents=True)
  with manager.Checkpoints(saved) as checkpoints:
    assert sorted(path.name for path in saved.iterdir()) == ['3', '6']
    assert checkpoints.latest().step == 6


@pytest.mark.parametrize('step', [6, 5])
def test_a_step_that_is_there_is_not_saved_silently(saved, step):
  with manager.Checkpoints(saved) as checkpoints:
    with pytest.raises(manager.CheckpointError, match='holds step 6'):
      _save(checkpoints, step)


def test_a_save_that_the_disk_refuses_is_an_error(tmp_path, capfd):
  state = {'x': jax.random.normal(jax.random.key(0), (512, 512))}
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  with manager.Checkpoints(tmp_path) as checkpoints:
    try:
      # Stands for a full disk: no file may grow beyond this.
      resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
      with pytest.raises(errors.UserError, match=f'{tmp_path} is full'):
        checkpoints.save(1, state, data={}, meta={})
        checkpoints.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.latest() is None
  assert capfd.readouterr().err == ''


def test_a_clock_that_jumps_forwards_fails_no_save(tmp_path, monkeypatch):
  clock = itertools.count(time.time(), 86_400.0)
  with manager.Checkpoints(tmp_path) as checkpoints:
    monkeypatch.setattr(time, 'time', lambda: next(clock))
    _save(checkpoints, 1)
    assert checkpoints.latest().step == 1


@pytest.mark.parametrize('name', ['[!a]', 'a**', 'a?', 'a\\b', 'a\udcff'])
def test_a_path_that_orbax_cannot_read_is_refused(tmp_path, name):
  for use in (manager.Checkpoints, manager.open_latest, OrbaxFolder):
    with pytest.raises(errors.UserError, match='below it cannot be read'):
      use(tmp_path / name)


@pytest.mark.parametrize('item', ['state/_METADATA', 'state/d', 'meta'])
def test_a_save_that_cannot_be_read_back_is_an_error(
  tmp_path, monkeypatch, item
):
  def lose():  # After the commit, before the manifest.
    if (path := tmp_path / '1' / item).exists():
      path.rename(tmp_path / 'lost')
    return True

  monkeypatch.setattr(manager.distributed, 'is_lead', lose)
  with manager.Checkpoints(tmp_path) as checkpoints:
    with pytest.raises(manager.CheckpointError, match='step 1 was not saved'):
      _save(checkpoints, 1)


def test_steps_that_the_job_deletes_meanwhile_are_chosen_again(
  saved, monkeypatch
):
  compare, names = checksums.problems, iter(('3', '6'))

  def compare_late(folder):
    for name in names:  # At the first call alone.
      (saved / name).rename(saved / f'{name}0')
    return compare(folder)

  monkeypatch.setattr(checksums, 'problems', compare_late)
  assert manager.open_latest(saved).step == 60


def test_a_checkpoint_of_another_model_names_leaves(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 6)
    wanted = _abstract()
    wanted.params['decoder']['kernel'] = jax.ShapeDtypeStruct(
      (8, 8), jnp.float32, sharding=_sharding((4, 2))
    )
    wanted.params['extra'] = wanted.step
    del wanted.params['encoder']
    with pytest.raises(errors.UserError) as caught:
      checkpoints.at(6).restore(wanted)
  message = str(caught.value)
  assert (
    'params/decoder/kernel is float32[8, 16] in the checkpoint and'
    ' float32[8, 8] here'
  ) in message
  assert 'params/extra is not in the checkpoint' in message
  assert 'params/encoder/kernel is only in the checkpoint' in message


def test_parameters_alone_and_cast(tmp_path):
  _save_steps(tmp_path / manager.FOLDER, 3, 6)
  wanted = {
    'decoder': {
      'kernel': jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
      'scale': jax.ShapeDtypeStruct(
        (16,), jnp.float32, sharding=_sharding((4, 2), 'fsdp')
      ),
    }
  }
  kernel = _state(6).params['decoder']['kernel'].astype(jnp.bfloat16)
  for path in ('', 'checkpoints'):
    restored = manager.open_latest(tmp_path / path).restore_params(wanted)
    np.testing.assert_array_equal(restored['decoder']['kernel'], kernel)
    np.testing.assert_array_equal(restored['decoder']['scale'], np.arange(16))
    assert restored['decoder']['scale'].sharding == _sharding((4, 2), 'fsdp')
  older = manager.open_step(tmp_path, 3)
  assert older.read_meta() == {'seed': 3}
  wanted['decoder']['kernel'] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
  with pytest.raises(errors.UserError, match='params/decoder/kernel'):
    older.restore_params(wanted)


def test_a_reader_skips_damage_and_changes_nothing(saved, capsys):
  _flip(_largest(saved / '6' / 'state'))
  before = paths.tree(saved)
  assert manager.open_latest(saved).step == 3
  assert 'skipping' in capsys.readouterr().err
  with pytest.raises(
    errors.UserError, match='@6 has no undamaged checkpoint; .* the steps'
  ):
    manager.open_step(saved, 6)
  with pytest.raises(errors.UserError, match='@4 has no .* the steps 3, 6'):
    manager.open_step(saved, 4)
  with pytest.raises(errors.UserError, match='no undamaged checkpoint'):
    manager.open_latest(saved / 'nothing')
  assert paths.tree(saved) == before


def test_no_space(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    checkpoints.require_space(_abstract(), [1, 2, 3])
    vast = {'x': jax.ShapeDtypeStruct((2**47,), jnp.float32)}
    with pytest.raises(errors.UserError, match='free, but 3 checkpoints need'):
      checkpoints.require_space(vast, [1, 2, 3, 4, 5])
    _save(checkpoints, 1)
    with pytest.raises(errors.UserError, match='free, but 2 checkpoints need'):
      checkpoints.require_space(vast, [1, 2, 3, 4, 5])
    checkpoints.require_space(vast, [1])  # It is there.
