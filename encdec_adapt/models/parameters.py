"""Initialisation, and the table of parameter shapes and axes.

The table comes from abstract initialisation, without allocation; sharding,
checkpoints, adaptation and exchange formats derive from it. This module imports
none of them.
"""

import collections
from collections.abc import Mapping
import contextvars
import dataclasses
import functools
import math
import operator
import types
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from encdec_adapt.models import block, execution, model_config, stack


@dataclasses.dataclass(frozen=True)
class ParamInfo:
  """Shape, dtype and logical axes of a parameter."""

  shape: tuple[int, ...]
  dtype: jnp.dtype
  axes: tuple[str, ...]

  @property
  def inputs(self) -> tuple[int, ...]:
    """Contracted dimensions of a kernel.

    Empty for norms, biases and routers, which do not count as kernels.
    """
    # Axes that count kernels are neither inputs nor outputs.
    stacked = ('layers', 'experts')
    dims = [i for i, name in enumerate(self.axes) if name not in stacked]
    names = [self.axes[i] for i in dims]
    # Routers are small, and rounding them could change the chosen experts.
    if len(dims) < 2 or 'router' in names:
      return ()
    # Kernels map from or to the model width: 'embed' is first or last, and the
    # inputs are the width alone or all axes before it (heads and head_dim).
    if names[0] == 'embed':
      return tuple(dims[:1])
    if names[-1] == 'embed':
      return tuple(dims[:-1])
    # Lookups read rows of a table, and logits contract the width of a row.
    return tuple(dims[1:]) if names[0] == 'vocab' else ()


@dataclasses.dataclass(frozen=True)
class StackCount:
  """Parameter counts of a stack, without padding rows of tables.

  Attributes:
    embeddings: parameters of the embedding tables and of single-token vectors.
    head: parameters of the head; 0 if tied.
    cross: parameters of cross-attention and its norms.
    other: all other parameters.
  """

  embeddings: int = 0
  head: int = 0
  cross: int = 0
  other: int = 0

  @property
  def total(self) -> int:
    """Number of all parameters."""
    return sum(dataclasses.astuple(self))


def init(config: model_config.ModelConfig, rng: jax.Array) -> dict[str, Any]:
  """Initialises the parameters (see `layers` for the distributions).

  Use `jit` with `out_shardings` to create them sharded.
  """
  params = {}
  for name, key in _stack_keys(config, rng).items():
    params[name] = _init_values(config.stacks[name], key)
    # Every stack declares its tables; shared ones are stored only once.
    for part in config.shared_parts if name == 'encoder' else ():
      module, leaf = part.split('/')
      del params[name][module][leaf]
      if not params[name][module]:
        del params[name][module]
  return params


def init_one(
  config: model_config.ModelConfig, rng: jax.Array, path: str
) -> jax.Array:
  """Initialises an array as `init` does, without allocating the others.

  Args:
    config: the model.
    rng: the key that `init` would get.
    path: path of the array in `parameter_table`.
  """
  name, *keys = path.split('/')

  # Initialises the whole stack, to get the values of `init`: random keys depend
  # on module paths. XLA removes the unused arrays.
  @jax.jit
  def draw(rng):
    params = _init_values(config.stacks[name], _stack_keys(config, rng)[name])
    return functools.reduce(operator.getitem, keys, params)

  return draw(rng)


# Cached, like the tables of stacks: a table requires tracing the model, and
# sharding, checkpoints and reports each call this function.
@functools.cache
def parameter_table(
  config: model_config.ModelConfig,
) -> Mapping[str, ParamInfo]:
  """Returns path ('decoder/blocks/layer_0/mlp/up') -> ParamInfo, read-only."""
  return types.MappingProxyType(
    {
      f'{name}/{path}': info
      for name, stack_config in config.stacks.items()
      for path, info in _stack_table(stack_config).items()
      if name == 'decoder' or path not in config.shared_parts
    }
  )


def paths_in(
  source: model_config.ModelConfig, model: model_config.ModelConfig
) -> dict[str, str]:
  """Maps the parameter paths of a part of a model to paths in the model.

  Args:
    source: the whole model.
    model: the source itself, or its prompt-reading stack
      (`model_config.prompt_model`); either may have another head.

  Returns:
    Path of each parameter of `model` -> its path in `source`, without
    parameters of heads missing from the source.
  """
  side = 'decoder'
  if not model.architecture.encodes_prompt:
    side = source.architecture.prompt_stack
  heads = model.decoder.head, source.decoder.head
  fresh = {module for head in heads for module in head.fresh}
  table, paths = parameter_table(source), {}
  for path in parameter_table(model):
    part, name = path.split('/')[1], path.replace('decoder', side, 1)
    if part in fresh and heads[0] != heads[1]:
      continue
    # Shared tables are stored with the decoder.
    if part in ('embedder', 'layer_inputs') and name not in table:
      name = path
    if name in table:
      paths[path] = name
  return paths


