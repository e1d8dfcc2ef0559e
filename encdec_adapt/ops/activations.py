"""Elementwise functions: feed-forward activations and soft-capping."""

import types

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The tanh approximation's constants (Hendrycks and Gimpel, arXiv 1606.08415,
# section 2); the slope is sqrt(2 / pi).
_SLOPE = 0.7978845608028654
_CUBIC = 0.044715


@jax.custom_vjp
def gelu_tanh(x: Float[Array, '*shape']) -> Float[Array, '*shape']:
  """Applies GeLU in Gemma's tanh approximation (erf differs by 1e-3).

  Computes in fp32 and casts once, at the end. The forward pass saves only the
  derivative, as large as the input, and the backward pass multiplies by it. By
  default XLA:CPU would evaluate the tanh again in every fusion.

  Args:
    x: any shape, any float dtype.

  Returns:
    `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2` in the dtype of `x`.
  """
  return _gelu_and_derivative(x)[0]


def _gelu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  x32 = x.astype(jnp.float32)
  square = x32 * x32
  tanh = jnp.tanh(_SLOPE * x32 * (1.0 + _CUBIC * square))
  gate = 0.5 * (1.0 + tanh)
  inner = _SLOPE * (1.0 + 3.0 * _CUBIC * square)
  derivative = gate + 0.5 * x32 * (1.0 - tanh * tanh) * inner
  return (x32 * gate).astype(x.dtype), derivative.astype(x.dtype)


def _backward(derivative: jax.Array, cotangent: jax.Array):
  return (cotangent * derivative,)


gelu_tanh.defvjp(_gelu_and_derivative, _backward)


@jax.custom_vjp
def gelu(x: Float[Array, '*shape']) -> Float[Array, '*shape']:
  """Applies GeLU (BERT); fp32 and backward pass as in `gelu_tanh`.

  Args:
    x: any shape, any float dtype.

  Returns:
    `x Phi(x)` in the dtype of `x`, Phi the normal distribution function.
  """
  return _exact_gelu_and_derivative(x)[0]


def _exact_gelu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  x32 = x.astype(jnp.float32)
  gate = jax.scipy.stats.norm.cdf(x32)
  derivative = gate + x32 * jax.scipy.stats.norm.pdf(x32)
  return (x32 * gate).astype(x.dtype), derivative.astype(x.dtype)


gelu.defvjp(_exact_gelu_and_derivative, _backward)


@jax.custom_vjp
def silu(x: Float[Array, '*shape']) -> Float[Array, '*shape']:
  """Applies SiLU (Llama, Qwen); fp32 and backward pass as in `gelu_tanh`.

  Args:
    x: any shape, any float dtype.

  Returns:
    `x / (1 + exp(-x))` in the dtype of `x`.
  """
  return _silu_and_derivative(x)[0]


def _silu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  x32 = x.astype(jnp.float32)
  gate = jax.nn.sigmoid(x32)
  derivative = gate * (1.0 + x32 * (1.0 - gate))
  return (x32 * gate).astype(x.dtype), derivative.astype(x.dtype)


silu.defvjp(_silu_and_derivative, _backward)


@jax.custom_vjp
def relu(x: Float[Array, '*shape']) -> Float[Array, '*shape']:
  """Applies ReLU (T5); backward pass as in `gelu_tanh`.

  Args:
    x: any shape, any float dtype.

  Returns:
    `max(x, 0)` in the dtype of `x`; the derivative at 0 is 0.
  """
  return _relu_and_derivative(x)[0]


def _relu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  return jnp.maximum(x, 0), (x > 0).astype(x.dtype)


relu.defvjp(_relu_and_derivative, _backward)


# Feed-forward activations by name.
ACTIVATIONS = types.MappingProxyType(
  {'gelu_tanh': gelu_tanh, 'gelu': gelu, 'silu': silu, 'relu': relu}
)


def softcap(x: Float[Array, '*shape'], cap: float) -> Float[Array, '*shape']:
  """Bounds scores and logits to (-cap, cap) with `cap tanh(x / cap)` (Gemma 2).

  Args:
    x: any shape, any float dtype.
    cap: positive bound.

  Returns:
    Capped values, shape and dtype of `x`.
  """
  return cap * jnp.tanh(x / cap)
