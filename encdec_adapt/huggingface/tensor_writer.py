"""Writes tensors as safetensors, one at a time, in one file or in shards.

Names, shapes and dtypes are known before the first value is: so headers and
index come first, and each array goes to its place as it is made: while some
are converted and written, the next is read. Host memory stays near the largest
tensor. The library of the format wants all arrays at once, hence this module;
what it writes, that library reads.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import io
import math
import os
import pathlib
import threading

import numpy as np

from encdec_adapt.files import atomic, disk
from encdec_adapt.huggingface import (
  safetensors_header,
  tensor_folder,
  transposing,
)

SHARD_BYTES = 5_000_000_000
PYTORCH = {'format': 'pt'}  # Without it, `transformers` refuses a file.
_BLOCK = 64 << 20  # Bytes written between two reports of progress.
_AHEAD = 128 << 20  # Bytes of arrays that wait or are written, beside one.
_THREADS = 4  # NumPy and writing release the interpreter's lock.


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
  """A tensor that is going to be written.

  Attributes:
    name: its key.
    shape: () for a scalar.
    dtype: one of `safetensors_header.DTYPES`.
    make: gives the array; called once, one tensor's after another's.
    finish: makes of it an array of exactly this shape and dtype; called in a
      thread, beside those of other tensors.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]
  finish: Callable[[np.ndarray], np.ndarray] = np.asarray

  @property
  def nbytes(self) -> int:
    """Bytes of data."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def write_tensors(
  folder: str | os.PathLike[str],
  tensors: Iterable[PlannedTensor],
  *,
  shard_bytes: int = SHARD_BYTES,
  metadata: Mapping[str, str] = PYTORCH,
  on_progress: Callable[[int, int], None] | None = None,
) -> list[pathlib.Path]:
  """Writes tensors into a folder, as `transformers` and `safetensors` read.

  Arrays are made in the order given: the caller chooses the one that suits
  its source. Files do not depend on it: shards are filled in the order of
  the names. Use it inside `new_folder.new_folder`: what fails halfway leaves
  files behind.

  Args:
    folder: to write into; it has no safetensors yet.
    tensors: with distinct names.
    shard_bytes: data of a file, at most, but for a tensor that is larger. If
      all fits, there is one file and no index.
    metadata: free text for every file.
    on_progress: called with bytes done and bytes in all, first with 0 done,
      then at least once per tensor that has any; by one thread at a time.

  Returns:
    The files written, the index last if there is one.

  Raises:
    UserError: there is no room on the disk, or it cannot be written.
    ValueError: the plan has a name twice or a dtype that the format has not,
      or an array is made of another shape or dtype; names the tensor.
  """
  folder = pathlib.Path(folder)
  plan = list(tensors)
  _check_plan(plan, shard_bytes)
  total = sum(tensor.nbytes for tensor in plan)
  disk.require_space(folder, total, what='the weights')
  shards = _shards(plan, shard_bytes)
  places = {}
  for name, shard in shards.items():
    places |= _write_header(folder / name, shard, metadata)
  _write_plan(plan, places, _counter(total, on_progress))
  paths = [folder / name for name in shards]
  if len(shards) > 1:
    paths.append(folder / tensor_folder.INDEX)
    _write_index(paths[-1], total, places)
  return paths


def _check_plan(plan: Sequence[PlannedTensor], shard_bytes: int) -> None:
  if shard_bytes < 1:
    raise ValueError(f'shard_bytes={shard_bytes} must be at least 1')
  names = set()
  for tensor in plan:
    if tensor.name in names:
      raise ValueError(f'tensor {tensor.name!r} is to be written twice')
    names.add(tensor.name)
    if safetensors_header.dtype_name(tensor.dtype) is None:
      raise ValueError(
        f'tensor {tensor.name!r} has dtype {tensor.dtype}, which safetensors'
        f' are not written in; use one of'
        f' {", ".join(map(str, safetensors_header.DTYPES.values()))}'
      )


def _shards(
  plan: Sequence[PlannedTensor], shard_bytes: int
) -> dict[str, list[PlannedTensor]]:
  """Fills one file after another, by name."""
  groups: list[list[PlannedTensor]] = [[]]
  room = shard_bytes
  for tensor in sorted(plan, key=lambda tensor: tensor.name):
    if groups[-1] and tensor.nbytes > room:
      groups.append([])
      room = shard_bytes
    groups[-1].append(tensor)
    room -= tensor.nbytes
  if len(groups) == 1:
    return {tensor_folder.SINGLE: groups[0]}
  return {
    f'model-{number:05d}-of-{len(groups):05d}.safetensors': group
    for number, group in enumerate(groups, 1)
  }


def _write_header(
  file: pathlib.Path,
  shard: Sequence[PlannedTensor],
  metadata: Mapping[str, str],
) -> Mapping[str, safetensors_header.TensorInfo]:
  """Begins a file, at its final size; gives where its tensors go."""
  beginning, header = safetensors_header.build(
    file,
    [(item.name, item.shape, np.dtype(item.dtype)) for item in shard],
    metadata,
  )
  data = sum(item.nbytes for item in shard)
  try:
    with open(file, 'xb') as opened:
      opened.write(beginning)
      opened.truncate(len(beginning) + data)
  except OSError as error:
    raise disk.cannot_write(file, error) from error
  return header.tensors


def _counter(
  total: int, on_progress: Callable[[int, int], None] | None
) -> Callable[[int], None]:
  """Adds up bytes that are done, for several threads, and reports them."""
  lock, done = threading.Lock(), 0

  def count(nbytes: int) -> None:
    nonlocal done
    with lock:
      done += nbytes
      if on_progress:
        on_progress(done, total)

  count(0)
  return count


def _write_plan(
  plan: Sequence[PlannedTensor],
  places: Mapping[str, safetensors_header.TensorInfo],
  count: Callable[[int], None],
) -> None:
  """Makes the arrays in their order; others are meanwhile written."""
  waiting, held = collections.deque(), 0
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    try:
      for tensor in plan:
        while waiting and held + tensor.nbytes > _AHEAD:
          future, nbytes = waiting.popleft()
          future.result()
          held -= nbytes
        future = pool.submit(
          _write_data, tensor, tensor.make(), places[tensor.name], count
        )
        waiting.append((future, tensor.nbytes))
        held += tensor.nbytes
      for future, _ in waiting:
        future.result()
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def _write_data(
  tensor: PlannedTensor,
  made: np.ndarray,
  info: safetensors_header.TensorInfo,
  count: Callable[[int], None],
) -> None:
  """Writes what `made` becomes to its place; counts the bytes."""
  array = tensor.finish(made)
  if array.shape != info.shape or array.dtype != info.dtype:
    raise ValueError(
      f'tensor {tensor.name!r} was to be {list(info.shape)} in {info.dtype},'
      f' but is {list(array.shape)} in {array.dtype}'
    )
  try:
    with open(info.file, 'r+b', buffering=0) as file:
      file.seek(info.offset)
      for block in _blocks(array):
        _write_all(file, block)
        count(block.nbytes)
  except OSError as error:
    raise disk.cannot_write(info.file, error) from error


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
  """The bytes of an array row by row, some at a time."""
  if array.flags.c_contiguous:
    flat = array.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _BLOCK):
      yield flat[start : start + _BLOCK]
    return
  # A transposed array is copied by blocks of rows, never whole.
  rows = max(1, _BLOCK * len(array) // array.nbytes)
  for start in range(0, len(array), rows):
    part = transposing.in_order(array[start : start + rows])
    yield part.reshape(-1).view(np.uint8)


def _write_all(file: io.FileIO, block: np.ndarray) -> None:
  """Writes all of it: one call may write less, 2 GB on Linux."""
  rest = memoryview(block)
  while rest:
    rest = rest[file.write(rest) :]


def _write_index(
  path: pathlib.Path,
  total: int,
  places: Mapping[str, safetensors_header.TensorInfo],
) -> None:
  content = {
    'metadata': {'total_size': total},
    'weight_map': {name: places[name].file.name for name in sorted(places)},
  }
  try:
    atomic.write_json(path, content)
  except OSError as error:
    raise disk.cannot_write(path, error) from error
