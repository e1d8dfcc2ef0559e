"""Recipes: how each stored array of an adapted model is made.

A recipe carries out the decisions of `weight_plan` for one stored array. The
same recipe fills the array inside a traced function, from whole trees on
devices, and one array at a time from lazily read sources (`conversion`),
where host memory has to stay small.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import transforms as transforms_lib
from encdec_adapt.models import layer_leaves, model_config, parameters

FRESH = 'fresh'  # Name of the tree that fresh leaves are taken from.
# Stored path -> array. Recipes use an array's shape, layer [i] and conversion
# by NumPy; a `files.lazy_array.LazyArray` has them.
Tree = Mapping[str, Any]
# Config and nested parameters of a decoder-only model.
Source = tuple[model_config.DecoderOnlyConfig, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A leaf of one of the trees and the transforms it undergoes.

  Attributes:
    tree: name of the tree.
    path: path of the stored array.
    index: place on the array's `layers` axis, None if it has none.
    transforms: see `coverage.Fill`.
  """

  tree: str
  path: str
  index: int | None
  transforms: tuple[transforms_lib.Transform, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How one stored array is made.

  Attributes:
    info: shape, dtype and logical axes of the array.
    layer_shape: shape of one layer; the array's own where it has no layers.
    pieces: for each layer in order, or for the array itself, the leaf it is
      made from or its constant value.
  """

  info: parameters.ParamInfo
  layer_shape: tuple[int, ...]
  pieces: tuple[_Piece | float, ...]

  def make(self, trees: Mapping[str, Tree], xp: types.ModuleType) -> Any:
    """Makes the array.

    Args:
      trees: the sources' parameters by the name of the source, and under
        `FRESH` the parameters of a freshly drawn model.
      xp: `numpy` or `jax.numpy`.
    """
    layers = []
    for piece in self.pieces:
      if isinstance(piece, _Piece):
        array = trees[piece.tree][piece.path]
        leaf = array if piece.index is None else array[piece.index]
        layers.append(_apply(piece.transforms, xp.asarray(leaf), xp))
      else:
        layers.append(xp.full(self.layer_shape, piece, self.info.dtype))
    # One layer may be stored with a `layers` axis of 1 or without one.
    stacked = xp.stack(layers).reshape(self.info.shape)
    return stacked.astype(self.info.dtype, copy=False)


def _apply(transforms, array: Any, xp: types.ModuleType) -> Any:
  for transform in transforms:
    array = transform.apply(array, xp)
  return array


def make_recipes(
  target: model_config.EncoderDecoderConfig,
  coverage: coverage_lib.Coverage,
  sources: Mapping[str, model_config.DecoderOnlyConfig],
) -> dict[str, Recipe]:
  """Makes the recipe of every stored array of `target`, by path.

  Args:
    target: the model to fill.
    coverage: from `weight_plan.make_plan`.
    sources: configs of the sources, by their names in the report.
  """
  targets = layer_leaves.leaves_of(target)
  leaves = {name: layer_leaves.leaves_of(c) for name, c in sources.items()}
  stored = layer_leaves.stored_leaves(targets)

  def piece(name: str) -> _Piece | float:
    """Returns what fills one leaf of the target."""
    fill = coverage.filled[name]
    if fill.how == 'constant':
      return fill.value
    if fill.how == 'fresh':
      return _Piece(FRESH, targets[name].path, targets[name].index)
    leaf = leaves[fill.source][fill.leaf]
    return _Piece(fill.source, leaf.path, leaf.index, fill.transforms)

  return {
    path: Recipe(
      info,
      targets[stored[path][0]].shape,
      tuple(piece(name) for name in stored[path]),
    )
    for path, info in parameters.parameter_table(target).items()
  }


def fill(
  target: model_config.EncoderDecoderConfig,
  coverage: coverage_lib.Coverage,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
) -> dict[str, Any]:
  """Makes the parameters of `target` from one or two decoder-only models.

  Can be traced: under `jax.jit` with `out_shardings` no replicated copy is
  made.

  Args:
    target: the model to fill.
    coverage: from `weight_plan.make_plan`, for these sources.
    encoder_source: config and parameters of the encoder's source.
    decoder_source: config and parameters of the decoder's source; None for the
      encoder's.
    rng: key of the fresh parameters.
  """
  sources = {
    'encoder_source': encoder_source,
    'decoder_source': decoder_source or encoder_source,
  }
  nested = {name: params for name, (_, params) in sources.items()}
  if any(fill.how == 'fresh' for fill in coverage.filled.values()):
    nested[FRESH] = parameters.init(target, rng)
  trees = {
    name: traverse_util.flatten_dict(params, sep='/')
    for name, params in nested.items()
  }
  configs = {name: config for name, (config, _) in sources.items()}
  recipes = make_recipes(target, coverage, configs)
  made = {path: recipe.make(trees, jnp) for path, recipe in recipes.items()}
  return traverse_util.unflatten_dict(made, sep='/')
