"""Tensors of a folder, one file or shards, and folders that are none."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import safetensors_header, tensor_folder
from tests import tiny
from tests.huggingface import forged

ARRAYS = {
  **{
    name: np.arange(6).astype(dtype).reshape(2, 3)
    for name, dtype in safetensors_header.DTYPES.items()
  },
  'scalar': np.array(3, np.float32),
  'bfloat16 scalar': np.array(3, ml_dtypes.bfloat16),
  'empty': np.zeros((0, 4), np.float16),
}


@pytest.fixture
def library():
  """The format's own library, as writer."""
  return pytest.importorskip('safetensors.numpy')


@pytest.fixture
def sharded(tmp_path):
  """A folder of two shards: a and b in one, c in two."""
  u8 = forged.entry('U8', [1], 0, 1)
  forged.write(
    tmp_path / 'one.safetensors',
    {'a': u8, 'b': forged.entry('U8', [2], 1, 3)},
    b'\x01\x02\x03',
  )
  forged.write(tmp_path / 'two.safetensors', {'c': u8}, b'\x04')
  write_index(tmp_path, a='one', b='one', c='two')
  return tmp_path


def write_index(folder, **shards):
  places = {key: f'{shard}.safetensors' for key, shard in shards.items()}
  (folder / tensor_folder.INDEX).write_text(
    json.dumps({'metadata': {'total_size': 4}, 'weight_map': places})
  )


def refusal(folder) -> str:
  with pytest.raises(errors.UserError) as caught:
    tensor_folder.TensorFolder.open(folder)
  return str(caught.value)


def test_what_the_library_writes_is_read_for_all_dtypes(tmp_path, library):
  library.save_file(ARRAYS, tmp_path / tensor_folder.SINGLE, {'format': 'pt'})
  folder = tensor_folder.TensorFolder.open(tmp_path)
  assert set(folder.tensors) == set(ARRAYS)
  assert folder.metadata == {'format': 'pt'}
  assert folder.nbytes == sum(array.nbytes for array in ARRAYS.values())
  for name, array in ARRAYS.items():
    info, read = folder.tensors[name], folder.read(name)
    assert (info.shape, info.dtype) == (array.shape, array.dtype)
    assert (read.shape, read.dtype) == (array.shape, array.dtype)
    assert read.tobytes() == array.tobytes()
    assert not read.flags.writeable
    assert read.flags.c_contiguous and read.flags.aligned


@pytest.mark.parametrize(
  'rows', [slice(1, 4), slice(2, None), slice(-2, None), slice(3, 1), slice(9)]
)
def test_rows_are_those_of_the_array(tmp_path, library, rows):
  array = np.arange(15).astype(ml_dtypes.bfloat16).reshape(5, 3)
  library.save_file(
    {'x': array, 'y': array}, tmp_path / tensor_folder.SINGLE, None
  )
  folder = tensor_folder.TensorFolder.open(tmp_path)
  for name in 'xy':
    read = folder.read(name, rows)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array[rows])


def test_rows_need_an_axis_and_step_one(tmp_path, library):
  library.save_file(ARRAYS, tmp_path / tensor_folder.SINGLE)
  folder = tensor_folder.TensorFolder.open(tmp_path)
  with pytest.raises(ValueError, match="'scalar' is a scalar"):
    folder.read('scalar', slice(1))
  with pytest.raises(ValueError, match="'F32' have step 2"):
    folder.read('F32', slice(0, 2, 2))
  assert folder.read('empty', slice(0, 2)).shape == (0, 4)


def test_tensors_at_odd_places_are_aligned_when_read(tmp_path):
  value = np.array([1.5, -2], np.float32)
  header = {
    'a': forged.entry('U8', [1], 0, 1),
    'b': forged.entry('F32', [2], 1, 9),
  }
  forged.write(tmp_path / tensor_folder.SINGLE, header, b'\0' + value.tobytes())
  read = tensor_folder.TensorFolder.open(tmp_path).read('b')
  assert read.flags.aligned and not read.flags.writeable
  np.testing.assert_array_equal(read, value)


