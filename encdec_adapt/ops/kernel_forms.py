"""Kernels other than plain arrays: quantised kernels and adapters.

Both are pytrees in place of a kernel in a tree of parameters. A scan over
layers slices all their arrays, so static fields do not depend on leading axes.
`models.layers.project` multiplies by them.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

_LARGEST = 127  # Not 128: the range is symmetric, so 0 stays 0.
# Quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E).
_NORMAL_FLOATS = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
  *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
  *(0.7229568362236023, 1.0),
)
BLOCK = 64  # Values per scale in NF4.


@flax.struct.dataclass
class Quantized:
  """A quantised kernel; its arrays have as many dimensions as the kernel.

  Attributes:
    values: int8 in the shape of the kernel; for NF4 uint8, half as long on
      `axis`, with the first of two neighbours in the lower four bits.
    scale: float32 scale per channel, of size 1 along the inputs; for NF4, per
      block on `axis`.
    axis: axis of the NF4 blocks, counted from the end; None for int8.
  """

  values: Any
  scale: Any
  axis: int | None = flax.struct.field(pytree_node=False, default=None)

  def dequantize(self, dtype: Any) -> Array:
    """Returns the dequantised kernel.

    Args:
      dtype: dtype of the result; scaling itself is float32.
    """
    if self.axis is None:
      return (self.values * self.scale).astype(dtype)
    axis = self.values.ndim + self.axis
    halves = self.values & 15, self.values >> 4
    codes = jnp.stack([_normal_float(x) for x in halves], axis + 1)
    shape = list(self.values.shape)
    blocks = self.scale.shape[axis]
    shape[axis : axis + 1] = blocks, 2 * shape[axis] // blocks
    scale = jnp.expand_dims(self.scale, axis + 1)
    shape, codes = tuple(shape), codes.reshape(shape)
    length = shape[axis] * shape[axis + 1]
    kernel = (codes * scale).reshape(*shape[:axis], length, *shape[axis + 2 :])
    return kernel.astype(dtype)


@flax.struct.dataclass
class Adapted:
  """A kernel W [*I, *J] with an adapter: W + scale * A B.

  Attributes:
    kernel: W, an array or `Quantized`; None if it is part of a merged kernel
      (`models.layers.merge`).
    a: A [*I, R].
    b: B [R, *J].
    key: random key of the dropout of A's input; None for no dropout.
    scale: factor of the product.
    dropout: dropout rate of A's input, below 1.
  """

  kernel: Any
  a: Any
  b: Any
  key: Any = None
  scale: float = flax.struct.field(pytree_node=False, default=1.0)
  dropout: float = flax.struct.field(pytree_node=False, default=0.0)

  def drop(self, x: Float[Array, 'B L *I']) -> Float[Array, 'B L *I']:
    """Applies dropout to the input of A."""
    if self.key is None:
      return x
    mask = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
    return jnp.where(mask, x / (1 - self.dropout), 0).astype(x.dtype)


def for_part(kernel: Any, index: Any) -> Any:
  """Returns a kernel with the dropout masks of one part of a batch.

  Args:
    kernel: an array, `Quantized` or `Adapted`, perhaps of several layers.
    index: index of the part.
  """
  if getattr(kernel, 'key', None) is None:
    return kernel
  fold = jax.random.fold_in
  fold = jax.vmap(fold, (0, None)) if kernel.key.ndim else fold
  return kernel.replace(key=fold(kernel.key, index))


def dense(kernel: Any, stacked: bool = False) -> Array:
  """Returns a kernel as an array; float32 unless it already is an array.

  Args:
    kernel: an array, `Quantized` or `Adapted`.
    stacked: whether the first axis counts layers.
  """
  if isinstance(kernel, Quantized):
    return kernel.dequantize(jnp.float32)
  if not isinstance(kernel, Adapted):
    return kernel
  product = jax.vmap(_product) if stacked else _product
  update = kernel.scale * product(kernel.a, kernel.b)
  # In float32: bfloat16 would round small updates away.
  return dense(kernel.kernel).astype(jnp.float32) + update


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.tensordot(a, b, 1, precision='highest')


def quantize_int8(kernel: Array, inputs: tuple[int, ...]) -> Quantized:
  """Quantises a kernel to int8, with a scale per channel.

  Args:
    kernel: the kernel, perhaps of several layers or experts.
    inputs: contracted dimensions.
  """
  kernel = kernel.astype(jnp.float32)
  largest = jnp.max(jnp.abs(kernel), axis=inputs, keepdims=True)
  # A channel of zeros, such as a padding row, must not divide by 0.
  scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
  return Quantized(jnp.round(kernel / scale).astype(jnp.int8), scale)


def quantize_nf4(kernel: Array, axis: int, block: int) -> Quantized:
  """Quantises a kernel to 4-bit normal floats, with a scale per block.

  Args:
    kernel: the kernel, perhaps of several layers.
    axis: axis of the blocks, counted from the end.
    block: values per block, an even divisor of the axis' size.
  """
  kernel, start = kernel.astype(jnp.float32), kernel.ndim + axis
  shape = kernel.shape
  divided = (*shape[:start], shape[start] // block, block, *shape[start + 1 :])
  blocks = kernel.reshape(divided)
  largest = jnp.max(jnp.abs(blocks), axis=start + 1, keepdims=True)
  scale = jnp.where(largest > 0, largest, 1.0)
  values = jnp.asarray(_NORMAL_FLOATS)
  # The nearest code's index is the number of midpoints below a value.
  middle = (values[1:] + values[:-1]) / 2
  codes = sum((blocks / scale > x).astype(jnp.uint8) for x in middle)
  pairs = codes.reshape(*shape[:start], -1, 2, *shape[start + 1 :])
  low, high = jnp.moveaxis(pairs, start + 1, 0)
  return Quantized(low | high << 4, jnp.squeeze(scale, start + 1), axis)


def _normal_float(codes: UInt8[Array, '*K']) -> Float[Array, '*K']:
  # Selects bit by bit: a gather per value would be slow on TPUs.
  values = [*map(jnp.float32, _NORMAL_FLOATS)]
  for bit in range(4):
    is_set = (codes >> bit & 1).astype(bool)
    pairs = zip(values[::2], values[1::2], strict=True)
    values = [jnp.where(is_set, high, low) for low, high in pairs]
  return values[0]
