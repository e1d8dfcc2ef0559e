"""Kernels for inference: in the dtype of the computation, or as integers.

An integer kernel has a scale for each output channel (each row of a table),
the largest magnitude of the channel divided by 127. Products run in the dtype
of the computation: what is saved is memory and its bandwidth.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util
import flax.struct
import jax
from jax import numpy as jnp

from encdec_adapt.models import base_model, parameters

_LARGEST = 127
# Axes that count kernels.
_STACKED = ('layers', 'experts')

Table = Mapping[str, parameters.ParamInfo]


@flax.struct.dataclass
class Quantized:
  """A kernel: int8 `values`, and a `scale` with 1 in place of inputs."""

  values: Any
  scale: Any


def _input_axes(axes: tuple[str, ...]) -> tuple[int, ...]:
  """Returns the dimensions that products with a parameter sum over.

  Empty for what is no kernel: norms, biases and routers.
  """
  own = [i for i, name in enumerate(axes) if name not in _STACKED]
  names = [axes[i] for i in own]
  if len(own) < 2 or 'router' in names:
    return ()
  if names[0] == 'embed' or names[-1] == 'embed':
    return tuple(own[:1] if names[0] == 'embed' else own[:-1])
  return tuple(own[1:]) if names[0] == 'vocab' else ()


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
    """Quantizes one kernel."""
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
    return Quantized(jnp.round(kernel / scale).astype(jnp.int8), scale)

  return _map_kernels(params, table, quantize_kernel)


def dequantize(params: base_model.Params, dtype: str) -> base_model.Params:
  """Returns the parameters that `Quantized` kernels stand for."""

  def restore(leaf: Any) -> Any:
    """Returns one parameter."""
    if not isinstance(leaf, Quantized):
      return leaf
    return leaf.values.astype(dtype) * leaf.scale.astype(dtype)

  is_kernel = lambda x: isinstance(x, Quantized)  # noqa: E731
  return jax.tree.map(restore, params, is_leaf=is_kernel)


@jax.jit(static_argnames='table')
def _rounded(params: base_model.Params, table: Any) -> base_model.Params:
  return dequantize(quantize(params, dict(table)), 'float32')


def rounded(params: base_model.Params, table: Table) -> base_model.Params:
  """Returns fp32 parameters as integers keep them, to measure what is lost."""
  return _rounded(params, tuple(table.items()))
