"""Saves, manifests, damage, retention and partial restore of checkpoints."""

import errno
import functools
import json
import os
import pathlib
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from encdec_adapt.checkpoints import checksums, manager
from encdec_adapt.cli import errors

_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@flax.struct.dataclass
class _State:
  step: jax.Array
  params: dict
  groups: dict
  key: jax.Array


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


def _save(checkpoints, step, seed=None):
  seed = step if seed is None else seed
  checkpoints.save(
    step, _state(seed), data={'row': 8 * step}, meta={'seed': seed}
  )
  checkpoints.wait()


def _largest(folder):
  files = [path for path in folder.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


def _replace_by_a_folder(path):
  path.unlink()
  path.mkdir()


def test_round_trip_of_everything(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() is None
    _save(checkpoints, 5)
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.all_steps() == [5]
    assert checkpoints.latest() == 5
    restored = checkpoints.at(5).restore(_abstract())
    _assert_equal(restored, _state(5))
    assert checkpoints.at(5).read_data() == {'row': 40}
    assert checkpoints.at(5).read_meta() == {'seed': 5}


@pytest.mark.sharded
@pytest.mark.parametrize('mesh_shape', [(2, 4), (1, 1), (8, 1)])
def test_restore_onto_another_mesh(tmp_path, mesh_shape):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 5)
    restored = checkpoints.at(5).restore(_abstract(mesh_shape))
  _assert_equal(restored, _state(5))
  kernel = restored.params['decoder']['kernel']
  assert kernel.sharding == _sharding(mesh_shape, 'fsdp', 'tensor')


def test_buffers_may_be_donated_while_the_save_runs(tmp_path):
  def make(seed):
    return {'x': jax.random.normal(jax.random.key(seed), (256, 1024))}

  overwrite = jax.jit(lambda state: {'x': state['x'] * 0 - 1}, donate_argnums=0)
  with manager.Checkpoints(tmp_path, keep=4) as checkpoints:
    for step in range(4):
      state = make(step)
      checkpoints.save(step, state, data={}, meta={})
      for _ in range(3):
        state = overwrite(state)
      jax.block_until_ready(state)
    checkpoints.wait()
    for step in range(4):
      abstract = jax.eval_shape(make, 0)
      restored = checkpoints.at(step).restore(abstract)
      np.testing.assert_array_equal(restored['x'], make(step)['x'])


def test_keeps_the_newest_and_every_third(tmp_path):
  with manager.Checkpoints(tmp_path, keep=2, keep_every=3) as checkpoints:
    for step in range(1, 9):
      _save(checkpoints, step)
    assert checkpoints.all_steps() == [3, 6, 7, 8]
  left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
  assert left == {'3', '6', '7', '8'}


def test_the_old_step_is_there_until_the_new_one_is_complete(
  tmp_path, monkeypatch
):
  with manager.Checkpoints(tmp_path, keep=1) as checkpoints:
    _save(checkpoints, 1)

    def fail(folder):
      raise OSError('no manifest today')

    with monkeypatch.context() as patch:
      patch.setattr(checksums, 'write', fail)
      with pytest.raises(manager.CheckpointError, match='no manifest today'):
        _save(checkpoints, 2)
    assert checkpoints.all_steps() == [1, 2]
    _save(checkpoints, 3)
    assert checkpoints.latest() == 3


@pytest.mark.parametrize(
  'damage, said',
  [
    (_flip, 'other contents'),
    (_truncate, 'bytes instead of'),
    (pathlib.Path.unlink, 'is missing'),
    (_replace_by_a_folder, 'is a folder|bytes instead of'),
  ],
)
def test_damage_is_moved_aside_and_the_step_saved_again(
  tmp_path, capsys, damage, said
):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  damage(_largest(tmp_path / '6' / 'state'))
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() == 3
    warning = capsys.readouterr().err
    assert 'step 6 is damaged' in warning and re.search(said, warning)
    assert (tmp_path / 'damaged-00000006').is_dir()
    assert checkpoints.all_steps() == [3]
    _assert_equal(checkpoints.at(3).restore(_abstract()), _state(3))
    _save(checkpoints, 6, seed=60)
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() == 6
    _assert_equal(checkpoints.at(6).restore(_abstract()), _state(60))


def test_of_a_damaged_only_step_no_other_is_promised(tmp_path, capsys):
  with manager.Checkpoints(tmp_path, keep=1) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 5)
  _flip(_largest(tmp_path / '5' / 'state'))
  with manager.Checkpoints(tmp_path, keep=1) as checkpoints:
    checkpoints.check_not_lost()
    assert checkpoints.latest() is None
    with pytest.raises(errors.UserError, match='other contents'):
      checkpoints.check_not_lost()
  with manager.Checkpoints(tmp_path, keep=1) as checkpoints:
    assert checkpoints.latest() is None
    with pytest.raises(errors.UserError, match='damaged-00000005. Restore'):
      checkpoints.check_not_lost()
    (tmp_path / 'damaged-00000005').rename(tmp_path / 'elsewhere')
    checkpoints.check_not_lost()
  assert 'step 5 is damaged' in capsys.readouterr().err


