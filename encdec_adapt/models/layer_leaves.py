"""Names of parameters that do not depend on how a stack is stored.

A leaf is named by its layer, 'decoder/layers/3/mlp/gate', whether it is a
slice of a scanned block or an array of its own in the tail. So models with
different layer patterns have the same name for the same weight.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from flax import traverse_util

from encdec_adapt.cli import errors
from encdec_adapt.models import layers_index, model_config, parameters

_LAYER = re.compile(r'/layers/(\d+)/')


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Where one leaf is stored.

  Attributes:
    shape: shape of the leaf, without the `layers` axis.
    path: path of the stored array, joined with '/'.
    index: place on that array's `layers` axis, None if it has none.
  """

  shape: tuple[int, ...]
  path: str
  index: int | None


def leaves_of(config: model_config.ModelConfig) -> dict[str, Leaf]:
  """Returns every leaf of a model by name.

  Raises:
    ValueError: `layer_location` and the parameter table disagree.
  """
  table = parameters.parameter_table(config)
  leaves = {}
  stored = set()
  for name, stack in config.stacks.items():
    for path, info in table.items():
      if path.startswith(f'{name}/') and not layers_index.in_layer(path):
        leaves[path] = Leaf(tuple(info.shape), path, None)
        stored.add(path)
    for layer in range(stack.layers):
      prefix, index = layers_index.layer_location(stack, layer)
      prefix = f'{name}/{prefix}/'
      for path, info in table.items():
        if path.startswith(prefix):
          shape = tuple(info.shape)
          leaf = f'{name}/layers/{layer}/{path.removeprefix(prefix)}'
          leaves[leaf] = Leaf(
            shape if index is None else shape[1:], path, index
          )
          stored.add(path)
  if stored != set(table):
    raise ValueError(f'parameters of no layer: {sorted(set(table) - stored)}')
  return leaves


def stored_leaves(leaves: Mapping[str, Leaf]) -> dict[str, list[str]]:
  """Returns the leaves of each stored array, ordered by its `layers` axis.

  Args:
    leaves: result of `leaves_of`.

  Returns:
    Path of the array -> names.
  """
  stored: dict[str, list[str]] = {}
  for name in sorted(leaves, key=lambda name: leaves[name].index or 0):
    stored.setdefault(leaves[name].path, []).append(name)
  return stored


def layer_of(leaf: str) -> int | None:
  """Returns the layer number in a leaf's name; None outside the layers."""
  match = _LAYER.search(leaf)
  return int(match.group(1)) if match else None


def with_layer(leaf: str, text: str) -> str:
  """Returns the leaf's name with `text` in place of the layer number."""
  return _LAYER.sub(f'/layers/{text}/', leaf)


def flatten_checked(
  source: str, config: model_config.ModelConfig, params: Mapping[str, Any]
) -> dict[str, Any]:
  """Flattens a source's parameters after comparing them with its config.

  Args:
    source: name of the source in errors.
    config: the model that the parameters belong to.
    params: nested dictionary of arrays or ShapeDtypeStructs.

  Returns:
    Stored path to leaf.

  Raises:
    UserError: a missing, unexpected or misshapen parameter, by name.
  """
  flat = traverse_util.flatten_dict(dict(params), sep='/')
  table = parameters.parameter_table(config)
  remedy = 'Give the config that this checkpoint was trained with.'
  for problem, paths in (
    ('has no', sorted(set(table) - set(flat))),
    ('has an unexpected', sorted(set(flat) - set(table))),
  ):
    if paths:
      more = f' (and {len(paths) - 1} more)' if len(paths) > 1 else ''
      raise errors.UserError(f'{source} {problem} {paths[0]!r}{more}. {remedy}')
  for path, info in table.items():
    if tuple(flat[path].shape) != tuple(info.shape):
      raise errors.UserError(
        f'{path!r} of {source} has shape {list(flat[path].shape)}; its config'
        f' says {list(info.shape)}. {remedy}'
      )
  return flat
