"""Gemma 2 and T5Gemma in the layout of their authors' Flax code.

Source of names and shapes: google-deepmind/gemma 3.3, `gm/nn/_modules.py` and
`research/t5gemma/modules.py`. Array shapes give a model's sizes; windows, caps
and scales come from a given config, or from the released model with these
shapes.
"""

from collections.abc import Callable, Mapping
import re

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import lazy_array
from encdec_adapt.huggingface import tensor_folder
from encdec_adapt.models import layer_leaves, model_config, parameters, presets

Arrays = Mapping[str, tuple[tuple[int, ...], np.dtype]]
Reader = Callable[[list[str]], Mapping[str, np.ndarray]]

# Name of an array, and an index into its first axis or None for the whole.
_Part = tuple[str, int | None]
_NORMS = {
  'pre_attention_norm': 'pre_attention_norm',
  'post_attention_norm': 'post_attention_norm',
  'pre_cross_norm': 'pre_cross_attention_norm',
  'post_cross_norm': 'post_cross_attention_norm',
  'pre_mlp_norm': 'pre_ffw_norm',
  'post_mlp_norm': 'post_ffw_norm',
  'final_norm': 'final_norm',
}
# Our leaf -> candidates for their name, with an index into arrays of several
# kernels. Their kernels have heads first. The second candidate is for models
# with as many key/value heads as query heads.
_KERNELS = {
  'query': (('q_einsum/w', None), ('qkv_einsum/w', 0)),
  'key': (('kv_einsum/w', 0), ('qkv_einsum/w', 1)),
  'value': (('kv_einsum/w', 1), ('qkv_einsum/w', 2)),
  'output': (('attn_vec_einsum/w', None),),
}
# The same for all leaves, inside and outside the layers.
_LEAVES = {
  f'{ours}/scale': ((f'{theirs}/scale', None),)
  for ours, theirs in _NORMS.items()
} | {
  f'{ours}/{kernel}': tuple((f'{theirs}/{name}', i) for name, i in parts)
  for ours, theirs in (('attention', 'attn'), ('cross_attention', 'cross_attn'))
  for kernel, parts in _KERNELS.items()
}
_LEAVES |= {
  'mlp/gate': (('mlp/gating_einsum', 0),),
  'mlp/up': (('mlp/gating_einsum', 1),),
  'mlp/down': (('mlp/linear', None),),
  'embedder/table': (('embedder/input_embedding', None),),
}
_HEADS_FIRST = ('query', 'key', 'value')


