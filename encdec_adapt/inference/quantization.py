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
import jax

from encdec_adapt.models import base_model, parameters
from encdec_adapt.ops import kernel_forms

Table = Mapping[str, parameters.ParamInfo]


def _map_kernels(
  params: base_model.Params,
  table: Table,
  fn: Callable[[jax.Array, tuple[int, ...]], Any],
) -> base_model.Params:
  """Applies `fn(kernel, input axes)` to every kernel of nested parameters."""
  flat = traverse_util.flatten_dict(params, sep='/')
  for path, leaf in flat.items():
    if inputs := table[path].inputs:
      flat[path] = fn(leaf, inputs)
  return traverse_util.unflatten_dict(flat, sep='/')


def merge(params: base_model.Params, table: Table) -> base_model.Params:
  """Returns parameters in which every kernel is an array.

  Args:
    params: parameters, nested; kernels may be quantised or have adapters.
    table: path of every parameter to its logical axes.
  """
  flat = traverse_util.flatten_dict(params, sep='/')
  return traverse_util.unflatten_dict(
    {
      path: kernel_forms.dense(leaf, stacked='layers' in table[path].axes)
      for path, leaf in flat.items()
    },
    sep='/',
  )


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

  return _map_kernels(params, table, kernel_forms.quantize_int8)


def dequantize(params: base_model.Params, dtype: str) -> base_model.Params:
  """Returns the parameters that `Quantized` kernels stand for."""

  def restore(leaf: Any) -> Any:
    is_quantized = isinstance(leaf, kernel_forms.Quantized)
    return leaf.dequantize(dtype) if is_quantized else leaf

  return jax.tree.map(
    restore, params, is_leaf=lambda x: isinstance(x, kernel_forms.Quantized)
  )


def rounded(params: base_model.Params, table: Table) -> base_model.Params:
  """Returns fp32 parameters rounded as by integers, to measure the loss."""
  # Under jit, so that no integers of the complete model are stored on the way.
  return jax.jit(lambda x: dequantize(quantize(x, table), 'float32'))(params)
