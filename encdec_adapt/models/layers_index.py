"""Maps layer numbers to paths in the parameter tree.

The only module that depends on how layers are stored. Imports the stack config,
but no modules of layers.

A stack repeats its pattern, with leaves stacked along a leading axis under
'blocks', then has a tail of layers with separate leaves under 'tail'. Other
layers have groups of their own (`StackConfig.groups`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import operator
from typing import Any

import jax

from encdec_adapt.models import model_config

Tree = Mapping[str, Any]

_STACKED = ('blocks', 'sharing_blocks')
_GROUPS = ('lead', 'tail', 'sharing_tail', *_STACKED)


def layer_location(
  stack: model_config.StackConfig, i: int
) -> tuple[str, int | None]:
  """Returns the location of layer `i`'s leaves in the stack's parameters.

  Args:
    stack: the stack's shape.
    i: layer number, from 0.

  Returns:
    The prefix of its leaves' paths, such as 'tail/layer_j', and the index along
    their leading axis, None if they are not stacked.
  """
  group = next(group for group in stack.groups if i < group.stop)
  repeat, j = divmod(i - group.start, len(group.kinds))
  return f'{group.name}/layer_{j}', repeat if group.repeats else None


def in_layer(path: str) -> bool:
  """Returns whether a parameter ('decoder/final_norm/scale') is in a layer."""
  return path.split('/')[1] in _GROUPS


def is_stacked(path: str) -> bool:
  """Returns whether a parameter's leading axis counts layers."""
  return path.split('/')[1] in _STACKED


def block_kind(
  stack: model_config.StackConfig, prefix: str
) -> model_config.LayerKind:
  """Returns the kind of the layers stored at a prefix."""
  name, layer = prefix.split('/')
  group = next(group for group in stack.groups if group.name == name)
  return group.kinds[int(layer.rpartition('_')[2])]


def shares(prefix: str) -> bool:
  """Returns whether layers at a prefix read keys and values of others."""
  return prefix.startswith('sharing_')


def map_blocks(
  stack: model_config.StackConfig, fn: Callable[[str, int | None], Any]
) -> dict[str, dict[str, Any]]:
  """Builds a tree with a value for each block of leaves.

  Args:
    stack: the stack's shape.
    fn: called with the prefix of the leaves and the length of their leading
      axis, None if they are not stacked.
  """
  sizes: dict[str, int | None] = {}
  for i in range(stack.layers):
    prefix, index = layer_location(stack, i)
    # Layers are in order, so a block's last index is the largest.
    sizes[prefix] = None if index is None else index + 1
  tree: dict[str, dict[str, Any]] = {}
  for prefix, size in sizes.items():
    group, name = prefix.split('/')
    tree.setdefault(group, {})[name] = fn(prefix, size)
  return tree


def get_block(params: Tree, prefix: str) -> Any:
  """Returns the subtree at a prefix from `layer_location` or `map_blocks`."""
  group, name = prefix.split('/')
  return params[group][name]


def unroll(stack: model_config.StackConfig) -> model_config.StackConfig:
  """Returns the stack with separate leaves for every layer."""
  # A pattern longer than the stack never repeats, so nothing is scanned.
  kinds = [stack.layer_kind(i) for i in range(stack.layers)]
  return dataclasses.replace(stack, pattern=(*kinds, kinds[-1]))


def unroll_params(
  stack: model_config.StackConfig, params: Tree
) -> dict[str, Any]:
  """Converts a stack's parameters to parameters of `unroll(stack)`."""
  unrolled = {
    name: tree for name, tree in params.items() if name not in _GROUPS
  }
  longer = unroll(stack)
  for i in range(stack.layers):
    prefix, index = layer_location(stack, i)
    leaves = get_block(params, prefix)
    if index is not None:
      leaves = jax.tree.map(operator.itemgetter(index), leaves)
    group, name = layer_location(longer, i)[0].split('/')
    unrolled.setdefault(group, {})[name] = leaves
  return unrolled
