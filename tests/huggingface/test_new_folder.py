"""Folders appear whole or not at all, whatever happens meanwhile."""

import os
import shutil
import tempfile

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.files import paths
from encdec_adapt.huggingface import new_folder


def make(path):
  with new_folder.new_folder(path) as draft:
    (draft / 'sub').mkdir()
    (draft / 'sub' / 'file').write_text('content')
    assert draft.parent == path.resolve().parent
    assert not (path / 'sub').exists()
  return draft


def test_a_folder_appears_with_all_that_was_written(tmp_path):
  path = tmp_path / 'above' / 'out'
  draft = make(path)
  assert (path / 'sub' / 'file').read_text() == 'content'
  assert not draft.exists()
  assert os.listdir(path.parent) == ['out']
  # As others would have made it: readable for whom the umask lets.
  (tmp_path / 'plain').mkdir()
  assert path.stat().st_mode == (tmp_path / 'plain').stat().st_mode


def test_an_empty_folder_and_a_link_to_one_are_taken_over(tmp_path):
  (tmp_path / 'out').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'out')
  make(tmp_path / 'link')
  assert (tmp_path / 'out' / 'sub' / 'file').exists()
  assert (tmp_path / 'link').is_symlink()
  assert sorted(os.listdir(tmp_path)) == ['link', 'out']


@pytest.mark.parametrize('taken', ['file', 'folder'])
def test_nothing_is_overwritten(tmp_path, taken):
  path = tmp_path / 'out'
  if taken == 'file':
    path.write_text('mine')
  else:
    path.mkdir()
    (path / 'mine').write_text('mine')
  with pytest.raises(errors.UserError, match=f'{path} exists already'):
    make(path)
  assert os.listdir(tmp_path) == ['out']


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError, SystemExit])
def test_what_fails_leaves_nothing(tmp_path, error):
  with pytest.raises(error):
    with new_folder.new_folder(tmp_path / 'new' / 'deep' / 'out') as draft:
      (draft / 'file').write_text('half')
      raise error
  assert os.listdir(tmp_path) == []


def test_what_fails_leaves_the_folders_that_were_there(tmp_path):
  (tmp_path / 'old').mkdir()
  with pytest.raises(ValueError):
    with new_folder.new_folder(tmp_path / 'old' / 'new' / 'out'):
      raise ValueError
  assert os.listdir(tmp_path) == ['old'] and not os.listdir(tmp_path / 'old')


def test_what_was_put_there_meanwhile_stays(tmp_path):
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


def test_a_mount_point_and_a_file_above_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot be written'):
    make(tmp_path / 'file' / 'out')
  (tmp_path / 'disk').mkdir()
  monkeypatch.setattr(os.path, 'ismount', lambda path: path.name == 'disk')
  with pytest.raises(errors.UserError, match='disk is a mount point'):
    make(tmp_path / 'disk')
  assert sorted(os.listdir(tmp_path)) == ['disk', 'file']


def test_a_draft_that_the_body_removed_is_an_error(tmp_path):
  with pytest.raises(errors.UserError, match='out cannot be written'):
    with new_folder.new_folder(tmp_path / 'out') as draft:
      shutil.rmtree(draft)


def put(path, names):
  with new_folder.new_folder(path) as draft:
    for name in names:
      (draft / name).write_text(f'content of {name}')
  return draft


def test_an_upload_that_broke_off_is_kept_and_done_again(
  bucket, tmp_path, monkeypatch
):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  path, copy = f'{bucket}/out', paths.copy

  def broken(source, target):
    if target.name == new_folder.MARKER:
      raise OSError('the connection was lost')
    copy(source, target)

  with monkeypatch.context() as patch:
    patch.setattr(paths, 'copy', broken)
    with pytest.raises(errors.UserError, match='connection was lost.* kept as'):
      put(path, ['old', 'both', new_folder.MARKER])
  (kept,) = tmp_path.iterdir()
  assert sorted(os.listdir(kept)) == ['both', new_folder.MARKER, 'old']
  # Again, of other files: what the first try has left is not among them.
  names = ['both', new_folder.MARKER, 'new']
  draft = put(path, names)
  assert paths.tree(paths.at(path)) == names
  assert list(tmp_path.iterdir()) == [kept] and not draft.exists()
  with pytest.raises(errors.UserError, match='exists already'):
    put(path, names)


def test_what_others_have_put_into_a_bucket_is_not_replaced(bucket):
  paths.write(f'{bucket}/runs/one/config.json', b'{}')
  with pytest.raises(errors.UserError, match='runs exists already'):
    put(f'{bucket}/runs', [new_folder.MARKER])
  assert paths.tree(paths.at(bucket)) == ['runs/one/config.json']
