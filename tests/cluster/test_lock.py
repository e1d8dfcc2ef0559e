"""Locks of folders and buckets are taken and lost by real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from encdec_adapt.base import errors, exit_status
from encdec_adapt.cluster import lock
from encdec_adapt.files import paths
from tests import tiny

_OWNER = """
import subprocess, sys, time
from encdec_adapt.cluster import lock
with lock.hold(sys.argv[1]):
  child = 0
  if sys.argv[2] == 'spawn':
    child = subprocess.Popen(['sleep', '120'], close_fds=False).pid
  print(child, flush=True)
  time.sleep(120)
"""


@contextlib.contextmanager
def _owner(folder, child='none'):
  """Starts a process that holds the lock; yields it and its child's pid."""
  process = subprocess.Popen(
    [sys.executable, '-c', _OWNER, str(folder), child],
    stdout=subprocess.PIPE,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
  )
  pid = int(process.stdout.readline())
  try:
    yield process, pid
  finally:
    process.kill()
    process.wait()
    if pid:
      os.kill(pid, signal.SIGKILL)
    process.stdout.close()


def test_a_killed_owner_releases_a_folder_even_if_its_child_lives(tmp_path):
  with _owner(tmp_path, 'spawn') as (process, pid):
    with pytest.raises(errors.UserError) as caught, lock.hold(tmp_path):
      pass
    message = str(caught.value)
    assert f'process {process.pid} on {os.uname().nodename}' in message
    assert time.strftime('started %Y-') in message and str(tmp_path) in message
    process.kill()
    process.wait()
    os.kill(pid, 0)  # The child is alive.
    with lock.hold(tmp_path):
      pass


def test_a_folder_is_released_and_taken_again_in_one_process(tmp_path):
  with lock.hold(tmp_path):
    with pytest.raises(errors.UserError, match=f'process {os.getpid()} '):
      with lock.hold(tmp_path):
        pass
    (tmp_path / lock.FILE).write_bytes(b'')  # Before the owner's first write.
    with pytest.raises(errors.UserError, match=r'process \? on'):
      with lock.hold(tmp_path):
        pass
  with lock.hold(tmp_path):
    pass


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(errors.UserError, match='cannot be written'):
    with lock.hold(tmp_path / 'file' / 'below'):
      pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  monkeypatch.setattr(lock, 'BEAT', 0.1)
  monkeypatch.setattr(lock, 'STALE', 0.5)


def _forge(bucket, content=None):
  """Writes the lock of another process."""
  content = content or json.dumps({'pid': 77, 'host': 'h', 'started': 'now'})
  paths.write(paths.join(bucket, lock.FILE), content.encode())


def test_a_bucket_lock_is_renewed_and_released(bucket, store):
  name = store.key(f'{bucket}/{lock.FILE}')
  with lock.BucketLock(bucket):
    first = store.objects[name]
    # An owner that renews its lock is alive.
    with pytest.raises(errors.UserError, match=f'process {os.getpid()} on'):
      with lock.BucketLock(bucket):
        pass
    owner, later = json.loads(first.data), json.loads(store.objects[name].data)
    assert later.pop('heartbeat') > owner.pop('heartbeat')
    assert later == owner
  assert name not in store.objects


@pytest.mark.parametrize('content', [None, '['], ids=['whole', 'damaged'])
def test_the_bucket_lock_of_a_dead_job_is_taken_over(bucket, capfd, content):
  _forge(bucket, content)
  began = time.monotonic()
  with lock.BucketLock(bucket):
    assert time.monotonic() - began > 0.5
  assert 'took over' in capfd.readouterr().err


def test_one_of_two_jobs_takes_over(bucket):
  _forge(bucket)
  second = lock.BucketLock(bucket)
  second._store = paths.key_value_store(second.folder)
  seen = second._store.read(lock.FILE).result().stamp.generation
  with lock.BucketLock(bucket):
    assert not second._write(seen)


@pytest.mark.parametrize(
  'how, status',
  # Launchers restart a job whose bucket was unreachable, not one that another
  # job has replaced.
  [('taken', exit_status.USER_ERROR), ('unreachable', exit_status.HANG)],
)
def test_an_owner_that_lost_its_lock_ends(
  bucket, store, how, status, capfd, monkeypatch
):
  ended = []
  monkeypatch.setattr(os, '_exit', ended.append)
  held = lock.BucketLock(bucket)
  with held:
    try:
      if how == 'taken':
        _forge(bucket)
      else:
        store.refuses = 403
      held._thread.join(30)
      assert ended == [status]
      assert 'is lost' in capfd.readouterr().err
    finally:
      store.refuses = 0