def test_arrays_outlive_the_folder_and_cross_pages(tmp_path, library):
  array = np.arange(50_000, dtype=np.int32)
  library.save_file(
    {f'x{i}': array + i for i in range(3)}, tmp_path / tensor_folder.SINGLE
  )
  folder = tensor_folder.TensorFolder.open(tmp_path)
  arrays = [folder.read(f'x{i}') for i in range(3)]
  del folder
  for i, read in enumerate(arrays):
    np.testing.assert_array_equal(read, array + i)


def test_shards_are_read_by_the_index(sharded):
  folder = tensor_folder.TensorFolder.open(sharded)
  assert list(folder.tensors) == ['a', 'b', 'c']
  assert [folder.read(name).tolist() for name in 'abc'] == [[1], [2, 3], [4]]
  assert folder.tensors['c'].file == sharded / 'two.safetensors'


def test_a_missing_shard_is_named_with_a_key_of_it(sharded):
  (sharded / 'two.safetensors').unlink()
  message = refusal(sharded)
  assert "'c' is in two.safetensors, which is not there" in message
  assert f'Fetch two.safetensors into {sharded}' in message


def test_a_key_in_another_shard_than_the_index_says(sharded):
  write_index(sharded, a='one', b='two', c='two')
  assert (
    "tensor 'b' is in one.safetensors, but by the index in two.safetensors"
  ) in refusal(sharded)


def test_a_key_in_two_shards(sharded):
  both = {
    'c': forged.entry('U8', [1], 0, 1),
    'a': forged.entry('U8', [1], 1, 2),
  }
  forged.write(sharded / 'two.safetensors', both, b'\x04\x01')
  assert (
    "tensor 'a' is in two.safetensors, but by the index in one.safetensors"
  ) in refusal(sharded)


def test_a_key_that_the_index_does_not_name(sharded):
  write_index(sharded, a='one', c='two')
  assert "tensor 'b' is in one.safetensors, but by the index nowhere" in (
    refusal(sharded)
  )


def test_a_key_that_is_in_no_shard(sharded):
  write_index(sharded, a='one', b='one', c='two', d='two')
  message = refusal(sharded)
  assert "tensor 'd' is by the index in two.safetensors, but not" in message
  assert message.startswith(str(sharded / tensor_folder.INDEX))


def test_a_damaged_shard_is_named(sharded):
  with open(sharded / 'two.safetensors', 'ab') as file:
    file.write(b'x')
  assert refusal(sharded).startswith(str(sharded / 'two.safetensors'))


@pytest.mark.parametrize(
  'text, says',
  [
    ('{"weight_map": {"a": "one.safetensors", "a": "x"}}', "'a' comes twice"),
    ('{"weight_map": {"a": "../one.safetensors"}}', "in '../one.safetensors'"),
    ('{"weight_map": {"a": "/one.safetensors"}}', "in '/one.safetensors'"),
    ('{"weight_map": {"a": "pytorch_model.bin"}}', "in 'pytorch_model.bin'"),
    ('{"weight_map": {"a": 1}}', "tensor 'a' is by the index in 1"),
    ('{"weight_map": {"a": "\\u0000.safetensors"}}', 'which is not there'),
    ('{"weight_map": ["a"]}', 'no weight_map'),
    ('{}', 'no weight_map'),
    ('[]', 'its JSON is a list'),
    ('{"weight_map": ', 'no valid JSON'),
    ('', 'no valid JSON'),
  ],
)
def test_a_forged_index_is_refused(sharded, text, says):
  (sharded / tensor_folder.INDEX).write_text(text)
  message = refusal(sharded)
  assert message.startswith(str(sharded / tensor_folder.INDEX))
  assert says in message


def test_a_shard_name_that_no_file_system_takes(sharded):
  write_index(sharded, a='x' * 300)
  assert f'{"x" * 300}.safetensors' in refusal(sharded)


def test_single_and_index_together_are_refused_unless_they_agree(sharded):
  single = sharded / tensor_folder.SINGLE
  forged.write(single, {'a': forged.entry('U8', [1], 0, 1)}, b'\x07')
  assert 'also model.safetensors.index.json' in refusal(sharded)
  write_index(sharded, a='model')
  folder = tensor_folder.TensorFolder.open(sharded)
  assert folder.read('a').tolist() == [7]


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'm.pt', 'm.pth'])
def test_pickled_weights_are_refused_with_the_remedy(tmp_path, name):
  (tmp_path / name).write_bytes(b'not opened')
  (tmp_path / 'training_args.bin').write_bytes(b'')
  message = refusal(tmp_path)
  assert f'has pickled weights only ({name})' in message
  assert 'save_pretrained' in message


