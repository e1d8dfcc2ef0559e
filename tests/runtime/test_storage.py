"""Paths and commits, on a file system and in a bucket of a fake store."""

import importlib.util
import os

from etils import epath
import pytest

from encdec_adapt.interop import new_folder
from encdec_adapt.runtime import disk, errors, files, seals, storage
from tests import tiny


@pytest.fixture(params=['file system', 'bucket'])
def folder(request, tmp_path):
  if request.param == 'bucket':
    return storage.at(request.getfixturevalue('bucket'))
  return tmp_path


def _fill(folder):
  contents = {'a': b'one', 'b/c': b'two' * 1000, 'b/d/e': b''}
  for name, data in contents.items():
    storage.write(folder / name, data)
  return contents


def test_paths_are_joined_and_spelled_once(tmp_path, bucket, monkeypatch):
  assert storage.join('gs://b/x/', 'y', 'z') == 'gs://b/x/y/z'
  assert storage.join('x', 'y', 'z') == 'x/y/z'
  monkeypatch.chdir(tmp_path)
  assert storage.absolute('x/../y') == tmp_path / 'y'
  assert str(storage.absolute(bucket)) == bucket
  assert isinstance(storage.at(bucket), epath.Path)


@pytest.mark.parametrize(
  'path, message', [('s3://b/x', 's3://b/x is no path'), ('gs://', 'gs://BUC')]
)
def test_other_stores_are_refused(path, message):
  with pytest.raises(errors.UserError, match=message):
    storage.at(path)


@pytest.mark.parametrize(
  'data', [b'', b'\r', b'\n', b'x\r\n', b'\n\nx\r', b'\r\n\r\n']
)
def test_a_file_is_copied_whole_whatever_it_ends_in(data, bucket, tmp_path):
  (tmp_path / 'x').write_bytes(data)
  storage.copy(tmp_path / 'x', f'{bucket}/x')
  storage.copy(f'{bucket}/x', tmp_path / 'y')
  assert (tmp_path / 'y').read_bytes() == data


def test_files_are_written_copied_and_removed(folder, tmp_path):
  contents = _fill(folder / 'x')
  assert storage.tree(folder / 'x') == sorted(contents)
  assert storage.size(folder / 'x' / 'b' / 'c') == 3000
  storage.write(folder / 'x' / 'a', b'other')
  assert (folder / 'x' / 'a').read_bytes() == b'other'
  storage.copy(folder / 'x' / 'b' / 'c', tmp_path / 'copy')
  assert (tmp_path / 'copy').read_bytes() == contents['b/c']
  storage.copy(tmp_path / 'copy', folder / 'again')
  assert (folder / 'again').read_bytes() == contents['b/c']
  storage.move(folder / 'x', folder / 'y')
  assert not (folder / 'x').exists()
  assert storage.tree(folder / 'y') == sorted(contents)
  storage.remove(folder / 'y')
  storage.remove(folder / 'y')
  assert not (folder / 'y').exists() and (folder / 'again').exists()


def test_a_large_object_arrives_in_parts(store, bucket, tmp_path):
  data = os.urandom(6 << 20)
  (tmp_path / 'x').write_bytes(data)
  storage.copy(tmp_path / 'x', storage.join(bucket, 'x'))
  assert store.objects[store.key(f'{bucket}/x')].data == data
  path = storage.at(bucket) / 'x'
  assert storage.read_range(path, 5 << 20, 1 << 20) == data[5 << 20 :]
  with pytest.raises(OSError, match='ends 1 bytes too early'):
    storage.read_range(path, 5 << 20, (1 << 20) + 1)
  storage.copy(path, tmp_path / 'y')
  assert (tmp_path / 'y').read_bytes() == data


def test_another_hosts_objects_are_seen_at_once(store, bucket):
  folder = storage.at(bucket)
  assert not folder.exists() and not (folder / 'x').exists()
  store.put(store.key(f'{bucket}/x'), b'1')
  assert (folder / 'x').exists()
  assert [path.name for path in folder.iterdir()] == ['x']
  store.put(store.key(f'{bucket}/x'), b'2')
  store.put(store.key(f'{bucket}/y'), b'')
  assert (folder / 'x').read_bytes() == b'2'
  assert sorted(path.name for path in folder.iterdir()) == ['x', 'y']


