"""Locks of folders and buckets are taken and lost by real processes."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import lock
from encdec_adapt.files import disk, paths
from tests import tiny

_OWNER = """
import sys, time
from encdec_adapt.cluster import lock
with lock.hold(sys.argv[1]):
  {more}
  print('held', flush=True)
  time.sleep(120)
"""

_FORK = """
  import os
  ready, tell = os.pipe()
  child = os.fork()
  if not child:
    os.write(tell, b'.')  # It runs only now, after it has released the lock.
    time.sleep(120)
  os.read(ready, 1)
  print(child, flush=True)
"""

_SPAWN = """
  import subprocess
  print(subprocess.Popen(['sleep', '120'], close_fds=False).pid, flush=True)
"""


@contextlib.contextmanager
def _owner(folder, more='pass'):
  """Starts a process that holds the lock; yields it and its child's pid."""
  process = subprocess.Popen(
    [sys.executable, '-c', _OWNER.format(more=more.strip()), str(folder)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
  )
  child = None
  try:
    line = process.stdout.readline().strip()
    if line != 'held':
      child = int(line)
      assert process.stdout.readline().strip() == 'held'
    yield process, child
  finally:
    process.kill()
    process.wait()
    if child is not None:
      os.kill(child, signal.SIGKILL)
    process.stdout.close()


@pytest.mark.parametrize('place', ['folder', 'bucket'])
def test_a_second_job_is_told_who_holds_it_and_a_killed_one_does_not(
  tmp_path, place, request
):
  folder = tmp_path if place == 'folder' else request.getfixturevalue(place)
  with _owner(folder) as (process, _):
    with pytest.raises(errors.UserError) as caught:
      with lock.hold(folder):
        pass
    message = str(caught.value)
    assert f'process {process.pid} on {os.uname().nodename}' in message
    assert time.strftime('started %Y-') in message and str(folder) in message
    process.kill()
    process.wait()
    began = time.monotonic()
    with lock.hold(folder):
      assert time.monotonic() - began < lock.STALE / 2


@pytest.mark.parametrize('more', [_FORK, _SPAWN], ids=['forked', 'started'])
def test_a_child_that_outlives_its_owner_does_not_hold_it(tmp_path, more):
  with _owner(tmp_path, more) as (process, child):
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # It is alive.
    with lock.hold(tmp_path):
      pass


def test_released_and_taken_again_in_one_process(tmp_path):
  with lock.hold(tmp_path):
    with pytest.raises(errors.UserError, match=f'process {os.getpid()} '):
      with lock.hold(tmp_path):
        pass
    (tmp_path / lock.FILE).write_bytes(b'')  # As before an owner's first write.
    with pytest.raises(errors.UserError, match=r'process \? on'):
      with lock.hold(tmp_path):
        pass
  with lock.hold(tmp_path):
    pass


def test_a_folder_that_cannot_be_written(tmp_path):
  folder = tmp_path / 'work'
  folder.mkdir(mode=0o555)
  if root := os.geteuid() == 0:  # May write anywhere.
    os.seteuid(65534)
  try:
    for path in (folder, folder / 'below'):
      with pytest.raises(errors.UserError, match='cannot be written'):
        with lock.hold(path):
          pass
  finally:
    if root:
      os.seteuid(0)


def test_a_full_disk(tmp_path):
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
  try:
    with pytest.raises(errors.UserError, match='is full'):
      with lock.hold(tmp_path):
        pass
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not list(tmp_path.iterdir())


def test_space(tmp_path):
  disk.require_space(tmp_path / 'not' / 'there', 1, what='the records')
  with pytest.raises(errors.UserError, match='the records need 1.0 PiB'):
    disk.require_space(tmp_path, 2**50, what='the records')


def _forge(folder, **changes):
  """Writes the lock of another process."""
  owner = {**lock._describe_self(), 'pid': 77, **changes}
  paths.write(paths.join(folder, lock.FILE), json.dumps(owner).encode())


def test_a_bucket_lock_is_renewed_and_released(bucket, store):
  name = store.key(f'{bucket}/{lock.FILE}')
  with lock.BucketLock(bucket, beat=0.05):
    first = store.objects[name]
    deadline = time.monotonic() + 30
    while store.objects[name].generation == first.generation:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    owner, later = json.loads(first.data), json.loads(store.objects[name].data)
    assert later.pop('heartbeat') > owner.pop('heartbeat')
    assert later == owner
  assert name not in store.objects


def test_a_slow_answer_is_no_sign_of_death(bucket, monkeypatch):
  """The owner, on another machine, renews its lock all the time."""

  class Slow:
    """A bucket whose first answer is late."""

    def __init__(self, real):
      self._real, self._late = real, True

    def read(self, name):
      _forge(bucket, machine='another', heartbeat=time.time())
      found = self._real.read(name)
      if self._late:
        time.sleep(0.5)
      self._late = False
      return found

  real = paths.key_value_store
  monkeypatch.setattr(paths, 'key_value_store', lambda path: Slow(real(path)))
  with pytest.raises(errors.UserError, match='in use by another job'):
    with lock.BucketLock(bucket, beat=0.05, stale=0.3):
      pass


@pytest.mark.parametrize('damaged', [False, True])
def test_a_dead_job_of_another_machine_is_waited_for(bucket, capfd, damaged):
  _forge(bucket, machine='elsewhere')
  if damaged:
    paths.write(paths.join(bucket, lock.FILE), b'[')
  began = time.monotonic()
  with lock.BucketLock(bucket, beat=0.2, stale=0.6):
    assert time.monotonic() - began > 0.6
  assert 'took over' in capfd.readouterr().err


def test_of_two_that_take_over_one_wins(bucket):
  _forge(bucket, machine='elsewhere')
  second = lock.BucketLock(bucket)
  second._store = paths.key_value_store(second.folder)
  seen = second._store.read(lock.FILE).result().stamp.generation
  with lock.BucketLock(bucket, beat=10.0, stale=0.1):
    assert not second._write(seen)


@pytest.mark.parametrize(
  'how, status',
  # Launchers restart a job whose bucket was away, not one that another job
  # has replaced.
  [('taken', app.USER_ERROR), ('unreachable', app.HANG)],
)
def test_an_owner_that_lost_its_lock_ends(bucket, store, how, status, capfd):
  ended = []
  held = lock.BucketLock(bucket, beat=0.1, stale=0.5, end=ended.append)
  with held:
    try:
      if how == 'taken':
        _forge(bucket, machine='elsewhere')
      else:
        store.refuses = 403
      held._thread.join(30)
      assert ended == [status]
      assert 'is lost' in capfd.readouterr().err
    finally:
      store.refuses = 0
