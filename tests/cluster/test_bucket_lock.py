"""The lock of a bucket is taken and lost by real processes."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import bucket_lock, lock
from encdec_adapt.files import paths
from tests import tiny

_OWNER = """
import sys, time
from encdec_adapt.cluster import bucket_lock
with bucket_lock.BucketLock(sys.argv[1], beat=0.2):
  print('held', flush=True)
  time.sleep(120)
"""


@contextlib.contextmanager
def _owner(folder):
  """A process that holds the lock."""
  process = subprocess.Popen(
    [sys.executable, '-c', _OWNER, folder],
    stdout=subprocess.PIPE,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
  )
  try:
    assert process.stdout.readline().strip() == 'held'
    yield process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def _forge(folder, **changes):
  """A lock of another process."""
  owner = {**bucket_lock.describe_this_process(), 'pid': 77, **changes}
  paths.write(paths.join(folder, lock.FILE), json.dumps(owner).encode())


def test_held_renewed_and_given_up(bucket, store):
  held = lock.hold(bucket)
  assert isinstance(held, bucket_lock.BucketLock)
  name = store.key(f'{bucket}/{lock.FILE}')
  with bucket_lock.BucketLock(bucket, beat=0.05):
    first = store.objects[name]
    owner = json.loads(first.data)
    assert owner['pid'] == os.getpid()
    assert owner['host'] == os.uname().nodename
    deadline = time.monotonic() + 30
    while store.objects[name].generation == first.generation:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    later = json.loads(store.objects[name].data)
    assert later.pop('heartbeat') > owner.pop('heartbeat')
    assert later == owner
  assert name not in store.objects
  with held:
    assert name in store.objects


def test_a_look_that_takes_long_is_no_sign_of_death(bucket, monkeypatch):
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
    bucket_lock.BucketLock(bucket, beat=0.05, stale=0.3).acquire()


def test_a_second_job_is_told_who_holds_it_and_killed_ones_do_not(bucket):
  with _owner(bucket) as process:
    with pytest.raises(errors.UserError) as caught:
      lock.hold(bucket).acquire()
    assert f'process {process.pid} on {os.uname().nodename}' in str(
      caught.value
    )
    process.kill()
    process.wait()
    began = time.monotonic()
    with lock.hold(bucket):
      pass
    assert time.monotonic() - began < bucket_lock.STALE / 2


def test_a_dead_job_of_another_machine_is_waited_for(bucket, capfd):
  _forge(bucket, machine='elsewhere')
  began = time.monotonic()
  with bucket_lock.BucketLock(bucket, beat=0.2, stale=1.0):
    assert time.monotonic() - began > 1.0
  said = capfd.readouterr().err
  assert 'was locked by process 77' in said and 'took over' in said


def test_a_damaged_lock_is_of_somebody_unknown(bucket):
  paths.write(paths.join(bucket, lock.FILE), b'[')
  with bucket_lock.BucketLock(bucket, beat=0.2, stale=0.5):
    pass


def test_of_two_that_take_over_one_wins(bucket):
  _forge(bucket, machine='elsewhere')
  first, second = (
    bucket_lock.BucketLock(bucket, beat=10.0, stale=0.1) for _ in range(2)
  )
  second._store = paths.key_value_store(second.folder)
  second._owner = bucket_lock.describe_this_process()
  seen = second._store.read(lock.FILE).result().stamp.generation
  with first:
    assert not second._take(seen)


@pytest.mark.parametrize(
  'how, status',
  # Launchers start a job again whose bucket was away, not one that another
  # job has replaced.
  [('taken', app.USER_ERROR), ('unreachable', app.HANG)],
)
def test_an_owner_that_lost_its_lock_ends(bucket, store, how, status, capfd):
  ended = []
  held = bucket_lock.BucketLock(bucket, beat=0.1, stale=0.5, end=ended.append)
  held.acquire()
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
    held.release()
