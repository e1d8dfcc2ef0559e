"""The lock is taken and lost by real processes."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.cluster import lock
from encdec_adapt.files import disk

_OWNER = """
import sys, time
from encdec_adapt.cluster import lock
with lock.WorkdirLock(sys.argv[1]):
  {more}
  print('held', flush=True)
  time.sleep(120)
"""

_FORK = """
  import os
  ready, tell = os.pipe()
  child = os.fork()
  if not child:
    os.write(tell, b'.')  # Only now it runs, and has let the lock go.
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
  """A process that holds the lock; yields it and its child's pid, if any."""
  process = subprocess.Popen(
    [sys.executable, '-c', _OWNER.format(more=more.strip()), str(folder)],
    stdout=subprocess.PIPE,
    text=True,
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


def test_a_second_job_is_told_who_holds_the_folder(tmp_path):
  with _owner(tmp_path) as (process, _):
    with pytest.raises(errors.UserError) as caught:
      lock.WorkdirLock(tmp_path).acquire()
    message = str(caught.value)
    assert f'process {process.pid} on {os.uname().nodename}' in message
    assert time.strftime('started %Y-') in message
    assert str(tmp_path) in message


def test_sigkill_frees_the_lock_at_once(tmp_path):
  with _owner(tmp_path) as (process, _):
    process.send_signal(signal.SIGKILL)
    process.wait()
    with lock.WorkdirLock(tmp_path):
      pass


@pytest.mark.parametrize('more', [_FORK, _SPAWN], ids=['forked', 'started'])
def test_a_child_that_outlives_its_owner_does_not_hold_it(tmp_path, more):
  with _owner(tmp_path, more) as (process, child):
    with pytest.raises(errors.UserError):
      lock.WorkdirLock(tmp_path).acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # It is alive.
    with lock.WorkdirLock(tmp_path):
      pass


def test_released_and_taken_again_in_one_process(tmp_path):
  first, second = lock.WorkdirLock(tmp_path), lock.WorkdirLock(tmp_path)
  with first:
    with pytest.raises(errors.UserError, match=f'process {os.getpid()} '):
      second.acquire()
  with second:
    pass
  second.release()


def test_an_owner_that_has_not_written_yet(tmp_path):
  with lock.WorkdirLock(tmp_path):
    (tmp_path / lock.FILE).write_bytes(b'')
    with pytest.raises(errors.UserError, match='only just started'):
      lock.WorkdirLock(tmp_path).acquire()


@contextlib.contextmanager
def _unprivileged():
  """Root may write anywhere; nobody may not."""
  if os.geteuid() != 0:
    yield
    return
  os.seteuid(65534)
  try:
    yield
  finally:
    os.seteuid(0)


def test_a_read_only_folder(tmp_path):
  folder = tmp_path / 'work'
  folder.mkdir(mode=0o555)
  for path in (folder, folder / 'below'):
    with _unprivileged():
      with pytest.raises(errors.UserError, match='cannot be written'):
        lock.WorkdirLock(path).acquire()


def test_a_full_disk(tmp_path):
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
  try:
    with pytest.raises(errors.UserError) as caught:
      lock.WorkdirLock(tmp_path).acquire()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert 'is full' in str(caught.value)
  assert [path.name for path in pathlib.Path(tmp_path).iterdir()] == []


def test_a_file_in_the_way(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot be written'):
    disk.require_writable(tmp_path / 'file' / 'work')


def test_space(tmp_path):
  disk.require_space(tmp_path / 'not' / 'there', 1, what='the records')
  with pytest.raises(errors.UserError, match='the records need 1.0 PiB'):
    disk.require_space(tmp_path, 2**50, what='the records')


@pytest.mark.parametrize(
  'nbytes, text',
  [
    (0, '0 bytes'),
    (1023, '1023 bytes'),
    (1024, '1.0 KiB'),
    (3 * 2**29, '1.5 GiB'),
    (2**60, '1024.0 PiB'),
  ],
)
def test_format_bytes(nbytes, text):
  assert disk.format_bytes(nbytes) == text
