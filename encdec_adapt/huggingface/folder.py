"""A Hugging Face folder as one of our models: config and lazy parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
import dataclasses
import math
import os

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import (
  config_json,
  families,
  safetensors_header,
  tensor_folder,
  transposing,
  vision,
  weights,
)
from encdec_adapt.models import layer_leaves, model_config, parameters

# Tensors that are no weights: old exports carry these buffers.
_BUFFERS = ('.rotary_emb.inv_freq',)
_FLOATS = tuple(
  safetensors_header.DTYPES[name] for name in ('F64', 'F32', 'F16', 'BF16')
)
_TOGETHER = 1 << 22  # Elements of two copies that are compared at a time.
_THREADS = 4  # Layers made at a time: NumPy releases the interpreter's lock.


@dataclasses.dataclass(frozen=True)
class LazyArray:
  """A parameter that is read when it is asked for.

  Attributes:
    path: of the parameter in our tree.
    shape: of the whole array, `layers` axis included.
    dtype: of the tensors that it is made of; of several, one that holds all.
    read: an index (a tuple of slices, one per dimension) -> that part.
  """

  path: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[tuple[slice, ...]], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Bytes of the whole array as it is stored."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize

  def __getitem__(self, place: int | tuple[int, ...]) -> np.ndarray:
    """What is at a place on the first axes: a layer, an expert of it."""
    place = place if isinstance(place, tuple) else (place,)
    ones = tuple(slice(i, i + 1) for i in place)
    rest = tuple(slice(None) for _ in self.shape[len(place) :])
    return self.read((*ones, *rest))[(0,) * len(place)]

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """The whole array."""
    del copy
    whole = self.read(tuple(slice(None) for _ in self.shape))
    return whole if dtype is None else whole.astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A tensor of a layout, as it lies in a folder.

  Attributes:
    tensor: name in the folder.
    shape: of the piece.
    place: number and rows in a tensor of all experts, None for all of it.
  """

  tensor: str
  shape: tuple[int, ...]
  place: tuple[int, slice] | None

  def read(self, tensors: tensor_folder.TensorFolder) -> np.ndarray:
    if self.place is None:
      return tensors.read(self.tensor)
    number, rows = self.place
    return tensors.read(self.tensor, slice(number, number + 1))[0][rows]


# Each weight of our leaf with what is stored of it: mostly one piece; further
# ones are copies, which have to be equal.
_Found = dict[str, list[tuple[weights.Weight, list[_Piece]]]]


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
  """The dtype that holds values of all of these exactly.

  Args:
    dtypes: of weights, at least one. NumPy knows of none for bfloat16 with
      float16.
  """
  found = {np.dtype(dtype) for dtype in dtypes}
  if len(found) == 1:
    return found.pop()
  return np.dtype(np.float64 if np.float64 in found else np.float32)


