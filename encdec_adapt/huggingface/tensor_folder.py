"""Reads the tensors of a Hugging Face folder one at a time.

The `safetensors` package parses and checks the files. This module finds them
(`model.safetensors`, or the shards of `model.safetensors.index.json`), supports
buckets, and adds the file to the package's errors. Must not import JAX, so that
listing a folder is quick.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import tempfile
import types

import ml_dtypes
import numpy as np
import safetensors

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths

SINGLE = 'model.safetensors'
CONFIG = 'config.json'
GENERATION = 'generation_config.json'
INDEX = 'model.safetensors.index.json'
_DTYPES = {
  'BOOL': np.dtype(np.bool_),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  **{f'F{bits}': np.dtype(f'float{bits}') for bits in (16, 32, 64)},
  **{f'I{bits}': np.dtype(f'int{bits}') for bits in (8, 16, 32, 64)},
  **{f'U{bits}': np.dtype(f'uint{bits}') for bits in (8, 16, 32, 64)},
}
_PICKLED = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
# Elements per finiteness check, which bounds the size of intermediate arrays.
_BLOCK = 1 << 20
_BFLOAT16_EXPONENT = 0x7F80  # All ones: infinite or not a number.


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Shape, dtype and location of a stored tensor.

  Attributes:
    shape: () for a scalar.
    dtype: NumPy dtype; `ml_dtypes.bfloat16` for bfloat16.
    file: safetensors file with the tensor.
    offset: first byte of the data in a file in a bucket, for reads by byte
      range; None for local files.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  file: paths.Path
  offset: int | None = None

  @property
  def nbytes(self) -> int:
    """Size of the data in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize


class TensorFolder:
  """Lazily read tensors of a folder.

  Attributes:
    folder: the folder.
    tensors: tensor name -> `TensorInfo`, file by file.
  """

  def __init__(self, folder: str | os.PathLike[str], single: str = SINGLE):
    """Opens a folder and checks the headers of its files; reads no data.

    Args:
      folder: folder with `single`, or with `model.safetensors.index.json` and
        its shards.
      single: file name in a folder without shards.

    Raises:
      UserError: the folder has no such files or only pickled weights; an
        index, a shard or a header is missing, damaged or inconsistent.
    """
    self.folder = paths.at(folder)
    self._opened: dict[tuple[paths.Path, str], safetensors.safe_open] = {}
    try:
      self.tensors = types.MappingProxyType(_tensors(self.folder, single))
    except OSError as error:
      raise atomic.cannot_read(error.filename or folder, error) from error

  def read(
    self, name: str, index: tuple[int | slice, ...] | None = None
  ) -> np.ndarray:
    """Reads a tensor or a part of it.

    Args:
      name: a name in `tensors`.
      index: an index or range of each axis, to read only this part; None reads
        the whole tensor.

    Returns:
      An array in the stored dtype.

    Raises:
      UserError: the file of the tensor cannot be read.
    """
    info = self.tensors[name]
    with _named_errors(info.file):
      if info.offset is not None:
        return _read_range(info, index)
      if index is None:
        return self._safe_open(info.file, 'pread').get_tensor(name)
      # Only the mapped backend reads less than the whole tensor.
      return self._safe_open(info.file, 'mmap').get_slice(name)[index]

  def _safe_open(self, file: paths.Path, backend: str) -> safetensors.safe_open:
    """Opens a file once per backend, since opening parses the header."""
    key = (file, backend)
    if key not in self._opened:
      self._opened[key] = safetensors.safe_open(file, 'np', backend=backend)
    return self._opened[key]


def check_finite(
  name: str, array: np.ndarray, file: str | os.PathLike[str]
) -> None:
  """Raises an error if a tensor has infinite or NaN values.

  Args:
    name: tensor name, for the message.
    array: array of any shape; integers and booleans always pass.
    file: origin of the tensor, for the message.

  Raises:
    UserError: names the tensor, the first such value and its index.
  """
  flat = array.reshape(-1)
  for start in range(0, flat.size, _BLOCK):
    block = flat[start : start + _BLOCK]
    if block.dtype == ml_dtypes.bfloat16:  # Ten times as fast as isfinite.
      exponent = block.view(np.uint16) & _BFLOAT16_EXPONENT
      finite = exponent != _BFLOAT16_EXPONENT
    else:
      finite = np.isfinite(block)
    if finite.all():
      continue
    first = int(np.argmin(finite))
    index = [int(i) for i in np.unravel_index(start + first, array.shape)]
    raise errors.UserError(
      f'{file}: tensor {name!r} has the value {float(block[first])} at {index}.'
      ' The weights are damaged or their training diverged: use an earlier'
      ' checkpoint, or download the file again.'
    )


@contextlib.contextmanager
def _named_errors(file: paths.Path):
  try:
    yield
  except OSError as error:
    raise atomic.cannot_read(file, error) from error
  except safetensors.SafetensorError as error:
    raise errors.UserError(
      f'{file} is no complete safetensors file ({error}). Download it again;'
      ' in a Git LFS checkout, run `git lfs pull`.'
    ) from error