def test_a_readable_step_without_a_manifest_gets_one(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 6)
  (tmp_path / '6' / checksums.FILE).unlink()
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() == 6
    assert checksums.problems(tmp_path / '6') == []
    _assert_equal(checkpoints.at(6).restore(_abstract()), _state(6))


@pytest.mark.parametrize('damage', [_truncate, pathlib.Path.unlink])
@pytest.mark.parametrize('item', ['state', 'data'])
def test_an_unreadable_step_without_a_manifest_is_moved_aside(
  tmp_path, damage, item
):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  (tmp_path / '6' / checksums.FILE).unlink()
  # The contents themselves, not the descriptions beside them.
  folder = tmp_path / '6' / item
  damage(_largest(folder / 'd') if item == 'state' else folder / 'metadata')
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() == 3
    assert (tmp_path / 'damaged-00000006').is_dir()


@pytest.mark.parametrize('complete', [True, False])
def test_what_the_disk_does_not_let_be_read_is_not_moved(
  tmp_path, monkeypatch, complete
):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 3)
  path = tmp_path / '3' / 'meta' / 'metadata'
  if not complete:
    (tmp_path / '3' / checksums.FILE).unlink()
    content = path.read_bytes()
    path.write_bytes(b'')

  entry = checksums._entry

  def stale(name, *arguments, **options):
    if name == path:
      raise OSError(errno.ESTALE, 'Stale file handle')
    return entry(name, *arguments, **options)

  with manager.Checkpoints(tmp_path) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(checksums, '_entry', stale)
      said = f'{path} cannot be read .Stale file handle.'
      with pytest.raises(errors.UserError, match=said):
        checkpoints.latest()
    if not complete:
      path.write_bytes(content)
    assert checkpoints.latest() == 3


def test_leftovers_of_kills_are_removed(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 3)
  (tmp_path / '6.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
  (tmp_path / 'deleting-00000001' / 'state').mkdir(parents=True)
  with manager.Checkpoints(tmp_path) as checkpoints:
    assert sorted(path.name for path in tmp_path.iterdir()) == ['3']
    assert checkpoints.latest() == 3


def test_a_step_that_is_there_is_not_saved_silently(tmp_path):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 6)
    for step in (6, 5):
      with pytest.raises(manager.CheckpointError, match='holds step 6'):
        _save(checkpoints, step)


def test_a_save_that_fails_in_the_background_is_an_error(tmp_path):
  state = {'x': jax.random.normal(jax.random.key(0), (512, 512))}
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  with manager.Checkpoints(tmp_path) as checkpoints:
    try:
      # Stands for a full disk: no file may grow beyond this.
      resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
      with pytest.raises(manager.CheckpointError, match='step 1 was not'):
        checkpoints.save(1, state, data={}, meta={})
        checkpoints.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.latest() is None
    checkpoints.save(1, state, data={}, meta={})
    assert checkpoints.latest() == 1


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
  with manager.Checkpoints(tmp_path / manager.FOLDER) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  wanted = {
    'decoder': {
      'kernel': jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
      'scale': jax.ShapeDtypeStruct(
        (16,), jnp.float32, sharding=_sharding((4, 2), 'fsdp')
      ),
    }
  }
  kernel = _state(6).params['decoder']['kernel'].astype(jnp.bfloat16)
  for path in ('', 'checkpoints', 'checkpoints/6'):
    restored = manager.open_latest(tmp_path / path).restore_params(wanted)
    np.testing.assert_array_equal(restored['decoder']['kernel'], kernel)
    np.testing.assert_array_equal(restored['decoder']['scale'], np.arange(16))
    assert restored['decoder']['scale'].sharding == _sharding((4, 2), 'fsdp')
  older = manager.open_latest(tmp_path / 'checkpoints' / '3')
  assert older.read_meta() == {'seed': 3}
  wanted['decoder']['kernel'] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
  with pytest.raises(errors.UserError, match='params/decoder/kernel'):
    older.restore_params(wanted)


