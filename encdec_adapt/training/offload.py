"""Updates with optimizer state that is offloaded to host memory.

Copying the whole state at once would need device memory for all of it, because
XLA starts such copies while activations are live. Adam's state is therefore
copied layer by layer, in a scan over the stacked layers that starts after the
backward pass. Parameters outside of stacks are copied whole, and so is
Adafactor's state, which is small.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from encdec_adapt.models import layers_index
from encdec_adapt.sharding import memory
from encdec_adapt.training import optimizers
from encdec_adapt.training import state as state_lib

# Gradients, state and parameters to new parameters and state.
Update = Callable[
  [optimizers.Parameters, optimizers.GroupState, optimizers.Parameters],
  tuple[optimizers.Parameters, optimizers.GroupState],
]


def update(
  run: Update,
  gradients: optimizers.Parameters,
  group: optimizers.GroupState,
  parameters: optimizers.Parameters,
  kind: str,
  where: state_lib.Placement,
) -> tuple[optimizers.Parameters, optimizers.GroupState]:
  """Updates a group whose state is in host memory; call it under `jax.jit`.

  Args:
    run: updates any of the group's parameters, or one layer of them.
    gradients: path to gradient.
    group: optimizer state: arrays in host memory, counts on the devices.
    parameters: path to array.
    kind: kind of the optimizer, `config.optimizer.kind`.
    where: mesh and rules.

  Returns:
    The new parameters and the new state, which `jax.jit` places by its
    `out_shardings`.
  """
  stacks: dict[int, list[str]] = {}
  whole = []
  for path, value in parameters.items():
    if kind == 'adamw' and layers_index.is_stacked(path):
      stacks.setdefault(value.shape[0], []).append(path)
    else:
      whole.append(path)
  results = []
  if whole:
    part = _only(group, whole)
    held = jax.device_put(
      part, jax.tree.map(memory.on_device, where.shardings(part))
    )
    results.append(run(_pick(gradients, whole), held, _pick(parameters, whole)))
  for paths in stacks.values():
    results.append(
      _by_layer(
        run,
        _pick(gradients, paths),
        _only(group, paths),
        _pick(parameters, paths),
        where,
      )
    )
  new = {path: value for part, _ in results for path, value in part.items()}
  return new, _merged([state for _, state in results])


def _by_layer(run: Update, gradients, group, parameters, where):
  """Updates stacks with equal numbers of layers, one layer at a time."""
  count = next(iter(parameters.values())).shape[0]
  arrays, structure = jax.tree.flatten(group)
  stacked = [i for i, array in enumerate(arrays) if array.ndim]
  whole = jax.tree.leaves(where.shardings(group))
  places = [_of_layer(whole[i]) for i in stacked]

  def layer(new, given):
    """Updates one layer; copies its state to the device and back."""
    index, gradient, held = given
    leaves = list(arrays)
    for i, array, place in zip(stacked, held, places, strict=True):
      leaves[i] = jax.device_put(array, memory.on_device(place))
    old = jax.tree.map(lambda x: x[index], new)
    changed, state = run(gradient, structure.unflatten(leaves), old)
    new = jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0),
      new,
      changed,
    )
    leaves = jax.tree.leaves(state)
    kept = [
      jax.device_put(leaves[i], memory.on_host(place))
      for i, place in zip(stacked, places, strict=True)
    ]
    counts = [x for i, x in enumerate(leaves) if i not in stacked]
    return new, (kept, counts)

  held = [arrays[i] for i in stacked]
  new, (kept, counts) = jax.lax.scan(
    layer, parameters, (jnp.arange(count), gradients, held)
  )
  leaves = list(arrays)
  for i, array in zip(stacked, kept, strict=True):
    leaves[i] = array
  # Every layer counts the update once.
  others = (i for i in range(len(leaves)) if i not in stacked)
  for i, values in zip(others, counts, strict=True):
    leaves[i] = values[0]
  return new, structure.unflatten(leaves)


def _of_layer(sharding: NamedSharding) -> NamedSharding:
  """Returns the sharding of one layer of a stack (axis 0 is not sharded)."""
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _pick(values: optimizers.Parameters, paths: Iterable[str]):
  return {path: values[path] for path in paths}


def _is_flat(node: Any) -> bool:
  return isinstance(node, dict)


def _only(group: optimizers.GroupState, paths: list[str]):
  """Returns the state of some of a group's parameters, with its counts."""
  return jax.tree.map(
    lambda node: _pick(node, paths) if _is_flat(node) else node,
    group,
    is_leaf=_is_flat,
  )


def _merged(parts: list[optimizers.GroupState]) -> optimizers.GroupState:
  """Merges the states of disjoint sets of parameters into one."""

  def merge(*nodes):
    """Joins dictionaries by path; of other nodes takes the first."""
    if not _is_flat(nodes[0]):
      return nodes[0]
    return {path: x for node in nodes for path, x in node.items()}

  return jax.tree.map(merge, *parts, is_leaf=_is_flat)
