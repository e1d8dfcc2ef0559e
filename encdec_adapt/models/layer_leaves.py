"""Parameter names independent of how a stack is stored.

A leaf is named by its layer, 'decoder/layers/3/mlp/gate', whether it is a slice
of a scanned block or a separate array in the tail. So models with different
layer patterns have the same name for the same weight.

Has names and locations, no arrays. Imports neither checkpoints nor exporters;
they read and write arrays by these names.
"""

from collections.abc import Mapping
import dataclasses
import re

from encdec_adapt.models import layers_index, model_config, parameters

_LAYER = re.compile(r'/layers/(\d+)/')


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Location of a stored leaf.

  Attributes:
    shape: shape of the leaf, without the `layers` axis.
    path: path of the stored array, joined with '/'.
    index: index on the array's `layers` axis, or None without this axis.
  """

  shape: tuple[int, ...]
  path: str
  index: int | None


def leaves_of(config: model_config.ModelConfig) -> dict[str, Leaf]:
  """Returns every leaf of a model by name."""
  table = parameters.parameter_table(config)
  leaves = {}
  for name, stack in config.stacks.items():
    for path, info in table.items():
      if path.startswith(f'{name}/') and not layers_index.in_layer(path):
        leaves[path] = Leaf(info.shape, path, None)
    for layer in range(stack.layers):
      prefix, index = layers_index.layer_location(stack, layer)
      prefix = f'{name}/{prefix}/'
      for path, info in table.items():
        if path.startswith(prefix):
          shape = info.shape if index is None else info.shape[1:]
          leaf = f'{name}/layers/{layer}/{path.removeprefix(prefix)}'
          leaves[leaf] = Leaf(shape, path, index)
  return leaves


def stored_leaves(leaves: Mapping[str, Leaf]) -> dict[str, list[str]]:
  """Returns the leaves of each stored array, ordered by its `layers` axis.

  Args:
    leaves: result of `leaves_of`.

  Returns:
    Path of the array -> leaf names.
  """
  # Sorted by number: by name, layer 10 would precede layer 2.
  stored: dict[str, list[str]] = {}
  for name in sorted(leaves, key=lambda name: leaves[name].index or 0):
    stored.setdefault(leaves[name].path, []).append(name)
  return stored


def layer_of(leaf: str) -> int | None:
  """Returns the layer number in a leaf's name; None outside layers."""
  match = _LAYER.search(leaf)
  return int(match.group(1)) if match else None


def with_layer(leaf: str, text: str) -> str:
  """Returns the leaf's name with `text` in place of the layer number."""
  return _LAYER.sub(f'/layers/{text}/', leaf)
