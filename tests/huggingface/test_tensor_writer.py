"""Files of tensors as the library of the format reads and writes them."""

import json
import os
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.files import disk
from encdec_adapt.huggingface import new_folder, tensor_folder, tensor_writer
from tests.huggingface import test_tensor_folder

ARRAYS = test_tensor_folder.ARRAYS
SHARDS = [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]


def plan(arrays):
  return [
    tensor_writer.PlannedTensor(
      name, array.shape, array.dtype, lambda a=array: a
    )
    for name, array in arrays.items()
  ]


def numbers(count: int, size: int = 10) -> dict[str, np.ndarray]:
  return {f't{i}': np.full(size, i, np.float32) for i in range(count)}


@pytest.mark.parametrize('shard_bytes', [10**9, 40])
def test_the_library_reads_what_is_written(tmp_path, shard_bytes):
  library = pytest.importorskip('safetensors')
  paths = tensor_writer.write_tensors(
    tmp_path, plan(ARRAYS), shard_bytes=shard_bytes
  )
  found = {}
  for path in paths:
    if path.suffix == '.safetensors':
      with library.safe_open(path, 'np') as file:
        assert file.metadata() == {'format': 'pt'}
        found |= {name: file.get_tensor(name) for name in file.keys()}
  assert found.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    assert found[name].tobytes() == array.tobytes()
  assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
  assert len(paths) == (1 if shard_bytes > 1000 else 9 + 1)


def test_reading_gives_back_what_was_written(tmp_path):
  tensor_writer.write_tensors(
    tmp_path, plan(ARRAYS), shard_bytes=50, metadata={'a': 'b'}
  )
  folder = tensor_folder.TensorFolder.open(tmp_path)
  assert folder.tensors.keys() == ARRAYS.keys()
  assert folder.metadata == {'a': 'b'}
  for name, array in ARRAYS.items():
    read = folder.read(name)
    assert (read.shape, read.dtype) == (array.shape, array.dtype)
    assert read.tobytes() == array.tobytes()


def test_shards_and_index_are_named_as_transformers_wants(tmp_path):
  paths = tensor_writer.write_tensors(
    tmp_path, plan(numbers(5)), shard_bytes=80
  )
  assert [path.name for path in paths] == [*SHARDS, tensor_folder.INDEX]
  assert json.loads(paths[-1].read_text()) == {
    'metadata': {'total_size': 200},
    'weight_map': {
      't0': SHARDS[0],
      't1': SHARDS[0],
      't2': SHARDS[1],
      't3': SHARDS[1],
      't4': SHARDS[2],
    },
  }


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
  arrays = numbers(3) | {'t1': np.zeros(100, np.float32)}
  tensor_writer.write_tensors(tmp_path, plan(arrays), shard_bytes=80)
  folder = tensor_folder.TensorFolder.open(tmp_path)
  assert [info.file.name for info in folder.tensors.values()] == SHARDS


def test_files_do_not_depend_on_the_order_arrays_are_made_in(tmp_path):
  made = []
  contents = []
  for number, names in enumerate([sorted(ARRAYS), sorted(ARRAYS)[::-1]]):
    folder = tmp_path / str(number)
    folder.mkdir()
    tensors = [
      tensor_writer.PlannedTensor(
        name,
        ARRAYS[name].shape,
        ARRAYS[name].dtype,
        lambda name=name: (made.append(name), ARRAYS[name])[1],
      )
      for name in names
    ]
    paths = tensor_writer.write_tensors(folder, tensors, shard_bytes=40)
    contents.append([path.read_bytes() for path in paths])
  assert made == sorted(ARRAYS) + sorted(ARRAYS)[::-1]
  assert contents[0] == contents[1]


@pytest.mark.parametrize('block', [1, 5, 64, 1 << 20])
def test_transposed_arrays_are_written_row_by_row(tmp_path, monkeypatch, block):
  monkeypatch.setattr(tensor_writer, '_BLOCK', block)
  base = np.arange(24).astype(ml_dtypes.bfloat16).reshape(2, 3, 4)
  arrays = {'t': base.T, 's': base[:, ::2], 'p': base.transpose(1, 0, 2)}
  assert not any(array.flags.c_contiguous for array in arrays.values())
  tensor_writer.write_tensors(tmp_path, plan(arrays))
  folder = tensor_folder.TensorFolder.open(tmp_path)
  for name, array in arrays.items():
    np.testing.assert_array_equal(folder.read(name), array)