def test_markers_go_first_and_come_last(store, bucket, tmp_path):
  folder = storage.at(bucket)
  _fill(tmp_path / 'draft')
  storage.write(folder / 'xy' / 'a', b'')  # Of another folder.
  start = len(store.requests)
  storage.upload(tmp_path / 'draft', folder / 'x', marker='a')
  written = [r for r in store.requests[start:] if r.startswith('POST')]
  assert storage.tree(folder / 'x') == storage.tree(tmp_path / 'draft')
  generations = {n: o.generation for n, o in store.objects.items()}
  newest = max(generations, key=generations.get)
  assert newest == store.key(f'{bucket}/x/a') and len(written) == 3
  (folder / 'x' / 'a').unlink()
  start = len(store.requests)
  storage.upload(tmp_path / 'draft', folder / 'x', marker='a')
  written = [r for r in store.requests[start:] if r.startswith('POST')]
  assert len(written) == 1  # The rest is there.
  start = len(store.requests)
  storage.remove(folder / 'x', markers=('a',))
  removed = [r for r in store.requests[start:] if r.startswith('DELETE')]
  assert removed[0].endswith('/x/a') and len(removed) == 3
  assert not (folder / 'x').exists()


def test_seals(folder):
  contents = _fill(folder)
  assert not seals.is_sealed(folder)
  seals.write(folder)
  assert seals.is_sealed(folder) and seals.problems(folder) == []
  storage.write(folder / 'later', b'')
  assert seals.problems(folder) == []
  storage.write(folder / 'b' / 'c', contents['b/c'][:-1] + b'x')
  storage.write(folder / 'a', b'longer')
  (folder / 'b' / 'd' / 'e').unlink()
  assert seals.problems(folder) == [
    'a has 6 bytes instead of 3',
    'b/c has other contents than were written',
    'b/d/e is missing',
  ]
  storage.write(folder / seals.FILE, b'{}')
  (problem,) = seals.problems(folder)
  assert problem.startswith('seal.json cannot be read')


@pytest.mark.parametrize('up', [True, False], ids=['to a bucket', 'from one'])
def test_a_seal_holds_where_its_folder_was_copied(bucket, tmp_path, up):
  there, here = storage.at(bucket), tmp_path / 'x'
  source, target = (here, there) if up else (there, here)
  _fill(source)
  seals.write(source)
  for name in storage.tree(source):
    (tmp_path / 'x' / name).parent.mkdir(parents=True, exist_ok=True)
    storage.copy(source / name, target / name)
  assert seals.problems(target) == []
  storage.write(target / 'a', b'two')
  assert seals.problems(target) == ['a has other contents than were written']


def test_a_folder_counts_once_its_marker_is_there(bucket, store):
  target = storage.join(bucket, 'model')
  with pytest.raises(ZeroDivisionError):
    with new_folder.new_folder(target) as draft:
      files.write_json(draft / 'config.json', {})
      1 / 0  # noqa: B018
  assert store.names(store.key(bucket)) == []
  with new_folder.new_folder(target) as draft:
    files.write_json(draft / 'config.json', {})
    storage.write(draft / 'sub' / 'weights', bytes(100))
  assert not draft.exists()
  assert storage.tree(storage.at(target)) == ['config.json', 'sub/weights']
  newest = max(store.objects, key=lambda n: store.objects[n].generation)
  assert newest.endswith('/model/config.json')
  with pytest.raises(errors.UserError, match='exists already'):
    with new_folder.new_folder(target):
      pass


def test_a_bucket_that_may_not_be_written(store, bucket):
  folder = storage.at(bucket)
  store.refuses = 403
  try:
    with pytest.raises(errors.UserError, match='cannot be written'):
      disk.require_writable(folder)
  finally:
    store.refuses = 0


def test_gcsfs_is_named_where_it_is_missing(monkeypatch):
  storage._connect.cache_clear()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(errors.UserError, match=r"'encdec_adapt\[gcs\]'"):
    storage.at('gs://b/x')


def test_tensorflow_is_not_taken_for_buckets(store, bucket):
  """Even where etils has looked for it before."""
  code = """
import sys
from etils import epath
epath.Path('/').exists()
from encdec_adapt.runtime import storage
folder = storage.at(sys.argv[1])
storage.write(folder / 'x', b'1')
assert [p.name for p in folder.iterdir()] == ['x']
assert not [m for m in sys.modules if m.startswith('tensorflow')]
"""
  done = tiny.run_code(code, bucket)
  assert done.returncode == 0, done.stderr
