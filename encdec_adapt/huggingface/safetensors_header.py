"""The header of a safetensors file: parsed with suspicion, and built.

A file is 8 bytes (the length of the header, little-endian), the header (JSON:
name -> dtype, shape, first and last byte of its data; perhaps
`__metadata__`), then the data without gaps, each tensor row-major and
little-endian. Source: the format's page of the `safetensors` project; what is
accepted here, that library accepts too.

Imports nothing else of ours but errors and files. No data is read here.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
import struct
from typing import Any

import ml_dtypes
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths

DTYPES = {
  'BOOL': np.dtype(np.bool_),
  'U8': np.dtype(np.uint8),
  'I8': np.dtype(np.int8),
  'U16': np.dtype(np.uint16),
  'I16': np.dtype(np.int16),
  'U32': np.dtype(np.uint32),
  'I32': np.dtype(np.int32),
  'U64': np.dtype(np.uint64),
  'I64': np.dtype(np.int64),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
  'F32': np.dtype(np.float32),
  'F64': np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = '__metadata__'
_FIELDS = {'dtype', 'shape', 'data_offsets'}
_LENGTH = struct.Struct('<Q')
_LONGEST = 100_000_000  # Bytes of a header; the library's own limit.
_LARGEST = 2**62  # Bytes of a tensor; what NumPy can count, with room.
_MOST_AXES = 32  # NumPy takes 64, JAX and torch fewer.


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies and what it is.

  Attributes:
    shape: () for a scalar.
    dtype: one of `DTYPES`; bfloat16 is that of ml_dtypes.
    file: the safetensors file.
    offset: of the tensor's first byte, from the beginning of the file.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  file: paths.Path
  offset: int

  @property
  def nbytes(self) -> int:
    """Bytes of data."""
    return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Header:
  """What a file says of itself.

  Attributes:
    tensors: by name, in the order of their data.
    metadata: free text by name.
  """

  tensors: Mapping[str, TensorInfo]
  metadata: Mapping[str, str]


# -- Reading -----------------------------------------------------------------


def read(file: str | os.PathLike[str]) -> Header:
  """Reads and checks the header of a file.

  Args:
    file: a safetensors file.

  Returns:
    A header that describes every byte of the file after itself exactly once.

  Raises:
    UserError: the file cannot be read or is not what its header says; names
      the tensor where there is one.
  """
  file = paths.at(file)
  text, size = _read_text(file)
  if not text.startswith(b'{'):
    raise atomic.damaged(file, "its header does not start with '{'")
  entries = atomic.parse_json(text, file)
  metadata = entries.pop(_METADATA, {})
  if not _is_text_by_name(metadata):
    raise atomic.damaged(file, f'{_METADATA} is not text by name')
  first = _LENGTH.size + len(text)
  spans = [
    (*_offsets(file, name, entry), name, entry)
    for name, entry in entries.items()
  ]
  spans.sort(key=lambda span: span[:2])
  tensors, end = {}, 0
  for begin, stop, name, entry in spans:
    if begin != end:
      what = 'overlaps the one before' if begin < end else 'leaves a gap before'
      raise atomic.damaged(
        file, f'tensor {name!r} {what}: it starts at byte {begin}, not {end}'
      )
    tensors[name] = _tensor(file, name, entry, first + begin, stop - begin)
    end = stop
  if first + end != size:
    last = f' (the last is {spans[-1][2]!r})' if spans else ''
    raise atomic.damaged(
      file,
      f'its tensors{last} need {first + end} bytes, the file has {size}',
    )
  return Header(tensors, metadata)


def _read_text(file: paths.Path) -> tuple[bytes, int]:
  """The header's bytes, and the size of the file."""
  try:
    with file.open('rb') as opened:
      size = paths.size(file)
      start = opened.read(_LENGTH.size)
      if start == b'version ':
        raise errors.UserError(
          f'{file} is a Git LFS pointer, not the weights: run `git lfs pull`'
          ' in its folder.'
        )
      if len(start) < _LENGTH.size:
        raise atomic.damaged(
          file, f'it has {size} bytes, too few for any header'
        )
      (length,) = _LENGTH.unpack(start)
      if length > min(size - _LENGTH.size, _LONGEST):
        raise atomic.damaged(
          file,
          f'it says that its header has {length} bytes, but the file has'
          f' {size} and no header more than {_LONGEST}',
        )
      text = opened.read(length)
  except OSError as error:
    raise atomic.cannot_read(file, error) from error
  return text, size