def test_progress_counts_every_byte_once(tmp_path, monkeypatch):
  monkeypatch.setattr(tensor_writer, '_BLOCK', 16)
  reports = []
  tensor_writer.write_tensors(
    tmp_path,
    plan(numbers(2) | {'z': np.zeros(0, np.float32)}),
    on_progress=lambda done, total: reports.append((done, total)),
  )
  done = [nbytes for nbytes, _ in reports]
  # Blocks of two arrays that are written side by side.
  assert sorted(np.diff(done)) == [8, 8, 16, 16, 16, 16]
  assert reports[0] == (0, 80) and reports[-1] == (80, 80)


@pytest.mark.parametrize(
  'array, says',
  [
    (np.zeros(3, np.float32), r"'w' was to be \[2\] in float32, but is \[3\]"),
    (np.zeros((2, 1), np.float32), r'but is \[2, 1\] in float32'),
    (np.zeros(2, np.float64), r'but is \[2\] in float64'),
    (np.zeros(2, ml_dtypes.bfloat16), r'but is \[2\] in bfloat16'),
    (np.zeros(2, '>f4'), r'but is \[2\] in >f4'),
  ],
)
def test_an_array_other_than_planned_is_named(tmp_path, array, says):
  wrong = tensor_writer.PlannedTensor(
    'w', (2,), np.dtype(np.float32), lambda: array
  )
  with pytest.raises(ValueError, match=says):
    tensor_writer.write_tensors(tmp_path, [*plan(numbers(2)), wrong])


def test_arrays_are_made_in_turn_and_finished_beside_each_other(tmp_path):
  both = threading.Barrier(2)
  made = []

  def finish(array):
    both.wait(timeout=60)  # Broken, where one waits for the other's end.
    return array.astype(np.float32)

  tensors = [
    tensor_writer.PlannedTensor(
      f't{i}',
      (3,),
      np.dtype(np.float32),
      lambda i=i: made.append(i) or np.full(3, i),
      finish,
    )
    for i in range(4)
  ]
  tensor_writer.write_tensors(tmp_path, tensors)
  assert made == [0, 1, 2, 3]
  folder = tensor_folder.TensorFolder.open(tmp_path)
  assert [int(folder.read(f't{i}')[0]) for i in range(4)] == made


def test_an_error_of_finishing_is_raised(tmp_path):
  def fail(_):
    raise errors.UserError('not finite')

  wrong = tensor_writer.PlannedTensor(
    'w', (2,), np.dtype(np.float32), lambda: np.zeros(2), fail
  )
  with pytest.raises(errors.UserError, match='not finite'):
    tensor_writer.write_tensors(tmp_path, [wrong, *plan(numbers(2))])


def test_plans_that_cannot_be_written_are_refused_before_any_file(tmp_path):
  with pytest.raises(ValueError, match="'t0' is to be written twice"):
    tensor_writer.write_tensors(tmp_path, plan(numbers(1)) * 2)
  with pytest.raises(ValueError, match="'c' has dtype complex64"):
    tensor_writer.write_tensors(tmp_path, plan({'c': np.zeros(1, 'c8')}))
  with pytest.raises(ValueError, match='shard_bytes=0'):
    tensor_writer.write_tensors(tmp_path, plan(numbers(1)), shard_bytes=0)
  assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_refused_before_any_file(tmp_path):
  huge = tensor_writer.PlannedTensor(
    'w', (2**58,), np.dtype(np.float32), lambda: pytest.fail('was made')
  )
  with pytest.raises(errors.UserError, match='free, but the weights need'):
    tensor_writer.write_tensors(tmp_path, [huge])
  assert os.listdir(tmp_path) == []


def test_what_is_there_is_not_overwritten(tmp_path):
  tensor_writer.write_tensors(tmp_path, plan(numbers(2)))
  before = (tmp_path / tensor_folder.SINGLE).read_bytes()
  with pytest.raises(errors.UserError, match=tensor_folder.SINGLE):
    tensor_writer.write_tensors(tmp_path, plan(numbers(1)))
  assert (tmp_path / tensor_folder.SINGLE).read_bytes() == before