def _headers(file: paths.Path) -> dict[str, TensorInfo]:
  with _named_errors(file), contextlib.ExitStack() as stack:
    local, offset = file, None
    if paths.is_bucket(file):
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      local, offset = _sparse_copy(file, pathlib.Path(folder) / SINGLE)
    opened = safetensors.safe_open(local, 'np')
    tensors = {}
    for name in opened.offset_keys():  # In the order of the data, no gaps.
      part = opened.get_slice(name)
      dtype = part.get_dtype()
      if dtype not in _DTYPES:
        raise errors.UserError(
          f'{file}: tensor {name!r} has dtype {dtype}, which is not supported'
          f' ({", ".join(_DTYPES)} are). Dequantise the model to bfloat16 and'
          ' save it again.'
        )
      shape = tuple(part.get_shape())
      tensors[name] = TensorInfo(shape, _DTYPES[dtype], file, offset)
      if offset is not None:
        offset += tensors[name].nbytes
    return tensors


def _sparse_copy(
  file: paths.Path, local: pathlib.Path
) -> tuple[pathlib.Path, int]:
  """Makes a sparse local copy of a file in a bucket: header and size, no data.

  The package checks the copy like the file. A file starts with the length of
  its header, 8 bytes, little-endian.

  Returns:
    The copy, and the offset of the first byte of data.
  """
  size = paths.size(file)
  header = paths.read_range(file, 0, min(8, size))
  offset = 8 + int.from_bytes(header, 'little')
  if 8 < offset <= size:  # If not, the package refuses the copy.
    header += paths.read_range(file, 8, offset - 8)
  with open(local, 'wb') as sparse:
    sparse.write(header)
    sparse.truncate(size)  # The package compares the size with the header.
  return local, offset


def _read_range(
  info: TensorInfo, index: tuple[int | slice, ...] | None
) -> np.ndarray:
  shape, offset, index = info.shape, info.offset, index or ()
  if index and isinstance(index[0], int):  # Only this matrix of a stack.
    shape = shape[1:]
    offset += index[0] * math.prod(shape) * info.dtype.itemsize
    index = index[1:]
  nbytes = math.prod(shape) * info.dtype.itemsize
  # An empty byte range is no valid request.
  data = paths.read_range(info.file, offset, nbytes) if nbytes else b''
  array = np.frombuffer(data, info.dtype).reshape(shape)
  return array[index]


def _tensors(folder: paths.Path, single: str) -> dict[str, TensorInfo]:
  has_single, has_index = ((folder / x).exists() for x in (single, INDEX))
  if has_single and has_index:
    # Either may be left over from an interrupted or repeated download.
    raise errors.UserError(
      f'{folder} has both {single} and {INDEX}. Remove the one that does not'
      ' belong to this model.'
    )
  if has_single:
    return _headers(folder / single)
  if has_index:
    return _open_shards(folder)
  raise _no_weights(folder)


def read_index(folder: paths.Path) -> dict[str, str]:
  """Reads the index: tensor name -> shard.

  Raises:
    UserError: the index is damaged.
  """
  index = folder / INDEX
  weight_map = atomic.read_json(index).get('weight_map')
  # Paths in an index are untrusted: only files of this folder are allowed.
  if not isinstance(weight_map, dict) or not all(
    isinstance(name, str) and pathlib.PurePath(name).name == name
    for name in weight_map.values()
  ):
    raise atomic.damaged(index, 'its weight_map must name files of the folder')
  return weight_map


def _open_shards(folder: paths.Path) -> dict[str, TensorInfo]:
  index = folder / INDEX
  weight_map = read_index(folder)
  tensors: dict[str, TensorInfo] = {}
  for shard in sorted(set(weight_map.values())):
    if not (folder / shard).exists():
      raise errors.UserError(
        f'{index} names {shard}, which is missing. Download {shard} into'
        f' {folder}.'
      )
    tensors |= _headers(folder / shard)
  # Compares both directions: intact shards may belong to different models or
  # downloads.
  shards = {name: info.file.name for name, info in tensors.items()}
  wrong = sorted(dict(shards.items() ^ weight_map.items()))
  if wrong:
    raise atomic.damaged(
      index,
      f'it places tensor {wrong[0]!r} in {weight_map.get(wrong[0])}, but the'
      f' shards have it in {shards.get(wrong[0])}',
    )
  return tensors


def _no_weights(folder: paths.Path) -> errors.UserError:
  files = folder.iterdir() if folder.is_dir() else ()
  pickled = sorted(file.name for file in files if file.suffix in _PICKLED)
  hint = ''
  if pickled:
    config = folder / CONFIG
    raw = atomic.read_json(config) if config.is_file() else {}
    name = (raw.get('architectures') or ['AutoModel'])[0]
    hint = (
      f' Its pickled weights ({", ".join(pickled)}) can run code when they are'
      ' read and are refused: if you trust them, rewrite them by\n'
      f'  from transformers import {name}\n'
      f"  {name}.from_pretrained('{folder}').save_pretrained('{folder}')"
    )
  return errors.UserError(
    f'{folder} has neither {SINGLE} nor {INDEX}. Give the folder of a whole'
    f' model, as save_pretrained or a download makes it.{hint}'
  )
