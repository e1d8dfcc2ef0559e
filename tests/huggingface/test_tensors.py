"""Tensors of a folder: written, read, sharded, damaged."""

import json
import os
import tempfile
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import numpy as safetensors_numpy

from encdec_adapt.base import errors
from encdec_adapt.files import lazy_array, paths
from encdec_adapt.huggingface import new_folder, tensor_folder, tensor_writer

DTYPES = tensor_folder._DTYPES.values()
BASE = np.arange(24).reshape(2, 3, 4)
ARRAYS = {
  **{str(kind): BASE[0, :, :2].astype(kind) for kind in DTYPES},
  **{f'{kind} transposed': BASE.astype(kind).T for kind in DTYPES},
  'permuted': BASE.transpose(1, 0, 2).astype(ml_dtypes.bfloat16, order='K'),
  'every other': BASE[:, ::2].astype(np.float32)[..., ::2],
  'reversed vector': np.arange(5.0)[::-1],
  'large': np.arange(300 * 70).astype(ml_dtypes.bfloat16).reshape(300, 70).T,
  'scalar': np.array(3, np.float32),
  'empty': np.zeros((0, 4), np.float16),
}


def plan(arrays):
  return {
    name: lazy_array.LazyArray.in_full(a.shape, a.dtype, lambda a=a: a)
    for name, a in arrays.items()
  }


def numbers(count, size=10):
  return {f't{i}': np.full(size, i, np.float32) for i in range(count)}


@pytest.fixture
def two_per_shard(monkeypatch):
  """Files hold two arrays of `numbers`."""
  monkeypatch.setattr(tensor_writer, 'SHARD_BYTES', 80)


@pytest.fixture(params=['disk', 'bucket'])
def where(request, tmp_path):
  """A folder to write into, and where its shards end."""
  if request.param == 'disk':
    return tmp_path, None
  return tmp_path, paths.at(request.getfixturevalue('bucket'))


@pytest.mark.parametrize('shard_bytes', [10**9, 100])
def test_a_round_trip_is_bit_equal(where, monkeypatch, shard_bytes):
  """Whatever the dtype, and in whatever order an array lies in memory."""
  monkeypatch.setattr(tensor_writer, 'SHARD_BYTES', shard_bytes)
  folder, bucket = where
  tensor_writer.write_tensors(folder, plan(ARRAYS), bucket=bucket)
  if bucket is not None:
    assert not list(folder.glob('*.safetensors'))
    paths.upload(folder, bucket)  # The index.
  opened = tensor_folder.TensorFolder(folder if bucket is None else bucket)
  assert opened.tensors.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    info, read = opened.tensors[name], opened.read(name)
    assert (info.shape, info.dtype) == (array.shape, array.dtype)
    assert (read.shape, read.dtype) == (array.shape, array.dtype)
    assert read.tobytes() == array.tobytes(), name
  part = opened.read('permuted', (1, slice(1, 2)))
  np.testing.assert_array_equal(part, ARRAYS['permuted'][1, 1:2])
  files = {info.file.name for info in opened.tensors.values()}
  assert (len(files) == 1) == (shard_bytes > 100)


def test_shards_and_index_as_transformers_reads_them(tmp_path, two_per_shard):
  """In the order given; a tensor larger than a shard has a file of its own."""
  arrays = numbers(5) | {'t2': np.zeros(100, np.float32)}
  reports = []
  tensor_writer.write_tensors(
    tmp_path, plan(arrays), on_progress=lambda *report: reports.append(report)
  )
  shards = [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]
  index = json.loads((tmp_path / tensor_folder.INDEX).read_text())
  assert index['metadata'] == {'total_size': 560}
  assert [index['weight_map'][f't{i}'] for i in range(5)] == [
    *(shards[0],) * 2,
    shards[1],
    *(shards[2],) * 2,
  ]
  assert reports[0] == (0, 560) and reports[-1] == (560, 560)
  (tmp_path / 'plain').touch()
  mode = (tmp_path / 'plain').stat().st_mode  # By the umask.
  for shard in shards:
    assert (tmp_path / shard).stat().st_mode == mode


