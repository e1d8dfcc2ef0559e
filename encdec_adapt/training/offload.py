"""Updates with optimizer state offloaded to host memory.

Copying the whole state at once would need device memory for all of it, because
XLA starts such copies while activations are live. Adam's state is therefore
copied layer by layer, in a scan over the stacked layers after the backward
pass. State of unstacked parameters and the small state of Adafactor are copied
at once.

The optimizers are in `optimizers`; this module only distinguishes arrays of
stacked layers.
"""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from encdec_adapt.models import layers_index
from encdec_adapt.sharding import memory
from encdec_adapt.training import optimizers
from encdec_adapt.training import state as state_lib

# (gradients, state, parameters) -> new parameters, new state.
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
  placement: state_lib.Placement,
) -> tuple[optimizers.Parameters, optimizers.GroupState]:
  """Updates a group with state in host memory; call it under `jax.jit`.

  Args:
    run: updates any subset of the group's parameters, or a layer of it.
    gradients: path to gradient.
    group: optimizer state: arrays in host memory, counts on the devices.
    parameters: path to array.
    kind: kind of the optimizer, `config.optimizer.kind`.
    placement: mesh and rules.

  Returns:
    The new parameters and state, placed by the `out_shardings` of `jax.jit`.
  """
  # One scan per depth: encoder and decoder may differ in it.
  stacks = collections.defaultdict(list)
  unstacked = []
  for path, value in parameters.items():
    # A scan over layers cannot slice Adafactor's placeholders of shape [1].
    if kind == 'adamw' and layers_index.is_stacked(path):
      stacks[value.shape[0]].append(path)
    else:
      unstacked.append(path)

  def select(paths):
    return (
      _pick(gradients, paths),
      _only(group, paths),
      _pick(parameters, paths),
    )

  results = []
  if unstacked:
    gradient, state, values = select(unstacked)
    on_device = jax.tree.map(memory.on_device, placement.shardings(state))
    results.append(run(gradient, jax.device_put(state, on_device), values))
  results += [
    _by_layer(run, *select(paths), placement) for paths in stacks.values()
  ]
  new = {path: value for part, _ in results for path, value in part.items()}
  return new, _merged([state for _, state in results])


def _by_layer(run: Update, gradients, group, parameters, placement):
  count = next(iter(parameters.values())).shape[0]
  arrays, structure = jax.tree.flatten(group)
  # Leaf index -> sharding of a layer's moments. Scalars are counts and stay in
  # device memory. Axis 0 (layers) is not sharded.
  shardings = {
    i: NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    for i, sharding in enumerate(jax.tree.leaves(placement.shardings(group)))
    if arrays[i].ndim
  }

  def update_layer(parameters, layer):
    index, gradient, moments = layer
    leaves = list(arrays)
    for i, sharding in shardings.items():
      leaves[i] = jax.device_put(moments[i], memory.on_device(sharding))
    old = jax.tree.map(lambda x: x[index], parameters)
    new, state = run(gradient, structure.unflatten(leaves), old)
    # XLA updates the carry of a scan in place; as outputs, parameters would be
    # in memory twice.
    parameters = jax.tree.map(
      lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0),
      parameters,
      new,
    )
    leaves = jax.tree.leaves(state)
    for i, sharding in shardings.items():
      # Copy back within the iteration, so that device memory holds the state of
      # one layer at a time.
      leaves[i] = jax.device_put(leaves[i], memory.on_host(sharding))
    return parameters, leaves

  layers = jnp.arange(count), gradients, {i: arrays[i] for i in shardings}
  parameters, leaves = jax.lax.scan(update_layer, parameters, layers)
  # Every layer has incremented the same count.
  leaves = [x if i in shardings else x[0] for i, x in enumerate(leaves)]
  return parameters, structure.unflatten(leaves)


def _pick(values: optimizers.Parameters, paths: Iterable[str]):
  return {path: values[path] for path in paths}


def _is_flat(node: Any) -> bool:
  # Dictionaries in optimizer state are always keyed by path; other nodes are
  # dataclasses and named tuples.
  return isinstance(node, dict)


def _only(group: optimizers.GroupState, paths: list[str]):
  return jax.tree.map(
    lambda node: _pick(node, paths) if _is_flat(node) else node,
    group,
    is_leaf=_is_flat,
  )


def _merged(parts: list[optimizers.GroupState]) -> optimizers.GroupState:
  def merge(*nodes):
    # Counts are equal in all parts.
    if not _is_flat(nodes[0]):
      return nodes[0]
    return {path: x for node in nodes for path, x in node.items()}

  return jax.tree.map(merge, *parts, is_leaf=_is_flat)
