"""Every change of a folder is found by its checksum manifest."""

import pytest

from encdec_adapt.checkpoints import checksums


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'a' / 'b').mkdir(parents=True)
  (tmp_path / 'a' / 'b' / 'big').write_bytes(bytes(range(256)) * 10)
  (tmp_path / 'a' / 'empty').write_bytes(b'')
  (tmp_path / 'top').write_bytes(b'top')
  checksums.write(tmp_path)
  return tmp_path


def test_an_unchanged_folder_has_no_problems(folder):
  assert checksums.has_manifest(folder)
  assert checksums.problems(folder) == []
  (folder / 'later').write_bytes(b'not listed')
  assert checksums.problems(folder) == []


def test_every_flipped_byte_of_the_manifest_is_found(folder):
  path = folder / checksums.FILE
  content = path.read_bytes()
  for index in range(len(content)):
    flipped = bytearray(content)
    flipped[index] ^= 1
    path.write_bytes(flipped)
    assert checksums.problems(folder), (index, content[index : index + 1])


@pytest.mark.parametrize('name', ['a/b/big', 'a/empty', 'top'])
def test_each_damage_of_each_file_is_named(folder, name):
  path = folder / name
  content = path.read_bytes()
  path.write_bytes(content + b'x')
  assert checksums.problems(folder) == [
    f'{name} has {len(content) + 1} bytes instead of {len(content)}'
  ]
  if content:
    path.write_bytes(bytes([content[0] ^ 128]) + content[1:])
    assert checksums.problems(folder) == [
      f'{name} has other contents than were written'
    ]
  path.unlink()
  assert checksums.problems(folder) == [f'{name} is missing']
  path.mkdir()
  assert checksums.problems(folder) == [f'{name} is missing']


def test_a_truncated_manifest_is_a_problem_not_an_absence(folder):
  (folder / checksums.FILE).write_bytes(b'')
  assert checksums.has_manifest(folder)
  assert checksums.problems(folder)