def test_a_disk_that_fills_up_is_named(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(tensor_writer, '_write_all', full)
  with pytest.raises(errors.UserError, match='model.safetensors is full'):
    tensor_writer.write_tensors(tmp_path, plan(numbers(1)))


def test_an_error_of_the_source_is_not_taken_for_one_of_the_disk(tmp_path):
  def fail():
    raise OSError('the source went away')

  tensor = tensor_writer.PlannedTensor('w', (1,), np.dtype(np.int8), fail)
  with pytest.raises(OSError, match='the source went away'):
    tensor_writer.write_tensors(tmp_path, [tensor])


@pytest.mark.parametrize('error', [KeyboardInterrupt, errors.UserError])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
  def interrupt():
    raise error

  tensors = plan(numbers(4))
  tensors[2] = tensor_writer.PlannedTensor(
    't2', (10,), np.dtype(np.float32), interrupt
  )
  with pytest.raises(error):
    with new_folder.new_folder(tmp_path / 'out') as draft:
      (draft / 'config.json').write_text('{}')
      tensor_writer.write_tensors(draft, tensors, shard_bytes=80)
  assert os.listdir(tmp_path) == []


def test_weights_join_other_files_in_one_new_folder(tmp_path):
  with new_folder.new_folder(tmp_path / 'out') as draft:
    (draft / 'config.json').write_text('{}')
    tensor_writer.write_tensors(draft, plan(numbers(4)), shard_bytes=80)
  folder = tensor_folder.TensorFolder.open(tmp_path / 'out')
  assert [int(folder.read(f't{i}')[0]) for i in range(4)] == [0, 1, 2, 3]
  assert (tmp_path / 'out' / 'config.json').exists()
  assert os.listdir(tmp_path) == ['out']


def test_an_empty_model_is_a_file_without_tensors(tmp_path):
  reports = []
  tensor_writer.write_tensors(
    tmp_path, [], on_progress=lambda *report: reports.append(report)
  )
  assert not tensor_folder.TensorFolder.open(tmp_path).tensors
  assert reports == [(0, 0)]


@pytest.mark.parametrize('transposed', [False, True])
def test_memory_stays_near_the_largest_tensor(
  tmp_path, transposed, monkeypatch
):
  # 40 tensors of 1 MiB, made, written, mapped, copied and written again.
  block = 1 << 18
  count, shape = 40, (512, 1024)
  nbytes = 2 * shape[0] * shape[1]
  monkeypatch.setattr(tensor_writer, '_BLOCK', block)
  monkeypatch.setattr(tensor_writer, '_AHEAD', 2 * nbytes)
  first, second = tmp_path / 'first', tmp_path / 'second'
  first.mkdir()
  second.mkdir()

  def make(value):
    array = np.full(shape[::-1], value, ml_dtypes.bfloat16)
    return array.T if transposed else array.reshape(shape)

  def planned(maker):
    return [
      tensor_writer.PlannedTensor(
        f't{i:02}', shape, np.dtype(ml_dtypes.bfloat16), lambda i=i: maker(i)
      )
      for i in range(count)
    ]

  tracemalloc.start()
  try:
    tensor_writer.write_tensors(first, planned(make), shard_bytes=7 * nbytes)
    folder = tensor_folder.TensorFolder.open(first)
    tensor_writer.write_tensors(
      second, planned(lambda i: folder.read(f't{i:02}').copy())
    )
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  # Two tensors and a third that is made, or that a thread is about to drop;
  # blocks of transposed ones; and the plan.
  bound = 3.1 * nbytes + (4 * block if transposed else 0)
  assert peak < bound, f'{disk.format_bytes(peak)} at the peak'
  copy = tensor_folder.TensorFolder.open(second)
  assert float(copy.read('t39')[-1, -1]) == 39


@pytest.mark.parity
def test_transformers_reads_shards_and_is_read(tmp_path):
  pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  config = transformers.LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
  )
  model = transformers.LlamaForCausalLM(config).bfloat16()
  model.save_pretrained(tmp_path / 'theirs', max_shard_size=1000)
  theirs = tensor_folder.TensorFolder.open(tmp_path / 'theirs')
  assert len({info.file for info in theirs.tensors.values()}) > 1
  with new_folder.new_folder(tmp_path / 'ours') as draft:
    config.save_pretrained(draft)
    tensors = [
      tensor_writer.PlannedTensor(
        name, info.shape, info.dtype, lambda name=name: theirs.read(name)
      )
      for name, info in theirs.tensors.items()
    ]
    paths = tensor_writer.write_tensors(draft, tensors, shard_bytes=1000)
    assert len(paths) > 2
  loaded, info = transformers.LlamaForCausalLM.from_pretrained(
    tmp_path / 'ours', dtype='auto', output_loading_info=True
  )
  assert not any(info[kind] for kind in ('missing_keys', 'unexpected_keys'))
  state = loaded.state_dict()
  assert state.keys() == model.state_dict().keys()
  for name, tensor in model.state_dict().items():
    assert tensor.dtype == state[name].dtype
    assert tensor.equal(state[name]), name
