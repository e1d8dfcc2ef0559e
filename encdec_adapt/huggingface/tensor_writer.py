"""Writes tensors as safetensors, shard by shard.

The `safetensors` package needs all arrays of a file at once, so host memory is
bounded by the size of a shard.
"""

from collections.abc import Callable, Mapping
import os
import pathlib

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, disk, lazy_array, paths
from encdec_adapt.huggingface import tensor_folder, transposed_copy

SHARD_BYTES = 2 << 30  # Bounds host memory, and $TMPDIR with a bucket.
_PYTORCH = {'format': 'pt'}  # transformers refuses a file without it.


def write_tensors(
  folder: str | os.PathLike[str],
  tensors: Mapping[str, lazy_array.LazyArray],
  *,
  bucket: paths.Path | None = None,
  on_progress: Callable[[int, int], None] = lambda nbytes, total: None,
) -> None:
  """Writes tensors into a folder in the layout of `transformers`.

  Writes a single file, or an index and shards of at most `SHARD_BYTES` or one
  larger tensor. Reads arrays and fills shards in the order of `tensors`. Call
  it inside `new_folder.new_folder`, since a failure leaves files behind.

  Args:
    folder: local folder without safetensors.
    tensors: name -> tensor, in a dtype supported by `tensor_folder`; each is
      read once.
    bucket: folder in a bucket; finished shards are moved there, so that
      `folder` never holds two. None keeps all shards in `folder`.
    on_progress: called with the bytes read so far and in total.

  Raises:
    UserError: the disk has no room, or a file cannot be written.
  """
  folder, shards = pathlib.Path(folder), _shards(tensors)
  sizes = [sum(tensors[x].nbytes for x in names) for names in shards.values()]
  written, total = 0, sum(sizes)
  nbytes, remedy = (max(sizes), ' ($TMPDIR)') if bucket else (total, '')
  disk.require_space(folder, nbytes, label='the weights', remedy=remedy)
  on_progress(written, total)
  for shard, names in shards.items():
    arrays = {}
    for name in names:
      # `save_file` writes an array's raw memory and ignores strides.
      arrays[name] = transposed_copy.in_order(np.asarray(tensors[name]))
      written += tensors[name].nbytes
      on_progress(written, total)
    _save(folder / shard, arrays, bucket)
  if len(shards) > 1:
    files = {name: shard for shard, names in shards.items() for name in names}
    content = {'metadata': {'total_size': total}, 'weight_map': files}
    atomic.write_json(folder / tensor_folder.INDEX, content)


def _shards(
  tensors: Mapping[str, lazy_array.LazyArray],
) -> dict[str, list[str]]:
  """Returns file name -> names of its tensors."""
  groups: list[list[str]] = [[]]
  room = SHARD_BYTES
  for name, tensor in tensors.items():
    if groups[-1] and tensor.nbytes > room:
      groups.append([])
      room = SHARD_BYTES
    groups[-1].append(name)
    room -= tensor.nbytes
  # transformers looks for this file name, or else for the index.
  if len(groups) == 1:
    return {tensor_folder.SINGLE: groups[0]}
  return {
    f'model-{number:05d}-of-{len(groups):05d}.safetensors': group
    for number, group in enumerate(groups, 1)
  }


def _save(
  file: pathlib.Path,
  arrays: Mapping[str, np.ndarray],
  bucket: paths.Path | None,
) -> None:
  try:
    file.touch(exist_ok=False)
    mode = file.stat().st_mode
    # `save_file` replaces the file with a file readable only by its owner.
    safetensors_numpy.save_file(dict(arrays), file, _PYTORCH)
    file.chmod(mode)
    if bucket is not None:
      paths.copy(file, bucket / file.name)
      file.unlink()
  except OSError as error:
    raise disk.cannot_write(file, error) from error
  except safetensors.SafetensorError as error:
    raise errors.UserError(
      f'{file} cannot be written ({error}). Free space there, or choose another'
      ' folder.'
    ) from error
