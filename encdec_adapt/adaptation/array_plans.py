"""Plans of the stored arrays of an adapted model, and how to compute them.

`weight_plan` plans layer by layer; an `ArrayPlan` combines the layers of a
stored array. It works in a traced function, with full trees on devices, and
array by array from lazily read sources (`stored`), to bound host memory.
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

# Name of the tree of fresh leaves.
FRESH = 'fresh'
# Stored path -> array. Plans need an array's shape, indexing by layer [i] and
# conversion to NumPy, as of `files.lazy_array.LazyArray`.
Tree = Mapping[str, Any]
# Config and nested parameters of a model.
Source = tuple[model_config.ModelConfig, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A leaf of a tree and its transforms.

  Attributes:
    tree: name of the tree.
    path: path of the stored array.
    index: index on the array's `layers` axis; None without this axis.
    transforms: see `coverage.Fill`.
  """

  tree: str
  path: str
  index: int | None
  transforms: tuple[transforms_lib.Transform, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
  """How to compute a stored array.

  Attributes:
    info: shape, dtype and logical axes of the array.
    layer_shape: shape of a layer, or of an array without layers.
    pieces: source leaf or constant value of each layer in order, or of an array
      without layers.
  """

  info: parameters.ParamInfo
  layer_shape: tuple[int, ...]
  pieces: tuple[_Piece | float, ...]

  def make(self, trees: Mapping[str, Tree], xp: types.ModuleType) -> Any:
    """Computes the array.

    Args:
      trees: name of a source -> its parameters, and `FRESH` -> the parameters
        of a newly initialized model.
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
      # Reads only the layer of a lazy array, not the stack.
      layer = xp.asarray(layer)
      for transform in piece.transforms:
        layer = transform.apply(layer, xp)
      layers.append(layer)
    # A single layer may be stored with a `layers` axis of 1 or without.
    stacked = xp.stack(layers).reshape(self.info.shape)
    # Cast last: transforms such as a mean compute in fp32.
    return stacked.astype(self.info.dtype, copy=False)

  def carry(self, moments: Mapping[str, Any], shape: Any) -> Any:
    """Computes the optimizer's moments of the array from the source's.

    Args:
      moments: stored path -> moments of the source, of one kind.
      shape: shape and dtype of the result.
    """
    # Adafactor stores a single zero for an absent kind of moments.
    if shape.shape == (1,):
      return jnp.zeros(shape.shape, shape.dtype)
    layers = [
      moments[piece.path][... if piece.index is None else piece.index]
      for piece in self.pieces
    ]
    return jnp.stack(layers).reshape(shape.shape).astype(shape.dtype)


def make_plans(
  target: model_config.ModelConfig,
  coverage: coverage_lib.Coverage,
  sources: Mapping[str, model_config.ModelConfig],
) -> dict[str, ArrayPlan]:
  """Returns path -> plan for every stored array of `target`.

  Args:
    target: the model to fill.
    coverage: from `weight_plan.make_plan`.
    sources: name in the report -> config of the source.
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
    path: ArrayPlan(
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
  """Computes the parameters of `target` from its sources.

  Can be traced: `jax.jit` with `out_shardings` makes no replicated copy.

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
  # Initialize the full model, so that fresh leaves have the same values as in a
  # random model; XLA eliminates unused leaves.
  if any(fill.how == 'fresh' for fill in coverage.filled.values()):
    nested[FRESH] = parameters.init(target, rng)
  trees = {
    name: traverse_util.flatten_dict(params, sep='/')
    for name, params in nested.items()
  }
  configs = {name: config for name, (config, _) in sources.items()}
  plans = make_plans(target, coverage, configs)
  arrays = {path: plan.make(trees, jnp) for path, plan in plans.items()}
  return traverse_util.unflatten_dict(arrays, sep='/')
