"""Paths and commits, on a file system and in a bucket of a fake store."""

import importlib.util
import os
import re
import types

from etils import epath
from gcsfs import retry
import pytest

from encdec_adapt.base import errors, exit_status
from encdec_adapt.files import disk, paths
from tests import tiny


@pytest.fixture(params=['file system', 'bucket'])
def folder(request, tmp_path):
  if request.param == 'bucket':
    return paths.at(request.getfixturevalue('bucket'))
  return tmp_path


def _fill(folder):
  contents = {'a': b'\r\n', 'b/c': b'two' * 1000, 'b/d/e': b''}
  for name, data in contents.items():
    paths.write(folder / name, data)
  return contents


def test_joined_and_absolute_paths(tmp_path, bucket, monkeypatch):
  assert paths.join('gs://b/x/', 'y', 'z') == 'gs://b/x/y/z'
  assert paths.join('x', 'y', 'z') == 'x/y/z'
  monkeypatch.chdir(tmp_path)
  assert paths.absolute('x/../y') == tmp_path / 'y'
  assert str(paths.absolute(bucket)) == bucket
  assert isinstance(paths.at(bucket), epath.Path)


@pytest.mark.parametrize(
  'path, message', [('s3://b/x', 's3://b/x is no path'), ('gs://', 'gs://BUC')]
)
def test_other_stores_are_refused(path, message):
  with pytest.raises(errors.UserError, match=message):
    paths.at(path)


def test_files_are_written_copied_and_removed(folder, tmp_path):
  contents = _fill(folder / 'x')
  assert paths.tree(folder / 'x') == sorted(contents)
  assert paths.size(folder / 'x' / 'b' / 'c') == 3000
  paths.write(folder / 'x' / 'a', b'other')
  assert (folder / 'x' / 'a').read_bytes() == b'other'
  for name, data in contents.items():
    paths.write(folder / 'x' / name, data)
    paths.copy(folder / 'x' / name, tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == data
    paths.copy(tmp_path / 'copy', folder / 'again')
    assert (folder / 'again').read_bytes() == data
  paths.move(folder / 'x', folder / 'y')
  assert not (folder / 'x').exists()
  assert paths.tree(folder / 'y') == sorted(contents)
  paths.remove(folder / 'y')
  paths.remove(folder / 'y')
  assert not (folder / 'y').exists() and (folder / 'again').exists()


def test_a_large_object_arrives_in_parts(store, bucket, tmp_path):
  data = os.urandom(6 << 20)
  (tmp_path / 'x').write_bytes(data)
  paths.copy(tmp_path / 'x', paths.join(bucket, 'x'))
  assert store.objects[store.key(f'{bucket}/x')].data == data
  path = paths.at(bucket) / 'x'
  assert paths.read_range(path, 5 << 20, 1 << 20) == data[5 << 20 :]
  with pytest.raises(OSError, match='ends 1 bytes too early'):
    paths.read_range(path, 5 << 20, (1 << 20) + 1)
  paths.copy(path, tmp_path / 'y')
  assert (tmp_path / 'y').read_bytes() == data


def test_another_hosts_objects_are_seen_at_once(store, bucket):
  folder = paths.at(bucket)
  assert not folder.exists() and not (folder / 'x').exists()
  store.put(store.key(f'{bucket}/x'), b'1')
  assert (folder / 'x').exists()
  assert [path.name for path in folder.iterdir()] == ['x']
  store.put(store.key(f'{bucket}/x'), b'2')
  store.put(store.key(f'{bucket}/y'), b'')
  assert (folder / 'x').read_bytes() == b'2'
  assert sorted(path.name for path in folder.iterdir()) == ['x', 'y']


def test_markers_are_uploaded_last_and_removed_first(store, bucket, tmp_path):
  folder = paths.at(bucket)
  _fill(tmp_path / 'draft')
  paths.write(folder / 'xy' / 'a', b'')  # Of another folder.

  def requests(method, function, *arguments, **options):
    start = len(store.requests)
    function(*arguments, **options)
    return [r for r in store.requests[start:] if r.startswith(method)]

  upload = paths.upload, tmp_path / 'draft', folder / 'x', 'a'
  assert len(requests('POST', *upload)) == 3
  assert paths.tree(folder / 'x') == paths.tree(tmp_path / 'draft')
  generations = {n: o.generation for n, o in store.objects.items()}
  newest = max(generations, key=generations.get)
  assert newest == store.key(f'{bucket}/x/a')
  (folder / 'x' / 'a').unlink()
  assert len(requests('POST', *upload)) == 1  # The others are there.
  removed = requests('DELETE', paths.remove, folder / 'x', markers=('a',))
  assert removed[0].endswith('/x/a') and len(removed) == 3
  assert not (folder / 'x').exists()


def test_a_bucket_that_may_not_be_written(store, bucket):
  folder = paths.at(bucket)
  store.refuses = 403
  try:
    with pytest.raises(errors.UserError, match='cannot be written'):
      disk.require_writable(folder)
  finally:
    store.refuses = 0


@pytest.mark.parametrize(
  'name, refuses, status, words',
  [
    ('absent', 0, exit_status.USER_ERROR, 'there is none of this name'),
    ('bucket', 401, exit_status.USER_ERROR, 'refused, 401.*Log in'),
    ('bucket', 403, exit_status.USER_ERROR, 'Forbidden.* Log in'),
    # Launchers start the job again.
    ('bucket', 503, exit_status.HANG, 'does not answer .*503'),
  ],
)
def test_a_bucket_that_is_absent_refuses_or_fails(
  store, bucket, monkeypatch, capfd, name, refuses, status, words
):
  async def sleep(seconds):
    """Does not wait between the tries of a request."""

  monkeypatch.setattr(retry, 'asyncio', types.SimpleNamespace(sleep=sleep))
  paths._reach.cache_clear()
  store.refuses = refuses
  try:
    with pytest.raises(SystemExit) as ended:
      exit_status.guard(paths.at, f'gs://{name}/x')
  finally:
    store.refuses = 0
  (line,) = capfd.readouterr().err.splitlines()
  assert ended.value.code == status and re.search(words, line)


def test_missing_gcsfs_is_a_user_error(monkeypatch):
  paths._connect.cache_clear()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(errors.UserError, match=r'pip install .*\[gcs\]'):
    paths.at('gs://b/x')


def test_buckets_do_not_import_tensorflow(store, bucket):
  """Even if etils has looked for it before."""
  code = """
import sys
from etils import epath
epath.Path('/').exists()
from encdec_adapt.files import paths as storage
folder = storage.at(sys.argv[1])
storage.write(folder / 'x', b'1')
assert [p.name for p in folder.iterdir()] == ['x']
assert not [m for m in sys.modules if m.startswith('tensorflow')]
"""
  done = tiny.run_code(code, bucket)
  assert done.returncode == 0, done.stderr