def _offsets(file: paths.Path, name: str, entry: Any) -> tuple[int, int]:
  """First and last byte of a tensor's data, from the end of the header."""
  if not isinstance(entry, dict) or set(entry) != _FIELDS:
    raise atomic.damaged(
      file, f'tensor {name!r} is not described by {", ".join(sorted(_FIELDS))}'
    )
  offsets = entry['data_offsets']
  if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
    raise atomic.damaged(file, f'tensor {name!r} has data_offsets {offsets!r}')
  return offsets[0], offsets[1]


def _tensor(
  file: paths.Path, name: str, entry: dict, offset: int, nbytes: int
) -> TensorInfo:
  """Checks dtype and shape against the bytes that the tensor has."""
  shape, dtype = entry['shape'], entry['dtype']
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise errors.UserError(
      f'{file}: tensor {name!r} has dtype {dtype!r}, which cannot be read'
      f' (these can: {", ".join(DTYPES)}). Convert it first, e.g. dequantise'
      ' the model to bfloat16 and save it again.'
    )
  if not _are_counts(shape):
    raise atomic.damaged(file, f'tensor {name!r} has shape {shape!r}')
  # An axis of 0 would hide the others, which NumPy counts too.
  count = math.prod(size for size in shape if size)
  if len(shape) > _MOST_AXES or count * DTYPES[dtype].itemsize > _LARGEST:
    raise atomic.damaged(
      file, f'tensor {name!r} has shape {shape!r}, out of bounds'
    )
  info = TensorInfo(tuple(shape), DTYPES[dtype], file, offset)
  if info.nbytes != nbytes:
    raise atomic.damaged(
      file,
      f'tensor {name!r} of shape {shape} in {dtype} takes {info.nbytes} bytes'
      f' but has {nbytes}',
    )
  return info


def _are_counts(values: Any) -> bool:
  """Whether it is a list of integers of at least 0."""
  return isinstance(values, list) and all(
    type(value) is int and value >= 0 for value in values
  )


def _is_text_by_name(value: Any) -> bool:
  return isinstance(value, dict) and all(
    isinstance(text, str) for text in value.values()
  )


# -- Building ----------------------------------------------------------------


def dtype_name(dtype: np.dtype) -> str | None:
  """The format's name of a dtype; None if it has none."""
  return _NAMES.get(np.dtype(dtype))


def build(
  file: str | os.PathLike[str],
  tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]],
  metadata: Mapping[str, str],
) -> tuple[bytes, Header]:
  """Builds the beginning of a file.

  Data starts at a multiple of 8, and the widest dtypes come first: so every
  tensor is aligned to its own dtype. Within a dtype's width, names ascend.

  Args:
    file: to be written.
    tensors: (name, shape, dtype), names distinct, dtypes among `DTYPES`.
    metadata: text by name; `transformers` wants {'format': 'pt'}.

  Returns:
    The bytes before the data, and what `read` will give for the whole file.
  """
  ordered = sorted(tensors, key=lambda item: (-item[2].itemsize, item[0]))
  entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
  end = 0
  for name, shape, dtype in ordered:
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    entries[name] = {
      'dtype': _NAMES[dtype],
      'shape': list(shape),
      'data_offsets': [begin, end],
    }
  text = json.dumps(entries, ensure_ascii=False, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  first = _LENGTH.size + len(text)
  header = Header(
    {
      name: TensorInfo(
        tuple(shape),
        dtype,
        paths.at(file),
        first + entries[name]['data_offsets'][0],
      )
      for name, shape, dtype in ordered
    },
    dict(metadata),
  )
  return _LENGTH.pack(len(text)) + text, header
