"""Kernels for inference: in the dtype of the computation, or as integers.

An integer kernel has a scale for each output channel (each row of a table),
the largest magnitude of the channel divided by 127. Products run in the dtype
of the computation: integers save memory and its bandwidth only.

Finds kernels by the logical axes of the parameter table, so it depends on no
model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util
import flax.struct
import jax
from jax import numpy as jnp

from encdec_adapt.models import base_model, parameters

_LARGEST = 127  # Not 128: the range is symmetric, so that 0 stays 0.
# Axes that count kernels; each kernel of a stack has its scales.
_STACKED = ('layers', 'experts')

Table = Mapping[str, parameters.ParamInfo]


@flax.struct.dataclass
class Quantized:
  """A kernel: int8 `values`, and a `scale` with 1 in place of inputs."""

  values: Any
  scale: Any


def _input_axes(axes: tuple[str, ...]) -> tuple[int, ...]:
  """Returns the dimensions that products with a parameter sum over.

  Empty for norms, biases and routers, which are not kernels.
  """
  dims = [i for i, name in enumerate(axes) if name not in _STACKED]
  names = [axes[i] for i in dims]
  # Routers are small, and rounding them could send tokens to other experts.
  if len(dims) < 2 or 'router' in names:
    return ()
  # Kernels lead from or to the model width: 'embed' is first or last, and the
  # inputs are the width alone or all axes before it (heads and head_dim).
  if names[0] == 'embed':
    return tuple(dims[:1])
  if names[-1] == 'embed':
    return tuple(dims[:-1])
  # A table is read row by row, and its logits sum over the width of a row.
  return tuple(dims[1:]) if names[0] == 'vocab' else ()


def _map_kernels(
  params: base_model.Params,
  table: Table,
  fn: Callable[[jax.Array, tuple[int, ...]], Any],
) -> base_model.Params:
  """Applies `fn(kernel, input axes)` to every kernel of nested parameters."""
  flat = traverse_util.flatten_dict(params, sep='/')
  for path, leaf in flat.items():
    if inputs := _input_axes(table[path].axes):
      flat[path] = fn(leaf, inputs)
  return traverse_util.unflatten_dict(flat, sep='/')


def cast(
  params: base_model.Params, table: Table, dtype: str
) -> base_model.Params:
  """Converts kernels to a dtype; norms and biases stay as they are."""
  return _map_kernels(params, table, lambda kernel, _: kernel.astype(dtype))


def quantize(params: base_model.Params, table: Table) -> base_model.Params:
  """Replaces kernels by `Quantized` ones.

  Args:
    params: parameters, nested.
    table: path of every parameter to its logical axes.
  """

  def quantize_kernel(kernel: jax.Array, inputs: tuple[int, ...]) -> Quantized:
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True)
    # A channel of zeros, such as a row that pads a table, must not divide by 0.
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    return Quantized(jnp.round(kernel / scale).astype(jnp.int8), scale)

  return _map_kernels(params, table, quantize_kernel)


def dequantize(params: base_model.Params, dtype: str) -> base_model.Params:
  """Returns the parameters that `Quantized` kernels stand for."""

  def restore(leaf: Any) -> Any:
    if not isinstance(leaf, Quantized):
      return leaf
    return leaf.values.astype(dtype) * leaf.scale.astype(dtype)

  return jax.tree.map(
    restore, params, is_leaf=lambda x: isinstance(x, Quantized)
  )


def rounded(params: base_model.Params, table: Table) -> base_model.Params:
  """Returns fp32 parameters rounded as by integers, to measure the loss."""
  # Under jit, so that no integers of the complete model are stored on the way.
  return jax.jit(lambda x: dequantize(quantize(x, table), 'float32'))(params)