class ModelFolder:
  """A folder whose every tensor has been accounted for.

  Attributes:
    config: the model.
    raw: the parsed config.json.
    tensors: the tensors as they lie in the folder.
    unused: tensors that are no part of the model -> why.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    raw: families.Raw,
    tensors: tensor_folder.TensorFolder,
    found: _Found,
    unused: Mapping[str, str],
  ):
    """Use `open`, which checks what it is given."""
    self.config = config
    self.raw = raw
    self.tensors = tensors
    self.unused = unused
    self._found = found

  @classmethod
  def open(
    cls,
    folder: str | os.PathLike[str],
    *,
    vocab_multiple: int | None = None,
  ) -> 'ModelFolder':
    """Reads the config and the headers, and matches every tensor.

    Args:
      folder: with config.json and safetensors.
      vocab_multiple: rows of the tables are padded with zeros to a multiple
        of this; None for as many as there are.

    Raises:
      UserError: a damaged or unsupported folder; a tensor that is missing,
        unexpected or of another shape than the config says.
    """
    folder = paths.at(folder)
    raw = atomic.read_json(folder / tensor_folder.CONFIG)
    config, layout = config_json.model_from_raw(
      raw, str(folder / tensor_folder.CONFIG)
    )
    if vocab_multiple is not None:
      config = model_config.with_vocab_multiple(config, vocab_multiple)
    tensors = tensor_folder.TensorFolder.open(folder)
    found, unused = _match(config, layout, tensors)
    return cls(config, raw, tensors, found, unused)

  def arrays(self) -> Iterator[LazyArray]:
    """Every parameter of our tree, unread, in the order of the table."""
    leaves = layer_leaves.leaves_of(self.config)
    stored = layer_leaves.stored_leaves(leaves)
    for path, info in parameters.parameter_table(self.config).items():
      names = stored[path]
      dtype = self._dtype(names)

      def read(index, names=tuple(names), info=info, dtype=dtype):
        if leaves[names[0]].index is None:
          return self._read(names[0], index, dtype)
        whole = np.empty(_extents(index, info.shape), dtype)

        def fill(row: np.ndarray, name: str) -> None:
          self._read(name, index[1:], dtype, row)

        with futures.ThreadPoolExecutor(_THREADS) as pool:
          for _ in pool.map(fill, whole, names[index[0]]):
            pass  # An error of a layer is raised here.
        return whole

      yield LazyArray(path, tuple(info.shape), dtype, read)

  def _dtype(self, leaves: Iterable[str]) -> np.dtype:
    """What holds everything that is stored of some leaves, exactly."""
    return common_dtype(
      self.tensors.tensors[pieces[0].tensor].dtype
      for leaf in leaves
      for _, pieces in self._found[leaf]
    )

  def _read(
    self,
    leaf: str,
    index: tuple[slice, ...],
    dtype: np.dtype,
    out: np.ndarray | None = None,
  ) -> np.ndarray:
    """Part of our leaf; of the file only that part is read.

    Args:
      leaf: its name.
      index: of the part.
      dtype: of the result.
      out: where it goes. None: a new array, or the pages of the file where it
        lies there as it is asked for.
    """
    found = self._found[leaf]
    if found[0][0].part is None:
      return self._read_tensor(*found[0], index, dtype, out)
    chosen = found[index[0]]
    if out is None:
      shape = _extents(index[1:], chosen[0][0].shape)
      out = np.empty((len(chosen), *shape), dtype)
    for row, one in zip(out, chosen, strict=True):
      self._read_tensor(*one, index[1:], dtype, row)
    return out

  def _read_tensor(
    self,
    weight: weights.Weight,
    pieces: list[_Piece],
    index: tuple[slice, ...],
    dtype: np.dtype,
    out: np.ndarray | None,
  ) -> np.ndarray:
    """Part of what a tensor is; its copies have to be equal to it."""
    part, *copies = (
      weight.to_ours(piece.read(self.tensors))[index] for piece in pieces
    )
    shape = _extents(index, weight.shape)
    lies_so = (part.shape, part.dtype) == (shape, dtype)
    if out is None and lies_so and part.flags.c_contiguous:
      out = part
    else:
      out = np.empty(shape, dtype) if out is None else out
      transposing.copy(part, out[: len(part)])
      out[len(part) :] = 0  # Rows of a table that are no tokens.
    first, *others = pieces
    tensor_folder.check_finite(first.tensor, out, self._file(first))
    for piece, copy in zip(others, copies, strict=True):
      if not _are_equal(part, copy):
        raise errors.UserError(
          f'{self._file(piece)}: {piece.tensor!r} differs from'
          f' {first.tensor!r} in {self._file(first)}, and in this model they'
          ' are one tensor. Remove the one that is not meant, or correct the'
          ' config.json.'
        )
    return out

  def _file(self, piece: _Piece) -> paths.Path:
    return self.tensors.tensors[piece.tensor].file


def _extents(
  index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
  """Shape of a part of an array."""
  return tuple(
    len(range(*one.indices(size)))
    for one, size in zip(index, shape, strict=True)
  )


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
  """Whether two arrays have the same values; some rows at a time."""
  if one.dtype != other.dtype:
    return False
  rows = max(1, _TOGETHER // max(1, one[:1].size))
  return all(
    np.array_equal(one[i : i + rows], other[i : i + rows])
    for i in range(0, len(one), rows)
  )


def _match(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  tensors: tensor_folder.TensorFolder,
) -> tuple[_Found, dict[str, str]]:
  """Our leaf -> its weights and tensors; tensors that are none -> why."""
  present = _pieces(config, layout, tensors)
  wanted = weights.weights(config, layout)
  missing = [name for name in wanted if name not in present]
  if missing:
    raise errors.UserError(
      f'{tensors.folder} has no tensor {missing[0]!r}'
      + (f' (and {len(missing) - 1} more)' if len(missing) > 1 else '')
      + ', which its config.json asks for. The folder is incomplete, or the'
      ' config is of another model.'
    )
  unused = {}
  for canonical, pieces in present.items():
    weight = wanted.get(canonical)
    if weight is None:
      for name in dict.fromkeys(piece.tensor for piece in pieces):
        file = tensors.tensors[name].file
        unused[name] = _why_unused(name, layout, file)
      continue
    for piece in pieces:
      _require_fits(weight, piece, tensors.tensors[piece.tensor])
    for piece in pieces[1:]:
      unused[piece.tensor] = f'a copy of {pieces[0].tensor}'
  found: _Found = {}
  for canonical, weight in wanted.items():  # Experts in their order.
    found.setdefault(weight.leaf, []).append((weight, present[canonical]))
  return found, unused


def _require_fits(
  weight: weights.Weight, piece: _Piece, info: safetensors_header.TensorInfo
) -> None:
  """Refuses what is stored in another shape, or as integers."""
  if piece.shape != weight.their_shape:
    of_one = ' of an expert' if piece.place else ''
    raise errors.UserError(
      f'{piece.tensor} in {info.file} has shape {list(piece.shape)}{of_one};'
      f' the config.json beside it says {list(weight.their_shape)}.'
    )
  if info.dtype not in _FLOATS:
    raise errors.UserError(
      f'{piece.tensor} in {info.file} is of {info.dtype}, and weights are of'
      f' {", ".join(map(str, _FLOATS))}. These may be quantised: give the'
      ' folder of the model as it was before.'
    )


def _pieces(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  tensors: tensor_folder.TensorFolder,
) -> dict[str, list[_Piece]]:
  """Everything in a folder by its name in the layout, copies last."""
  pieces: dict[str, list[_Piece]] = {}
  for name, info in tensors.tensors.items():
    shape = tuple(info.shape)
    held = layout.pieces(layout.canonical(name), shape)
    for canonical, place in held.items():
      own = shape
      if place is not None:
        own = (place[1].stop - place[1].start, *shape[2:])
      pieces.setdefault(canonical, []).append(_Piece(name, own, place))
  for copy, original in weights.copies(config, layout).items():
    if copy in pieces:
      pieces.setdefault(original, []).extend(pieces.pop(copy))
  return pieces


def _why_unused(name: str, layout: weights.Layout, file: paths.Path) -> str:
  if name.endswith(_BUFFERS):
    return 'a buffer that is computed from the config'
  if vision.is_vision(name):
    if layout is weights.PAIR_T5GEMMA2:
      return 'of the vision part, which is kept for export'
    return 'of the vision part; only text is a part of the model'
  raise errors.UserError(
    f'{name} in {file} is no tensor of the model that config.json describes.'
    ' Nothing is dropped silently: remove it, or correct the config.'
  )
