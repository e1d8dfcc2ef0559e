"""How each stored array of an adapted model is made: the plan, carried out.

The same recipe fills an array inside a traced function, from whole trees on
devices, and one array at a time from sources that are read when asked
(`exchange`), where host memory has to stay small.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import steps as steps_lib
from encdec_adapt.models import layer_leaves, model_config, parameters

FRESH = 'fresh'  # Name of the tree that fresh leaves are taken from.
# Stored path -> array. Of an array shape, layer [i] and conversion by NumPy
# are used: an `huggingface.folder.LazyArray` will do.
Tree = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Origin:
  """A leaf in one of the trees, and what is done to it.

  Attributes:
    tree: name of the tree.
    path: of the stored array.
    index: on its `layers` axis, None if it has none.
    steps: see `coverage.Fill`.
  """

  tree: str
  path: str
  index: int | None
  steps: tuple[steps_lib.Step, ...] = ()


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How one stored array is made.

  Attributes:
    info: the array.
    layer_shape: of one layer of it; its own shape where it has no layers.
    origins: of its layers in order, or of the array itself: where each comes
      from, or the constant that it is.
  """

  info: parameters.ParamInfo
  layer_shape: tuple[int, ...]
  origins: tuple[_Origin | float, ...]

  def make(self, trees: Mapping[str, Tree], xp: types.ModuleType) -> Any:
    """The array.

    Args:
      trees: the sources' parameters by the name of the source, and under
        `FRESH` those of a freshly drawn model.
      xp: `numpy` or `jax.numpy`, which it is made with.
    """
    whole = self._whole(trees)
    if whole is not None:
      made = _apply(self.origins[0].steps, xp.asarray(whole), xp)
      return made.astype(self.info.dtype, copy=False)
    layers = []
    for origin in self.origins:
      if isinstance(origin, _Origin):
        array = trees[origin.tree][origin.path]
        leaf = array if origin.index is None else array[origin.index]
        layers.append(_apply(origin.steps, xp.asarray(leaf), xp))
      else:
        layers.append(xp.full(self.layer_shape, origin, self.info.dtype))
    # One layer may be stored with a `layers` axis of 1 or without one.
    stacked = xp.stack(layers).reshape(self.info.shape)
    return stacked.astype(self.info.dtype, copy=False)

  def _whole(self, trees: Mapping[str, Tree]) -> Any:
    """The array that the origins are all of, in order; else None.

    The usual case of equal layouts: the array passes through at once instead
    of being cut into layers and stacked again.
    """
    first = self.origins[0]
    if not isinstance(first, _Origin):
      return None
    array = trees[first.tree][first.path]
    if self.info.shape == self.layer_shape:
      return array if first.index is None else None
    if first.index is None:
      return None
    in_order = tuple(
      dataclasses.replace(first, index=i) for i in range(array.shape[0])
    )
    return array if self.origins == in_order else None


def _apply(done: tuple[steps_lib.Step, ...], array: Any, xp: types.ModuleType):
  for step in done:
    array = step.apply(array, xp)
  return array


def make_recipes(
  target: model_config.EncoderDecoderConfig,
  account: coverage_lib.Coverage,
  sources: Mapping[str, model_config.DecoderOnlyConfig],
) -> dict[str, Recipe]:
  """Recipe of every stored array of `target`, by path.

  Args:
    target: the model that is filled.
    account: from `plan.make_plan`.
    sources: by name, as in the account.
  """
  targets = layer_leaves.leaves_of(target)
  places = {name: layer_leaves.leaves_of(c) for name, c in sources.items()}
  stored = layer_leaves.stored_leaves(targets)

  def origin(name: str) -> _Origin | float:
    fill = account.filled[name]
    if fill.how == 'constant':
      return fill.value
    if fill.how == 'fresh':
      return _Origin(FRESH, targets[name].path, targets[name].index)
    place = places[fill.source][fill.leaf]
    return _Origin(fill.source, place.path, place.index, fill.steps)

  return {
    path: Recipe(
      info,
      targets[stored[path][0]].shape,
      tuple(origin(name) for name in stored[path]),
    )
    for path, info in parameters.parameter_table(target).items()
  }
