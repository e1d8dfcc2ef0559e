"""Reads a Hugging Face folder as our model config and lazy parameters."""

from collections.abc import Iterable
from concurrent import futures
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import (
  config_json,
  tensor_folder,
  transposed_copy,
  vision,
  weights,
)
from encdec_adapt.models import layer_leaves, model_config, parameters

# Buffers, not weights, in exports of old transformers versions.
_BUFFERS = (
  *('.rotary_emb.inv_freq', '.attn.bias', '.attn.masked_bias'),
  'embeddings.position_ids',
)
_FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
_THREADS = 4  # Layers read at a time: copying releases the GIL.


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A stored tensor of a layout, or its part of a fused tensor.

  Attributes:
    tensor: name of the stored tensor.
    shape: shape of the piece.
    index: index of the piece in a fused tensor; None for a whole tensor.
  """

  tensor: str
  shape: tuple[int, ...]
  index: weights.Index | None


# Our leaf -> its weights, each with its stored pieces: the first, and copies,
# which must be equal.
_Matches = dict[str, list[tuple[weights.Weight, list[_Piece]]]]


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
  """Returns a dtype that represents all values of the given dtypes exactly.

  Args:
    dtypes: float dtypes, at least one.
  """
  # NumPy's promotion has no bfloat16.
  with jax.numpy_dtype_promotion('standard'):
    return np.dtype(functools.reduce(jnp.promote_types, dtypes))


class ModelFolder:
  """A folder with every tensor matched to the model.

  Attributes:
    config: model config.
    tensors: stored tensors.
    unused: name of an unused tensor -> reason.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, vocab_multiple: int | None = None
  ):
    """Reads the config and the headers, and matches every tensor.

    Args:
      folder: folder with config.json and safetensors.
      vocab_multiple: pads embedding tables with rows of zeros to a multiple;
        None adds none.

    Raises:
      UserError: the folder is damaged or its model unsupported; a tensor is
        missing, unexpected or of another shape than in the config.
    """
    folder = paths.at(folder)
    file = folder / tensor_folder.CONFIG
    raw = atomic.read_json(file)
    config, layout = config_json.model_from_raw(raw, str(file))
    if vocab_multiple is not None:
      config = model_config.with_vocab_multiple(config, vocab_multiple)
    self.tensors = tensor_folder.TensorFolder(folder)
    if layout.head_by_value:
      tied = _ties_head(self.tensors, layout)
      head = dataclasses.replace(config.decoder.head, tied=tied)
      config = model_config.with_head(config, head)
    if layout.fixed_bias in self.tensors.tensors:
      has_bias = bool(np.any(self.tensors.read(layout.fixed_bias)))
      head = dataclasses.replace(config.decoder.head, fixed_bias=has_bias)
      config = model_config.with_head(config, head)
    self.config = config
    self._matches, self.unused = _match(config, layout, self.tensors)

  def arrays(self) -> dict[str, lazy_array.LazyArray]:
    """Returns all parameters as lazy arrays, in parameter table order."""
    leaves = layer_leaves.leaves_of(self.config)
    stored = layer_leaves.stored_leaves(leaves)
    arrays = {}
    for path, info in parameters.parameter_table(self.config).items():
      names = stored[path]
      dtype = common_dtype(
        self.tensors.tensors[pieces[0].tensor].dtype
        for name in names
        for _, pieces in self._matches[name]
      )
      is_stacked = leaves[names[0]].index is not None

      # Defaults bind the loop's current values.
      def read(
        index, names=names, is_stacked=is_stacked, info=info, dtype=dtype
      ):
        ranges = zip(index, info.shape, strict=True)
        extents = [len(range(*part.indices(size))) for part, size in ranges]
        # Reads layers into their slice; stacking would copy them again.
        array = np.empty(extents, dtype)
        if not is_stacked:
          self._read(names[0], index, array)
          return array
        with futures.ThreadPoolExecutor(_THREADS) as pool:
          inner = [index[1:]] * len(array)
          for _ in pool.map(self._read, names[index[0]], inner, array):
            pass  # Raises errors of layers.
        return array

      arrays[path] = lazy_array.LazyArray(tuple(info.shape), dtype, read)
    return arrays

  def _read(self, leaf: str, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Reads a range `index` of a leaf into `out`, of the same extents."""
    matches = self._matches[leaf]
    if matches[0][0].part is None:
      self._read_weight(*matches[0], index, out)
      return
    for expert, row in zip(matches[index[0]], out, strict=True):
      self._read_weight(*expert, index[1:], row)

  def _read_weight(
    self,
    weight: weights.Weight,
    pieces: list[_Piece],
    index: tuple[slice, ...],
    out: np.ndarray,
  ) -> None:
    """Reads part of a weight; its stored copies must be equal."""
    part, *copies = (
      weight.to_ours(self.tensors.read(piece.tensor, piece.index))[index]
      for piece in pieces
    )
    transposed_copy.copy(part, out[: len(part)])
    out[len(part) :] = 0  # Rows that pad a table for sharding.
    first, *duplicates = pieces
    # Checks `out`, which is row-major, unlike a stored kernel.
    tensor_folder.check_finite(first.tensor, out, self._file(first))
    for piece, copy in zip(duplicates, copies, strict=True):
      if part.dtype != copy.dtype or not np.array_equal(part, copy):
        raise errors.UserError(
          f'{self._file(piece)}: {piece.tensor!r} differs from'
          f' {first.tensor!r} in {self._file(first)}, but they are the same'
          ' weight of this model. Remove the wrong one, or correct config.json.'
        )

  def _file(self, piece: _Piece) -> paths.Path:
    return self.tensors.tensors[piece.tensor].file


def _ties_head(
  tensors: tensor_folder.TensorFolder, layout: weights.Layout
) -> bool:
  table = f'{layout.embedder["decoder"]}weight'
  names = [table, *(x for x, name in layout.copies.items() if name == table)]
  stored = [x for x in names if x in tensors.tensors]
  if layout.head not in tensors.tensors or not stored:
    return True
  return np.array_equal(*map(tensors.read, (layout.head, stored[0])))


def _match(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  tensors: tensor_folder.TensorFolder,
) -> tuple[_Matches, dict[str, str]]:
  present = _pieces(config, layout, tensors)
  required = weights.weights(config, layout)
  missing = [name for name in required if name not in present]
  if missing:
    raise errors.UserError(
      f'{tensors.folder} has no tensor {missing[0]!r}'
      + (f' (and {len(missing) - 1} more)' if len(missing) > 1 else '')
      + ', which its config.json requires. The folder is incomplete, or the'
      ' config belongs to another model.'
    )
  unused = {}
  for canonical, pieces in present.items():
    weight = required.get(canonical)
    if weight is None and canonical == layout.fixed_bias:
      continue
    if weight is None:
      for piece in pieces:
        name, file = piece.tensor, tensors.tensors[piece.tensor].file
        unused[name] = _why_unused(name, layout, file)
      continue
    for piece in pieces:
      _require_fits(weight, piece, tensors.tensors[piece.tensor])
    for piece in pieces[1:]:
      unused[piece.tensor] = f'a copy of {pieces[0].tensor}'
  matches: _Matches = {}
  for canonical, weight in required.items():  # In the order of experts.
    matches.setdefault(weight.leaf, []).append((weight, present[canonical]))
  return matches, unused


def _require_fits(
  weight: weights.Weight, piece: _Piece, info: tensor_folder.TensorInfo
) -> None:
  if piece.shape != weight.their_shape:
    per_expert = ''
    if piece.index:
      per_expert = ' per expert' if isinstance(piece.index[0], int) else ' each'
    raise errors.UserError(
      f'{piece.tensor} in {info.file} has shape'
      f' {list(piece.shape)}{per_expert}; its config.json requires'
      f' {list(weight.their_shape)}.'
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
  """Returns stored pieces by canonical tensor name, copies last."""
  pieces: dict[str, list[_Piece]] = {}
  for name, info in tensors.tensors.items():
    indices = layout.pieces(layout.canonical(name), info.shape)
    for canonical, index in indices.items():
      shape = info.shape
      if index is not None:
        shape = tuple(
          len(range(*i.indices(size)))
          for i, size in zip(index, shape, strict=True)
          if isinstance(i, slice)
        )
      pieces.setdefault(canonical, []).append(_Piece(name, shape, index))
  # Without the main tensor, its copy is read.
  for copy, original in weights.copies(config, layout).items():
    if copy in pieces:
      pieces.setdefault(original, []).extend(pieces.pop(copy))
  return pieces


def _why_unused(name: str, layout: weights.Layout, file: paths.Path) -> str:
  """Returns why a tensor is unused; raises an error for unknown tensors."""
  if name.endswith(_BUFFERS):
    return 'a buffer that is computed from the config'
  if layout.canonical(name).startswith(layout.ignored):
    return 'not read by the class of the model'
  if vision.is_vision(name):
    if layout is weights.PAIR_T5GEMMA2:
      return 'vision part, kept for export'
    return 'vision part; only text is part of the model'
  raise errors.UserError(
    f'{name} in {file} is not a tensor of the model that config.json describes.'
    ' Nothing is dropped silently: remove it, or correct the config.'
  )
