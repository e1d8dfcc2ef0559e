"""The tensors of a Hugging Face folder, read one at a time.

Opening a folder reads and checks headers only. Imports the header's format
and the errors; no JAX, so that looking into a folder is quick.
"""

from collections.abc import Mapping
import math
import mmap
import os
import pathlib
import types

import ml_dtypes
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import safetensors_header

SINGLE = 'model.safetensors'
CONFIG = 'config.json'
INDEX = 'model.safetensors.index.json'
_PICKLED = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
_NOT_WEIGHTS = ('training_args.bin',)
_BLOCK = 1 << 20  # Elements looked at together for what is not finite.
# All ones in the exponent is infinite or not a number. Comparing bits is ten
# times as fast as NumPy's test where it has no instruction for the type.
_EXPONENTS = {
  np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
  np.dtype(np.float16): np.uint16(0x7C00),
}


class TensorFolder:
  """The safetensors of a folder by name.

  Attributes:
    folder: where they lie.
    tensors: name -> `safetensors_header.TensorInfo`, by file and then in the
      order of the data, which is the quickest to read.
    metadata: the free text of all files together.
  """

  def __init__(
    self,
    folder: paths.Path,
    tensors: Mapping[str, safetensors_header.TensorInfo],
    metadata: Mapping[str, str],
  ):
    """Use `open`, which checks what it is given."""
    self.folder = folder
    self.tensors = types.MappingProxyType(dict(tensors))
    self.metadata = types.MappingProxyType(dict(metadata))

  @classmethod
  def open(cls, folder: str | os.PathLike[str]) -> 'TensorFolder':
    """Finds the tensors of a folder and checks all headers.

    Args:
      folder: with `model.safetensors`, or `model.safetensors.index.json` and
        the shards it names.

    Raises:
      UserError: there are no such files, or pickled ones only; an index, a
        shard or a header is missing, damaged or contradicts another.
    """
    folder = paths.at(folder)
    try:
      if not folder.is_dir():
        raise errors.UserError(
          f'{folder} is not a folder. Give the folder of a downloaded model,'
          f' with its config.json and {SINGLE}.'
        )
      if (folder / INDEX).exists():
        return cls(folder, *_open_shards(folder))
      if (folder / SINGLE).exists():
        header = safetensors_header.read(folder / SINGLE)
        return cls(folder, header.tensors, header.metadata)
      raise _nothing_to_read(folder)
    except OSError as error:
      raise atomic.cannot_read(error.filename or folder, error) from error

  @property
  def nbytes(self) -> int:
    """Bytes of all tensors together."""
    return sum(info.nbytes for info in self.tensors.values())

  def read(self, name: str, rows: slice | None = None) -> np.ndarray:
    """Maps one tensor into memory; of a bucket, reads it.

    A file's pages are read as they are used and dropped with the array.

    Args:
      name: of the tensor.
      rows: a range of the first axis, step 1; None is all.

    Returns:
      An array that cannot be written to, of the tensor's own dtype.

    Raises:
      UserError: there is no such tensor, or the file is not what it was when
        the folder was opened.
      ValueError: a scalar has no rows, or `rows` has another step than 1.
    """
    if name not in self.tensors:
      raise errors.UserError(
        f'{self.folder} has no tensor {name!r} among its {len(self.tensors)}.'
        ' Check that config.json and the weights are of the same model.'
      )
    info = self.tensors[name]
    shape, offset = info.shape, info.offset
    if rows is not None:
      if not shape:
        raise ValueError(f'{name!r} is a scalar and has no rows')
      start, stop, step = rows.indices(shape[0])
      if step != 1:
        raise ValueError(f'rows of {name!r} have step {step}; it must be 1')
      offset += start * (info.nbytes // shape[0] if shape[0] else 0)
      shape = (max(stop - start, 0), *shape[1:])
    return _map(name, info, offset, shape)


def check_finite(
  name: str, array: np.ndarray, file: str | os.PathLike[str]
) -> None:
  """Refuses a tensor with values that are infinite or not numbers.

  Args:
    name: of the tensor.
    array: any shape; integers and booleans always pass.
    file: it comes from.

  Raises:
    UserError: names the tensor, the first such value and where it is.
  """
  exponent = _EXPONENTS.get(array.dtype)
  if exponent is None and array.dtype.kind != 'f':
    return
  flat = array.reshape(-1)
  for start in range(0, flat.size, _BLOCK):
    block = flat[start : start + _BLOCK]
    if exponent is None:
      finite = np.isfinite(block)
      if finite.all():
        continue
    else:
      bits = block.view(np.uint16) & exponent
      if bits.max() != exponent:
        continue
      finite = bits != exponent
    first = int(np.argmin(finite))
    place = [int(i) for i in np.unravel_index(start + first, array.shape)]
    raise errors.UserError(
      f'{file}: tensor {name!r} has the value {float(block[first])} at {place}.'
      ' These weights are damaged, or their training had diverged: use an'
      ' earlier checkpoint, or fetch the file again.'
    )


def _open_shards(
  folder: paths.Path,
) -> tuple[dict[str, safetensors_header.TensorInfo], dict[str, str]]:
  """Tensors and metadata of all shards, each tensor where the index says."""
  index = folder / INDEX
  places = _read_index(index)
  names = sorted(set(places.values()))
  if (folder / SINGLE).exists() and SINGLE not in names:
    raise errors.UserError(
      f'{folder} has {SINGLE} and also {INDEX}, which names other files. Remove'
      ' the one that is not of this model.'
    )
  tensors, metadata = {}, {}
  for shard in names:
    file = folder / shard
    if not file.exists():
      key = next(key for key, place in places.items() if place == shard)
      raise errors.UserError(
        f'{index} says that {key!r} is in {shard}, which is not there. Fetch'
        f' {shard} into {folder}.'
      )
    header = safetensors_header.read(file)
    for key in header.tensors:
      if places.get(key) != shard:
        where = f'in {places[key]}' if key in places else 'nowhere'
        raise atomic.damaged(
          index, f'tensor {key!r} is in {shard}, but by the index {where}'
        )
    tensors.update(header.tensors)
    metadata.update(header.metadata)
  for key, place in places.items():
    if key not in tensors:
      raise atomic.damaged(
        index, f'tensor {key!r} is by the index in {place}, but not there'
      )
  return tensors, metadata


def _read_index(index: paths.Path) -> dict[str, str]:
  """The index's file name for each tensor."""
  content = atomic.parse_json(index.read_bytes(), index)
  places = content.get('weight_map')
  if not isinstance(places, dict):
    raise atomic.damaged(index, 'it has no weight_map by name')
  for key, place in places.items():
    # Only files of this folder: an index is not to be trusted with paths.
    if (
      not isinstance(place, str)
      or pathlib.PurePath(place).name != place
      or not place.endswith('.safetensors')
    ):
      raise atomic.damaged(
        index,
        f'tensor {key!r} is by the index in {place!r}, which is not the'
        ' name of a safetensors file',
      )
  return places


def _nothing_to_read(folder: paths.Path) -> errors.UserError:
  """The error for a folder with neither a single file nor an index."""
  found = sorted(path.name for path in folder.iterdir())
  pickled = [
    name
    for name in found
    if name.endswith(_PICKLED) and name not in _NOT_WEIGHTS
  ]
  others = [name for name in found if name.endswith('.safetensors')]
  if pickled and not others:
    return errors.UserError(
      f'{folder} has pickled weights only ({", ".join(pickled)}), which can'
      ' run code when they are read and are refused. Where you trust them,'
      ' load the model with transformers and save it with save_pretrained,'
      ' which writes safetensors.'
    )
  has = f' (it has {", ".join(others)})' if others else ''
  return errors.UserError(
    f'{folder} has neither {SINGLE} nor {INDEX}{has}. Give the folder of a'
    ' whole model, as save_pretrained or a download makes it.'
  )


def _map(
  name: str,
  info: safetensors_header.TensorInfo,
  offset: int,
  shape: tuple[int, ...],
) -> np.ndarray:
  """Maps `shape` from `offset`; the mapping lives as long as the array."""
  count = math.prod(shape)
  if not count:
    empty = np.empty(shape, info.dtype)
    empty.flags.writeable = False
    return empty
  start = offset - offset % mmap.ALLOCATIONGRANULARITY
  nbytes = count * info.dtype.itemsize
  try:
    if paths.is_bucket(info.file):
      start = offset
      pages = paths.read_range(info.file, offset, nbytes)
    else:
      pages = _map_pages(info.file, start, offset - start + nbytes)
  except (OSError, ValueError) as error:
    raise errors.UserError(
      f'{info.file}: tensor {name!r} cannot be read any more ({error}). The'
      ' file was changed or removed; start again when it is whole.'
    ) from error
  array = np.frombuffer(pages, info.dtype, count, offset - start)
  if not array.flags.aligned:  # Writers other than the library's.
    array = array.copy()
    array.flags.writeable = False
  return array.reshape(shape)


def _map_pages(path: pathlib.Path, start: int, nbytes: int) -> mmap.mmap:
  with open(path, 'rb') as file:
    return mmap.mmap(
      file.fileno(), nbytes, access=mmap.ACCESS_READ, offset=start
    )
