"""Recipes: how each stored array of an adapted model is made.

A recipe carries out the decisions of `weight_plan` for a stored array. The
same recipe fills the array inside a traced function, from whole trees on
devices, and array by array from lazily read sources (`stored`), where host
memory has to stay small.
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

# Name of the tree that fresh leaves are taken from.
FRESH = 'fresh'
# Stored path -> array. Recipes use an array's shape, layer [i] and conversion
# by NumPy; a `files.lazy_array.LazyArray` has them.
Tree = Mapping[str, Any]
# Config and nested parameters of a model.
Source = tuple[model_config.ModelConfig, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A leaf of a tree and the transforms it undergoes.

  Attributes:
    tree: name of the tree.
    path: path of the stored array.
    index: index on the array's `layers` axis, None if it has no such axis.
    transforms: see `coverage.Fill`.
  """

  tree: str
  path: str
  index: int | None
  transforms: tuple[transforms_lib.Transform, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a stored array is made.

  Attributes:
    info: shape, dtype and logical axes of the array.
    layer_shape: shape of a layer; that of the array where it has no layers.
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
      if not isinstance(piece, _Piece):
        layers.append(xp.full(self.layer_shape, piece, self.info.dtype))
        continue
      layer = trees[piece.tree][piece.path]
      if piece.index is not None:
        layer = layer[piece.index]
      # Only now is a lazy array read: the layer, not the stack.
      layer = xp.asarray(layer)
      for transform in piece.transforms:
        layer = transform.apply(layer, xp)
      layers.append(layer)
    # A single layer may be stored with a `layers` axis of 1 or without it.
    stacked = xp.stack(layers).reshape(self.info.shape)
    # Cast at the end: transforms such as a mean compute in fp32.
    return stacked.astype(self.info.dtype, copy=False)

  def carry(self, moments: Mapping[str, Any], shape: Any) -> Any:
    """Makes the optimizer's moments of the array from those of the source.

    Args:
      moments: stored path -> moments of the source, of one kind.
      shape: shape and dtype of the result.
    """
    # Adafactor keeps a single zero where it has no moments of a kind.
    if shape.shape == (1,):
      return jnp.zeros(shape.shape, shape.dtype)
    layers = [
      moments[piece.path][... if piece.index is None else piece.index]
      for piece in self.pieces
    ]
    return jnp.stack(layers).reshape(shape.shape).astype(shape.dtype)


def make_recipes(
  target: model_config.ModelConfig,
  coverage: coverage_lib.Coverage,
  sources: Mapping[str, model_config.ModelConfig],
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
  target: model_config.ModelConfig,
  coverage: coverage_lib.Coverage,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
) -> dict[str, Any]:
  """Makes the parameters of `target` from those of its sources.

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
  # Drawn as a whole although few leaves are used, so that a fresh leaf has the
  # same values as in a model of random parameters; XLA drops the unused draws.
  if any(fill.how == 'fresh' for fill in coverage.filled.values()):
    nested[FRESH] = parameters.init(target, rng)
  trees = {
    name: traverse_util.flatten_dict(params, sep='/')
    for name, params in nested.items()
  }
  configs = {name: config for name, (config, _) in sources.items()}
  recipes = make_recipes(target, coverage, configs)
  arrays = {path: recipe.make(trees, jnp) for path, recipe in recipes.items()}
  return traverse_util.unflatten_dict(arrays, sep='/')
