"""Reads a Hugging Face folder as our model config and lazy parameters."""

from collections.abc import Iterable
from concurrent import futures
import dataclasses
import os

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import (
  config_json,
  tensor_folder,
  transposed_copy,
  vision,
  weights,
)
from encdec_adapt.models import layer_leaves, model_config, parameters

# Buffers, not weights: old exports have them.
_BUFFERS = ('.rotary_emb.inv_freq',)
_FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
_THREADS = 4  # Layers read at a time: copying releases the interpreter's lock.


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A tensor of a layout, as it is stored in a folder.

  Attributes:
    tensor: name of the stored tensor.
    shape: shape of the piece.
    place: expert and its rows if one tensor holds all experts; else None.
  """

  tensor: str
  shape: tuple[int, ...]
  place: tuple[int, slice] | None


# Our leaf -> its weights, each with the pieces that store it: usually one;
# further ones are copies, which must be equal.
_Found = dict[str, list[tuple[weights.Weight, list[_Piece]]]]


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
  """Returns a dtype that holds the values of all given dtypes exactly.

  NumPy has no such promotion for bfloat16 and float16.

  Args:
    dtypes: float dtypes, at least one.
  """
  found = {np.dtype(dtype) for dtype in dtypes}
  if len(found) == 1:
    return found.pop()
  return np.dtype(np.float64 if np.float64 in found else np.float32)


class ModelFolder:
  """A folder whose every tensor has been matched with the model.

  Attributes:
    config: model config.
    tensors: stored tensors.
    unused: name of a tensor that the model does not use -> why.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, vocab_multiple: int | None = None
  ):
    """Reads the config and the headers, and matches every tensor.

    Args:
      folder: folder with config.json and safetensors.
      vocab_multiple: embedding tables get rows of zeros up to a multiple of
        this; None adds none.

    Raises:
      UserError: the folder is damaged or its model not supported; a tensor is
        missing, unexpected or of another shape than in the config.
    """
    folder = paths.at(folder)
    file = folder / tensor_folder.CONFIG
    raw = atomic.read_json(file)
    config, layout = config_json.model_from_raw(raw, str(file))
    if vocab_multiple is not None:
      config = model_config.with_vocab_multiple(config, vocab_multiple)
    self.config = config
    self.tensors = tensor_folder.TensorFolder(folder)
    self._found, self.unused = _match(config, layout, self.tensors)

  def arrays(self) -> dict[str, lazy_array.LazyArray]:
    """Returns every parameter, unread, in the order of the parameter table."""
    leaves = layer_leaves.leaves_of(self.config)
    stored = layer_leaves.stored_leaves(leaves)
    arrays = {}
    for path, info in parameters.parameter_table(self.config).items():
      names = stored[path]
      dtype = common_dtype(
        self.tensors.tensors[pieces[0].tensor].dtype
        for name in names
        for _, pieces in self._found[name]
      )
      is_stacked = leaves[names[0]].index is not None

      def read(
        index, names=names, is_stacked=is_stacked, info=info, dtype=dtype
      ):
        """Reads part of the parameter, its layers in several threads."""
        whole = np.empty(_extents(index, info.shape), dtype)
        if not is_stacked:
          self._read(names[0], index, whole)
          return whole
        with futures.ThreadPoolExecutor(_THREADS) as pool:
          rest = [index[1:]] * len(whole)
          for _ in pool.map(self._read, names[index[0]], rest, whole):
            pass  # An error of a layer is raised here.
        return whole

      arrays[path] = lazy_array.LazyArray(tuple(info.shape), dtype, read)
    return arrays

  def _read(self, leaf: str, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Reads part of a leaf.

    Args:
      leaf: leaf name.
      index: range of each dimension.
      out: array of the extents of `index`, to be filled.
    """
    found = self._found[leaf]
    if found[0][0].part is None:
      self._read_weight(*found[0], index, out)
      return
    for expert, row in zip(found[index[0]], out, strict=True):
      self._read_weight(*expert, index[1:], row)

  def _read_weight(
    self,
    weight: weights.Weight,
    pieces: list[_Piece],
    index: tuple[slice, ...],
    out: np.ndarray,
  ) -> None:
    """Reads part of a weight; all of its copies must be equal."""
    part, *copies = (
      weight.to_ours(self.tensors.read(piece.tensor, piece.place))[index]
      for piece in pieces
    )
    transposed_copy.copy(part, out[: len(part)])
    out[len(part) :] = 0  # Padding rows of a table.
    first, *others = pieces
    tensor_folder.check_finite(first.tensor, out, self._file(first))
    for piece, copy in zip(others, copies, strict=True):
      if part.dtype != copy.dtype or not np.array_equal(part, copy):
        raise errors.UserError(
          f'{self._file(piece)}: {piece.tensor!r} differs from'
          f' {first.tensor!r} in {self._file(first)}, but they are the same'
          ' weight of this model. Remove the wrong one, or correct config.json.'
        )

  def _file(self, piece: _Piece) -> paths.Path:
    return self.tensors.tensors[piece.tensor].file


def _extents(
  index: tuple[slice, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns the shape of a part of an array."""
  return tuple(
    len(range(*one.indices(size)))
    for one, size in zip(index, shape, strict=True)
  )


def _match(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  tensors: tensor_folder.TensorFolder,
) -> tuple[_Found, dict[str, str]]:
  """Matches tensors with leaves; returns also the unused ones and why."""
  present = _pieces(config, layout, tensors)
  wanted = weights.weights(config, layout)
  missing = [name for name in wanted if name not in present]
  if missing:
    raise errors.UserError(
      f'{tensors.folder} has no tensor {missing[0]!r}'
      + (f' (and {len(missing) - 1} more)' if len(missing) > 1 else '')
      + ', which its config.json requires. The folder is incomplete, or the'
      ' config belongs to another model.'
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
  weight: weights.Weight, piece: _Piece, info: tensor_folder.TensorInfo
) -> None:
  """Raises an error for another shape, or for integers."""
  if piece.shape != weight.their_shape:
    of_one = ' per expert' if piece.place else ''
    raise errors.UserError(
      f'{piece.tensor} in {info.file} has shape {list(piece.shape)}{of_one};'
      f' its config.json requires {list(weight.their_shape)}.'
    )
  if info.dtype.name not in _FLOATS:
    raise errors.UserError(
      f'{piece.tensor} in {info.file} has dtype {info.dtype}; weights are'
      f' {", ".join(_FLOATS)}. If the model is quantised, give the folder of'
      ' the original.'
    )


def _pieces(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  tensors: tensor_folder.TensorFolder,
) -> dict[str, list[_Piece]]:
  """Returns the stored pieces by canonical tensor name, copies last."""
  pieces: dict[str, list[_Piece]] = {}
  for name, info in tensors.tensors.items():
    held = layout.pieces(layout.canonical(name), info.shape)
    for canonical, place in held.items():
      shape = info.shape
      if place is not None:
        shape = (place[1].stop - place[1].start, *shape[2:])
      pieces.setdefault(canonical, []).append(_Piece(name, shape, place))
  for copy, original in weights.copies(config, layout).items():
    if copy in pieces:
      pieces.setdefault(original, []).extend(pieces.pop(copy))
  return pieces


def _why_unused(name: str, layout: weights.Layout, file: paths.Path) -> str:
  """Returns why a tensor is unused; raises an error if it should not exist."""
  if name.endswith(_BUFFERS):
    return 'a buffer that is computed from the config'
  if vision.is_vision(name):
    if layout is weights.PAIR_T5GEMMA2:
      return 'vision part, kept for export'
    return 'vision part; only text is part of the model'
  raise errors.UserError(
    f'{name} in {file} is not a tensor of the model that config.json describes.'
    ' Nothing is dropped silently: remove it, or correct the config.'
  )