def test_memory_grows_with_a_shard_and_not_with_the_model(
  tmp_path, monkeypatch
):
  count, size = 40, 1 << 18
  shard = 5 * 4 * size
  monkeypatch.setattr(tensor_writer, 'SHARD_BYTES', shard)
  tensors = {
    f't{i:02}': lazy_array.LazyArray.in_full(
      (512, size // 512),
      np.float32,
      lambda i=i: np.full((size // 512, 512), i, np.float32).T,
    )
    for i in range(count)
  }
  tracemalloc.start()
  try:
    tensor_writer.write_tensors(tmp_path, tensors)
    opened = tensor_folder.TensorFolder(tmp_path)
    for i in range(count):
      assert opened.read(f't{i:02}')[-1, -1] == i
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 1.5 * shard


def test_shards_for_a_bucket_are_staged_one_at_a_time(
  bucket, tmp_path, monkeypatch, two_per_shard
):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  staged, copy = [], paths.copy

  def counting(source, target):
    staged.append(len(list(source.parent.glob('*.safetensors'))))
    copy(source, target)

  monkeypatch.setattr(paths, 'copy', counting)
  target = paths.at(f'{bucket}/out')
  with new_folder.new_folder(target) as draft:
    (draft / new_folder.MARKER).write_text('{}')
    tensor_writer.write_tensors(draft, plan(numbers(6)), bucket=target)
  assert staged[:3] == [1, 1, 1]
  opened = tensor_folder.TensorFolder(target)
  assert [int(opened.read(f't{i}')[0]) for i in range(6)] == list(range(6))
  assert os.listdir(tmp_path) == []


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
  huge = lazy_array.LazyArray.in_full((1 << 60,), np.int8, lambda: 0)
  with pytest.raises(errors.UserError, match='free, but the weights need'):
    tensor_writer.write_tensors(tmp_path, {'h': huge})
  assert os.listdir(tmp_path) == []

  def full(*_):
    raise safetensors.SafetensorError('No space left on device')

  monkeypatch.setattr(safetensors_numpy, 'save_file', full)
  with pytest.raises(errors.UserError, match='model.safetensors cannot be wri'):
    tensor_writer.write_tensors(tmp_path, plan(numbers(1)))


# -- Folders that are refused ------------------------------------------------


@pytest.fixture
def sharded(tmp_path, two_per_shard):
  """A folder of two shards: t0 and t1 in one, t2 in two."""
  tensor_writer.write_tensors(tmp_path, plan(numbers(3)))
  for number, name in ((1, 'one'), (2, 'two')):
    old = f'model-0000{number}-of-00002.safetensors'
    (tmp_path / old).rename(tmp_path / f'{name}.safetensors')
  write_index(tmp_path, t0='one', t1='one', t2='two')
  return tmp_path


TWO = 'two.safetensors'


def write_index(folder, **shards):
  places = {key: f'{shard}.safetensors' for key, shard in shards.items()}
  text = json.dumps({'weight_map': places})
  (folder / tensor_folder.INDEX).write_text(text)


def float8(path):
  """Writes a file of one tensor of a dtype that is not supported."""
  entry = {'dtype': 'F8_E4M3', 'shape': [2], 'data_offsets': [0, 2]}
  header = json.dumps({'t2': entry}).encode()
  path.write_bytes(len(header).to_bytes(8, 'little') + header + b'xx')


@pytest.mark.parametrize(
  'damage, message',
  [
    (lambda f: f.rename(f'{f}.old'), 'has neither'),
    (lambda f: (f / TWO).unlink(), f'names {TWO}, which is missing'),
    (
      lambda f: (f / TWO).write_text('version https://git-lfs.'),
      f'{TWO} is no complete .*git lfs pull',
    ),
    (lambda f: float8(f / TWO), f"{TWO}: tensor 't2' has dtype F8_E4M3"),
    (
      lambda f: write_index(f, t0='one', t2='two'),
      "index.json: it places tensor 't1' in None, but .* in one.safetensors",
    ),
    (
      lambda f: write_index(f, t0='one', t1='one', t2='two', x='two'),
      "it places tensor 'x' in two.safetensors, but .* in None",
    ),
    (
      lambda f: write_index(f, t0='../one', t1='one', t2='two'),
      'its weight_map must name files of the folder',
    ),
    (
      lambda f: (f / tensor_folder.SINGLE).touch(),
      'has both model.safetensors and model.safetensors.index.json',
    ),
  ],
)
def test_a_damaged_folder_is_refused(sharded, damage, message):
  damage(sharded)
  with pytest.raises(errors.UserError, match=message):
    tensor_folder.TensorFolder(sharded)


@pytest.mark.parametrize('content', [b'', b'\xff' * 40, b'\x02' + bytes(7)])
def test_a_damaged_file_in_a_bucket_is_refused(bucket, content):
  paths.write(f'{bucket}/{tensor_folder.SINGLE}', content)
  with pytest.raises(errors.UserError, match='is no complete safetensors file'):
    tensor_folder.TensorFolder(bucket)


def test_a_file_that_changes_after_it_was_opened(sharded):
  opened = tensor_folder.TensorFolder(sharded)
  opened.read('t2')
  os.truncate(sharded / TWO, 90)
  with pytest.raises(errors.UserError, match=f'{TWO} is no complete'):
    opened.read('t2')


# -- Values ------------------------------------------------------------------


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32', 'float64'])
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(dtype, value, monkeypatch):
  monkeypatch.setattr(tensor_folder, '_BLOCK', 7)
  array = np.arange(20).reshape(4, 5).astype(dtype)
  array[0, 0] = np.finfo(np.float16).max
  for good in (array, -array, array.T, np.array(1, dtype), array[:0]):
    tensor_folder.check_finite('w', good, 'f')
  array[2, 3] = value
  message = rf"^f: tensor 'w' has the value {value} at \[2, 3\]"
  with pytest.raises(errors.UserError, match=message):
    tensor_folder.check_finite('w', array, 'f')
  tensor_folder.check_finite('w', np.array([2**62, 3]), 'f')