def test_pickled_weights_beside_safetensors_are_not_looked_at(sharded):
  (sharded / 'pytorch_model.bin').write_bytes(b'not opened')
  assert len(tensor_folder.TensorFolder.open(sharded).tensors) == 3


def test_folders_without_weights_are_refused(tmp_path):
  (tmp_path / 'training_args.bin').write_bytes(b'')
  says = 'has neither model.safetensors nor model.safetensors.index.json'
  assert f'{tmp_path} {says}. Give' in refusal(tmp_path)
  (tmp_path / 'adapter_model.safetensors').write_bytes(b'')
  (tmp_path / 'adapter_model.bin').write_bytes(b'')
  assert f'{says} (it has adapter_model.safetensors)' in refusal(tmp_path)
  for path in (tmp_path / 'training_args.bin', tmp_path / 'google' / 'gemma'):
    assert f'{path} is not a folder' in refusal(path)


def test_weights_that_cannot_be_opened_are_named(tmp_path):
  (tmp_path / tensor_folder.SINGLE).mkdir()
  assert f'{tmp_path / tensor_folder.SINGLE} cannot be read' in (
    refusal(tmp_path)
  )


def test_an_unknown_tensor_is_named(sharded):
  folder = tensor_folder.TensorFolder.open(sharded)
  with pytest.raises(errors.UserError, match="no tensor 'lm_head' among its 3"):
    folder.read('lm_head')


@pytest.mark.parametrize('change', ['truncate', 'remove'])
def test_a_file_that_changes_after_opening_is_named(sharded, change):
  folder = tensor_folder.TensorFolder.open(sharded)
  file = sharded / 'two.safetensors'
  if change == 'truncate':
    file.write_bytes(file.read_bytes()[:-1])
  else:
    file.unlink()
  with pytest.raises(
    errors.UserError, match=f"{file}: tensor 'c' cannot be read any more"
  ):
    folder.read('c')


@pytest.mark.parametrize(
  'dtype', [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
)
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_with_its_place(monkeypatch, dtype, value):
  # The block boundary lies within the array.
  monkeypatch.setattr(tensor_folder, '_BLOCK', 7)
  largest = ml_dtypes.finfo(dtype).max
  array = np.full((4, 5), largest, dtype)
  tensor_folder.check_finite('w', array, 'f.safetensors')
  tensor_folder.check_finite('w', -array, 'f.safetensors')
  for place in np.ndindex(4, 5):
    damaged = array.copy()
    damaged[place] = value
    damaged[3, 4] = value
    with pytest.raises(errors.UserError) as caught:
      tensor_folder.check_finite('w', damaged, 'f.safetensors')
    assert str(caught.value).startswith(
      f"f.safetensors: tensor 'w' has the value {value} at {list(place)}."
    )
    with pytest.raises(errors.UserError, match="'w' has the value"):
      tensor_folder.check_finite('w', damaged.T, 'f.safetensors')


def test_integers_scalars_and_nothing_are_finite():
  for array in (
    np.array([2**62]),
    np.array(True),
    np.array(1, ml_dtypes.bfloat16),
    np.zeros((0, 3), np.float16),
  ):
    tensor_folder.check_finite('w', array, 'f')


def test_looking_into_a_folder_imports_no_framework(sharded):
  code = (
    'import sys\n'
    'from encdec_adapt.huggingface import new_folder, tensor_folder\n'
    'from encdec_adapt.huggingface import tensor_writer\n'
    'folder = tensor_folder.TensorFolder.open(sys.argv[1])\n'
    "heavy = {'jax', 'flax', 'torch', 'tensorflow', 'safetensors'}\n"
    'print(len(folder.tensors), sorted(heavy & set(sys.modules)))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, sharded],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(tiny.ROOT),
    timeout=120,
  )
  assert done.stdout == '3 []\n', done.stderr
