"""Inference kernels: cast to the compute dtype, or quantized to int8.

An int8 kernel has one scale per output channel (row of a table): the channel's
maximum magnitude divided by 127. Matmuls run in the compute dtype: int8 only
saves memory and bandwidth.

Kernels are found by the logical axes of the parameter table, independently of
the model.
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
  """Applies `fn(kernel, input axes)` to every kernel in nested parameters."""
  flat = traverse_util.flatten_dict(params, sep='/')
  for path, leaf in flat.items():
    if inputs := table[path].inputs:
      flat[path] = fn(leaf, inputs)
  return traverse_util.unflatten_dict(flat, sep='/')


def merge(params: base_model.Params, table: Table) -> base_model.Params:
  """Merges quantized or adapted kernels into dense arrays.

  Args:
    params: nested parameters.
    table: logical axes of every parameter, by path.
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
  """Casts kernels to a dtype; norms and biases are unchanged."""
  return _map_kernels(params, table, lambda kernel, _: kernel.astype(dtype))


def quantize(params: base_model.Params, table: Table) -> base_model.Params:
  """Quantizes kernels to int8 (`kernel_forms.Quantized`).

  Args:
    params: nested parameters.
    table: logical axes of every parameter, by path.
  """

  return _map_kernels(params, table, kernel_forms.quantize_int8)


def dequantize(params: base_model.Params, dtype: str) -> base_model.Params:
  """Dequantizes `kernel_forms.Quantized` kernels to a dtype."""

  def restore(leaf: Any) -> Any:
    is_quantized = isinstance(leaf, kernel_forms.Quantized)
    return leaf.dequantize(dtype) if is_quantized else leaf

  return jax.tree.map(
    restore, params, is_leaf=lambda x: isinstance(x, kernel_forms.Quantized)
  )


def rounded(params: base_model.Params, table: Table) -> base_model.Params:
  """Returns fp32 parameters after int8 rounding, to measure the loss."""
  # Under jit, so int8 kernels of the whole model are never stored.
  return jax.jit(lambda x: dequantize(quantize(x, table), 'float32'))(params)