def count(config: model_config.ModelConfig) -> int:
  """Counts the parameters, without padding rows of tables."""
  return sum(part.total for part in count_by_stack(config).values())


def padding(config: model_config.ModelConfig) -> dict[str, int]:
  """Returns path of each padded table -> parameters in its padding rows."""
  sizes = {}
  for path, info in parameter_table(config).items():
    stack_config = config.stacks[path.split('/')[0]]
    is_head = path.split('/')[1] == 'head'
    used = stack_config.outputs if is_head else stack_config.vocab_size
    if path.endswith(('/table', '/logits_bias')) and info.shape[0] > used:
      sizes[path] = (info.shape[0] - used) * math.prod(info.shape[1:])
  return sizes


def count_active(config: model_config.ModelConfig) -> int:
  """Counts the active parameters per token, without unchosen experts."""
  idle = 0
  for path, info in parameter_table(config).items():
    if 'experts' in info.axes:
      stack_config = config.stacks[path.split('/')[0]]
      # The array has the kernels of all experts, and a token uses some.
      size = math.prod(info.shape) // stack_config.experts
      idle += size * (stack_config.experts - stack_config.experts_per_token)
  return count(config) - idle


def count_by_stack(config: model_config.ModelConfig) -> dict[str, StackCount]:
  """Counts the parameters by stack and part."""
  counts = {name: collections.Counter() for name in config.stacks}
  unused = padding(config)
  for path, info in parameter_table(config).items():
    stack_name, *parts = path.split('/')
    if is_buffer(path):  # Does not count in transformers.
      continue
    size = math.prod(info.shape) - unused.get(path, 0)
    if parts[0] in ('embedder', 'head') or parts[-1] == 'table':
      part = 'head' if parts[0] == 'head' else 'embeddings'
    elif block.CROSS.keys() & set(parts):
      part = 'cross'
    else:
      part = 'other'
    counts[stack_name][part] += size
  return {name: StackCount(**count) for name, count in counts.items()}


def is_buffer(path: str) -> bool:
  """Returns whether the parameter of a path never trains."""
  return path.endswith(('/layer_scalar/scale', '/bias/logits_bias'))


def _is_box(x: Any) -> bool:
  return isinstance(x, nn.meta.AxisMetadata)


def _stack_keys(
  config: model_config.ModelConfig, rng: jax.Array
) -> dict[str, jax.Array]:
  keys = jax.random.split(rng, len(config.stacks))
  return dict(zip(config.stacks, keys, strict=True))


def _init_values(
  config: model_config.StackConfig, rng: jax.Array
) -> dict[str, Any]:
  boxed = _init_stack(config, rng)
  return jax.tree.map(lambda box: box.value, boxed, is_leaf=_is_box)


def _init_stack(
  config: model_config.StackConfig, rng: jax.Array
) -> dict[str, Any]:
  # No parameter depends on the length, so a single token suffices.
  ids = jnp.zeros((1, 1), jnp.int32)
  encoded = encoder_segments = None
  if config.cross_width is not None:
    encoded = jnp.zeros((1, 1, config.cross_width))
    encoder_segments = ids
  module = stack.Stack(config, execution.REFERENCE)
  # In an empty context no partition is active (`ops.partition`): a single token
  # cannot be sharded.
  return contextvars.Context().run(
    module.init, rng, ids, ids, ids, encoded, encoder_segments
  )['params']


@functools.cache
def _stack_table(config: model_config.StackConfig) -> dict[str, ParamInfo]:
  boxed = jax.eval_shape(lambda: _init_stack(config, jax.random.key(0)))
  # Boxes are leaves here: each has the logical axes of its array, with 'layers'
  # added by Flax in scanned blocks.
  flat, _ = jax.tree_util.tree_flatten_with_path(boxed, is_leaf=_is_box)
  return {
    '/'.join(key.key for key in path): ParamInfo(
      shape=tuple(box.value.shape),
      dtype=jnp.dtype(box.value.dtype),
      axes=tuple(box.names),
    )
    for path, box in flat
  }
