"""Folders appear whole or not at all, whatever happens meanwhile."""

import os

import pytest

from encdec_adapt.base import errors
from encdec_adapt.files import paths
from encdec_adapt.huggingface import new_folder


def make(path, *names):
  with new_folder.new_folder(path) as draft:
    (draft / 'sub').mkdir()
    for name in ('sub/file', *names):
      (draft / name).write_text(f'content of {name}')
    if not paths.is_bucket(path):
      assert draft.parent == path.resolve().parent
      assert not (path / 'sub').exists()
  assert not draft.exists()


def test_a_folder_appears_with_its_content(tmp_path):
  path = tmp_path / 'above' / 'out'
  make(path)
  assert (path / 'sub' / 'file').read_text() == 'content of sub/file'
  assert os.listdir(path.parent) == ['out']
  (tmp_path / 'plain').mkdir()
  assert path.stat().st_mode == (tmp_path / 'plain').stat().st_mode


def test_an_empty_folder_and_a_link_to_one_are_replaced(tmp_path):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'out')
  make(tmp_path / 'link')
  assert (tmp_path / 'out' / 'sub' / 'file').exists()
  assert (tmp_path / 'link').is_symlink()


@pytest.mark.parametrize(
  'prepare, message',
  [
    (lambda path: path.write_text('mine'), 'exists already'),
    (lambda path: (path / 'mine').mkdir(parents=True), 'exists already'),
    (lambda path: path.parent.write_text(''), 'cannot be written'),
    (lambda path: path.mkdir(parents=True), 'is a mount point'),
  ],
)
def test_nothing_is_overwritten(tmp_path, prepare, message, monkeypatch):
  path = tmp_path / 'above' / 'out'
  if message != 'cannot be written':
    path.parent.mkdir()
  prepare(path)
  monkeypatch.setattr(os.path, 'ismount', lambda path: path.name == 'out')
  before = paths.tree(tmp_path)
  with pytest.raises(errors.UserError, match=message):
    make(path)
  assert paths.tree(tmp_path) == before


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError, OSError])
def test_a_failure_leaves_nothing_and_is_raised_as_it_is(tmp_path, error):
  (tmp_path / 'old').mkdir()
  with pytest.raises(error):
    with new_folder.new_folder(tmp_path / 'old' / 'new' / 'out') as draft:
      (draft / 'file').write_text('half')
      raise error
  assert os.listdir(tmp_path) == ['old'] and not os.listdir(tmp_path / 'old')


def test_a_folder_that_was_filled_meanwhile_stays(tmp_path):
  path = tmp_path / 'out'
  with pytest.raises(errors.UserError, match=f'{path} exists already'):
    with new_folder.new_folder(path) as draft:
      (draft / 'file').write_text('ours')
      path.mkdir()
      (path / 'file').write_text('theirs')
  assert (path / 'file').read_text() == 'theirs'
  assert os.listdir(tmp_path) == ['out']


def test_a_full_disk_at_the_end_leaves_nothing(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  with pytest.raises(errors.UserError, match='out is full'):
    with new_folder.new_folder(tmp_path / 'out') as draft:
      (draft / 'file').write_text('content')
      monkeypatch.setattr(os, 'fsync', full)
  assert os.listdir(tmp_path) == []


def test_an_upload_that_fails_leaves_nothing(bucket, monkeypatch):
  path, copy = f'{bucket}/out', paths.copy

  def broken(source, target):
    if target.name == new_folder.MARKER:
      raise OSError('the connection was lost')
    copy(source, target)

  with monkeypatch.context() as patch:
    patch.setattr(paths, 'copy', broken)
    with pytest.raises(errors.UserError, match='the connection was lost'):
      make(path, new_folder.MARKER)
  assert not paths.objects(paths.at(bucket))


def test_an_unfinished_upload_is_replaced(bucket):
  """A killed process leaves files and `UNFINISHED`, without the marker."""
  path = paths.at(f'{bucket}/out')
  paths.write(path / new_folder.UNFINISHED, b'')
  paths.write(path / 'old', b'')
  make(path, new_folder.MARKER)
  assert paths.tree(path) == [new_folder.MARKER, 'sub/file']
  with pytest.raises(errors.UserError, match='exists already'):
    make(path, new_folder.MARKER)


def test_other_files_in_a_bucket_are_not_replaced(bucket):
  paths.write(f'{bucket}/runs/one/config.json', b'{}')
  with pytest.raises(errors.UserError, match='runs exists already'):
    make(paths.at(f'{bucket}/runs'), new_folder.MARKER)
  assert paths.tree(paths.at(bucket)) == ['runs/one/config.json']