class FlaxModel:
  """A model in the authors' layout, with every array matched.

  Attributes:
    config: model config.
    unused: unused rows of an array -> reason.
  """

  def __init__(
    self,
    arrays: Arrays,
    reader: Reader,
    config: model_config.ModelConfig,
    folder: str,
  ):
    """Matches every array with the model.

    Args:
      arrays: name -> stored shape and dtype.
      reader: reads arrays by name.
      config: model config; further rows of tables, which the authors round up,
        are dropped.
      folder: name of the folder, for error messages.

    Raises:
      UserError: an array is missing, unexpected or of another shape.
    """
    self.config = config
    self.unused: dict[str, str] = {}
    self._arrays = arrays
    self._reader = reader
    self._folder = folder
    self._leaves = layer_leaves.leaves_of(config)
    stored = {canonical(name): name for name in arrays}
    self._parts = {leaf: self._part(leaf, stored) for leaf in self._leaves}
    used = {name for name, _ in self._parts.values()}
    extra = sorted(set(arrays) - used)
    if extra:
      raise errors.UserError(
        f'{folder}: {extra[0]} is not an array of this model. Nothing is'
        ' dropped silently: remove it, or give the right config with --model.'
      )

  def arrays(self) -> dict[str, lazy_array.LazyArray]:
    """Returns all parameters as lazy arrays, in parameter table order."""
    arrays = {}
    names_by_path = layer_leaves.stored_leaves(self._leaves)
    for path, info in parameters.parameter_table(self.config).items():
      names = names_by_path[path]
      stacked = self._leaves[names[0]].index is not None
      dtype = self._arrays[self._parts[names[0]][0]][1]

      # Defaults bind the loop's current values.
      def read(index, names=names, stacked=stacked):
        layers = names[index[0]] if stacked else names
        inner = index[1:] if stacked else index
        stored = self._reader([self._parts[n][0] for n in layers])
        ours = [self._ours(name, stored)[inner] for name in layers]
        return np.stack(ours) if stacked else ours[0]

      arrays[path] = lazy_array.LazyArray(tuple(info.shape), dtype, read)
    return arrays

  def _part(self, leaf: str, stored: Mapping[str, str]) -> _Part:
    start, candidates = _their_names(leaf, self.config)
    choices = [(start + name, index) for name, index in candidates]
    name, index = next(
      ((stored[name], i) for name, i in choices if name in stored),
      (None, None),
    )
    if name is None:
      raise errors.UserError(
        f'{self._folder} has no array'
        f' {" or ".join(repr(name) for name, _ in choices)}, which holds'
        f' {leaf}. The folder is incomplete, or holds another model.'
      )
    shape, ours = self._arrays[name][0], self._leaves[leaf].shape
    if not self._fits(leaf, name, index):
      if leaf.endswith('/table'):
        ours = (self._tokens(leaf), *ours[1:])
      raise errors.UserError(
        f'{self._folder}: {name} has shape {list(shape)}, and {leaf} of'
        f' the model {list(ours)}. Give the right config with --model.'
      )
    return name, index

  def _fits(self, leaf: str, name: str, index: int | None) -> bool:
    shape = self._arrays[name][0]
    part = shape if index is None else shape[1:]
    ours = self._leaves[leaf].shape
    swapped = (*ours[:2][::-1], *ours[2:])
    kind = leaf.rpartition('/')[2]
    if kind == 'table':
      rows = self._tokens(leaf)
      if part[0] > rows:
        self.unused[f'{name}, rows {rows} to {part[0] - 1}'] = (
          'beyond the vocabulary; the authors round tables up'
        )
      return part[1:] == ours[1:] and part[0] >= rows
    if kind in _HEADS_FIRST:
      return part == swapped
    # `transpose_gating_einsum` of some sizes swaps the gate's axes.
    return part == ours or (kind in ('gate', 'up') and part == swapped)

  def _tokens(self, table: str) -> int:
    return self.config.stacks[table.split('/')[0]].vocab_size

  def _ours(self, leaf: str, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    (name, index), shape = self._parts[leaf], self._leaves[leaf].shape
    array = stored[name] if index is None else stored[name][index]
    tensor_folder.check_finite(name, array, self._folder)
    kind = leaf.rpartition('/')[2]
    if kind == 'table':
      rows = self._tokens(leaf)
      return np.pad(array[:rows], [(0, shape[0] - rows), (0, 0)])
    # Shapes do not show the axis order of square kernels: theirs have heads
    # first.
    is_ours = array.shape == shape and kind not in _HEADS_FIRST
    return array if is_ours else array.swapaxes(0, 1)


def canonical(name: str) -> str:
  """Returns an array's name in the current module tree.

  The first releases use the flat names of an older tree.

  Args:
    name: stored name.
  """
  name = name.removeprefix('transformer/')
  return name.removesuffix('/w') if '/mlp/' in name else name


def released_model(arrays: Arrays, folder: str) -> model_config.ModelConfig:
  """Returns the config of the released model with these shapes.

  Args:
    arrays: name -> shape and dtype.
    folder: name of the folder, for error messages.

  Raises:
    UserError: no released model has these numbers of layers and widths.
  """
  shapes = {canonical(name): shape for name, (shape, _) in arrays.items()}
  if any(name.startswith('encoder/') for name in shapes):
    sizes = [
      _size(shapes, f'{side}/', folder) for side in ('encoder', 'decoder')
    ]
    return presets.t5gemma('_'.join(sizes))
  return presets.decoder_only(_size(shapes, '', folder))


def _size(
  shapes: Mapping[str, tuple[int, ...]], start: str, folder: str
) -> str:
  pattern = re.compile(rf'{start}layer_\d+/mlp/linear')
  kernels = [shapes[name] for name in shapes if pattern.fullmatch(name)]
  for size, stack in presets.STACKS.items():
    # Presets of other families may have the same widths.
    is_gemma2 = stack.post_norms and not stack.qk_norm
    if is_gemma2 and kernels == [(stack.mlp_width, stack.width)] * stack.layers:
      return size
  raise errors.UserError(
    f'{folder} has {len(kernels)} arrays {start}layer_*/mlp/linear of shapes'
    f' {sorted(set(kernels))}, and no released Gemma 2 or T5Gemma has. Give its'
    ' config.json with --model=FILE: arrays do not show windows, caps and'
    ' scales.'
  )


def _their_names(
  leaf: str, config: model_config.ModelConfig
) -> tuple[str, tuple[_Part, ...]]:
  """Returns a stored name's prefix, and candidates for its remainder."""
  stack, _, inner = leaf.partition('/')
  start = f'{stack}/' if len(config.stacks) > 1 else ''
  if inner.startswith('layers/'):
    _, number, inner = inner.split('/', 2)
    start += f'layer_{number}/'
  if inner not in _LEAVES:
    raise errors.UserError(
      f'{leaf} has no array in the layout of Gemma 2 and T5Gemma; give the'
      ' config of such a model with --model.'
    )
  return start, _LEAVES[inner]