def test_a_reader_passes_over_damage_and_changes_nothing(tmp_path, capsys):
  with manager.Checkpoints(tmp_path) as checkpoints:
    _save(checkpoints, 3)
    _save(checkpoints, 6)
  _flip(_largest(tmp_path / '6' / 'state'))
  before = sorted(tmp_path.rglob('*'))
  assert manager.open_latest(tmp_path).step == 3
  assert 'skipping' in capsys.readouterr().err
  with pytest.raises(errors.UserError, match='no undamaged checkpoint'):
    manager.open_latest(tmp_path / '6')
  with pytest.raises(errors.UserError, match='no undamaged checkpoint'):
    manager.open_latest(tmp_path / 'nothing')
  assert sorted(tmp_path.rglob('*')) == before


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


_SAVER = """
import itertools, sys
import jax.numpy as jnp
from encdec_adapt.checkpoints import manager as checkpoint
checkpoints = checkpoint.Checkpoints(sys.argv[1])
first = (checkpoints.latest() or 0) + 1
for step in itertools.count(first):
  state = {'x': jnp.full((64, 64), step, jnp.float32)}
  checkpoints.save(step, state, data={'row': step}, meta={})
  print(step, flush=True)
"""


@pytest.mark.resume
def test_sigkill_at_any_moment_leaves_a_sound_step(tmp_path):
  reached = 0
  for attempt in range(2):
    saver = subprocess.Popen(
      [sys.executable, '-c', _SAVER, str(tmp_path)],
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(3):
      reached = int(saver.stdout.readline())
    time.sleep(random.Random(attempt).uniform(0, 0.1))
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    saver.stdout.close()
    with manager.Checkpoints(tmp_path) as checkpoints:
      step = checkpoints.latest()
      # Step n is announced when step n - 1 is complete.
      assert step >= reached - 1
      abstract = {'x': jax.ShapeDtypeStruct((64, 64), jnp.float32)}
      restored = checkpoints.at(step).restore(abstract)
      assert (np.asarray(restored['x']) == step).all()
      assert checkpoints.at(step).read_data() == {'row': step}
  assert not list(tmp_path.glob('damaged-*'))


_MEMBER = """
import json, sys
import jax
jax.config.update('jax_num_cpu_devices', 2)
import numpy as np
from encdec_adapt.cluster import distributed
from encdec_adapt.checkpoints import manager as checkpoint
distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
mesh = jax.make_mesh(
  (4,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
make = jax.jit(
  lambda value: {'x': jax.numpy.arange(8.) + value}, out_shardings=rows)
abstract = {'x': jax.ShapeDtypeStruct((8,), np.float32, sharding=rows)}
found = []
with checkpoint.Checkpoints(sys.argv[1], keep=2) as checkpoints:
  for step in (1, 2, 3):
    checkpoints.save(step, make(step), data={}, meta={})
  found.append(checkpoints.latest())
  if distributed.is_lead():
    with open(sys.argv[1] + '/3/state/_METADATA', 'a') as file:
      file.write(' ')
with checkpoint.Checkpoints(sys.argv[1], keep=2) as checkpoints:
  found.append(checkpoints.latest())
  state = checkpoints.at(found[-1]).restore(abstract)
  checkpoints.save(3, make(30), data={}, meta={})
  found.append(checkpoints.latest())
  state = checkpoints.at(3).restore(abstract)
local = [float(shard.data[0]) for shard in state['x'].addressable_shards]
print(json.dumps({'found': found, 'local': local}))
"""


@pytest.mark.multiproc
def test_two_processes_save_verify_and_agree(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  members = [
    subprocess.Popen(
      [sys.executable, '-c', _MEMBER, str(tmp_path), address, str(index)],
      stdout=subprocess.PIPE,
      text=True,
      env=_environment_without_fake_devices(),
    )
    for index in range(2)
  ]
  outputs = [member.communicate(timeout=120)[0] for member in members]
  assert [member.returncode for member in members] == [0, 0]
  results = [json.loads(output.splitlines()[-1]) for output in outputs]
  assert [result['found'] for result in results] == [[3, 2, 3]] * 2
  assert sorted(sum((r['local'] for r in results), [])) == [30, 32, 34, 36]
  with manager.Checkpoints(tmp_path) as checkpoints:
    restored = checkpoints.at(3).restore(
      {'x': jax.ShapeDtypeStruct((8,), jnp.float32)}
    )
  np.testing.assert_array_equal(restored['x'], np.arange(8) + 30)


def _environment_without_fake_devices():
  return {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
