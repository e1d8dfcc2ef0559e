"""Modules without attention: norms, embedding tables, MLP, heads.

Initialisation of all models: kernels are truncated normal with variance
1 / fan-in, so that projections keep unit variance (about the 0.02 of Hugging
Face at width 2304, and suitable for toy widths too); tables are normal with
variance 1 / D, so that embeddings scaled by sqrt(D) have unit variance and tied
logits start near N(0, 1); norm scales give a gain of 1. Stacks with relative
positions start like T5 (arXiv:1910.10683): unscaled embeddings with variance 1,
and queries with variance 1 / (D H), since scores are not divided by sqrt(H).

Imports neither attention nor modules that consist of layers.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import math
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import model_config
from encdec_adapt.ops import (
  activations,
  embedding,
  kernel_forms,
  norms,
  partition,
  products,
  relative_bias,
)

# Logical axes of merged kernels (`merge`) by name.
MERGED: dict[str, tuple[str | None, ...]] = {
  **dict.fromkeys(
    ('query_key_value', 'key_value'), ('embed', 'kv_heads', None, None)
  ),
  'gate_up': ('embed', 'mlp'),
}


def kernel_init(
  axes: Sequence[str],
  in_axis: int | Sequence[int],
  out_axis: int | Sequence[int],
  batch_axis: int | Sequence[int] = (),
  scale: float = 1.0,
) -> nn.initializers.Initializer:
  """Returns the initialiser of a kernel with these logical axes.

  Args:
    axes: logical name of each dimension.
    in_axis: contracted dimensions.
    out_axis: output dimensions.
    batch_axis: dimensions that count kernels.
    scale: factor of the variance.
  """
  init = nn.initializers.variance_scaling(
    scale, 'fan_in', 'truncated_normal', in_axis, out_axis, batch_axis
  )
  return nn.with_logical_partitioning(init, tuple(axes))


def bias_init(*axes: str) -> nn.initializers.Initializer:
  """Returns the zero initialiser of a bias with these logical axes."""
  return nn.with_logical_partitioning(nn.initializers.zeros, axes)


def gain_init(
  config: model_config.StackConfig, axis: str
) -> nn.initializers.Initializer:
  """Returns the initialiser of a norm's scale, for a gain of 1."""
  one_plus = config.norm_gain == 'one_plus'
  values = nn.initializers.zeros if one_plus else nn.initializers.ones
  return nn.with_logical_partitioning(values, (axis,))


def norm(
  config: model_config.StackConfig,
  x: Float[Array, '*L D'],
  scale: Float[Array, 'D'] | None,
  bias: Float[Array, 'D'] | None = None,
) -> Float[Array, '*L D']:
  """Applies the stack's norm over the last axis; None for no gain or bias."""
  if config.norm == 'layer':
    return norms.layer_norm(x, scale, bias, config.norm_eps)
  return norms.rms_norm(x, scale, config.norm_eps, gain=config.norm_gain)


class Norm(nn.Module):
  """RMSNorm or LayerNorm of the residual stream."""

  config: model_config.StackConfig

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    init = gain_init(self.config, 'embed')
    scale = self.param('scale', init, (self.config.width,), jnp.float32)
    bias = None
    if self.config.norm_bias:
      init = bias_init('embed')
      bias = self.param('bias', init, (self.config.width,), jnp.float32)
    return norm(self.config, x, scale, bias)


class LayerScalar(nn.Module):
  """Multiplies the states by a frozen scalar.

  Source: transformers 5.24, `modeling_gemma4.py`, the buffer `layer_scalar`.
  """

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    # Not sharded.
    init = nn.with_logical_partitioning(nn.initializers.ones, ('reward',))
    scale = self.param('scale', init, (1,), jnp.float32)
    return x * jax.lax.stop_gradient(scale).astype(x.dtype)


def dropout(x: Float[Array, 'B L D'], rate: float) -> Float[Array, 'B L D']:
  """Applies dropout, scaling the remaining values by 1 / (1 - rate).

  Unless the rate is 0, call it inside a module with the random stream
  'dropout'. Masks do not depend on the sharding
  (`jax_threefry_partitionable`).
  """
  return nn.Dropout(rate, deterministic=False)(x) if rate else x


class Embedder(nn.Module):
  """Maps token ids to the input states of the first layer."""

  config: model_config.StackConfig
  dtype: str

  @nn.compact
  def __call__(
    self, tokens: Int[Array, 'B L'], positions: Int[Array, 'B L']
  ) -> Float[Array, 'B L D']:
    """Looks up rows of the table, times sqrt(D) if the stack scales them.

    Learned positions are added; those beyond the last have its vector.
    """
    cfg = self.config
    std = 1.0 if cfg.relative else cfg.width**-0.5
    table = make_table(self, cfg, cfg.vocab_size, std)
    x = embedding.lookup(table, tokens, self.dtype)
    # Rounds sqrt(D) to the dtype first, as in transformers: weights trained in
    # bfloat16 expect 55.5, not 55.43, at width 3072.
    if cfg.scale_embeddings:
      x = x * jnp.sqrt(jnp.float32(cfg.width)).astype(self.dtype)
    # After the scaling, which T5Gemma 2 does not apply to this vector.
    if cfg.eoi_token is not None:
      init = bias_init('table_embed')
      vector = self.param('eoi', init, (cfg.width,), jnp.float32)
      is_eoi = (tokens == cfg.eoi_token)[..., None]
      x = jnp.where(is_eoi, vector.astype(self.dtype), x)
    init = nn.with_logical_partitioning(
      nn.initializers.normal(0.02), ('buckets', 'table_embed')
    )
    # In the order of BERT, whose sums in bfloat16 depend on it.
    if cfg.token_types:
      types = self.param('types', init, (cfg.token_types, cfg.width))
      x = x + types[0].astype(self.dtype)
    if rows := cfg.positions.rows:
      vectors = self.param('positions', init, (rows, cfg.width))
      rows = positions + cfg.positions.offset
      x = x + jnp.take(vectors.astype(self.dtype), rows, 0, mode='clip')
    if cfg.embedding_norm:
      x = Norm(cfg, name='norm')(x)
    return partition.shard(x, 'batch', 'length', 'act_embed')


class LayerInputs(nn.Module):
  """Maps token ids and embeddings to inputs of every layer.

  Source: transformers 5.24, `modeling_gemma4.py`, `project_per_layer_inputs`.
  """

  config: model_config.StackConfig
  dtype: str

  @nn.compact
  def __call__(
    self, tokens: Int[Array, 'B L'], x: Float[Array, 'B L D']
  ) -> Float[Array, 'B L N J']:
    """Returns the inputs of N layers, given embeddings x."""
    cfg = self.config
    shape = cfg.layers, cfg.layer_input_width
    columns = math.prod(shape)
    table = make_table(self, cfg, cfg.vocab_size, shape[1] ** -0.5, columns)
    axes = 'embed', 'layer_inputs'
    init = kernel_init(axes, 0, 1)
    kernel = declare(self, 'projection', init, (cfg.width, columns))
    gain = self.param('scale', gain_init(cfg, 'layer_inputs'), shape[1:])
    rows = embedding.lookup(table, tokens, self.dtype)
    rows = rows * jnp.sqrt(jnp.float32(shape[1])).astype(self.dtype)
    states = project(x, kernel, axes=axes)
    states = _times(states, cfg.width**-0.5).reshape(*tokens.shape, *shape)
    states = norm(cfg, states, gain)
    return _times(states + rows.reshape(states.shape), 2**-0.5)


def _times(x: jax.Array, factor: float) -> jax.Array:
  # As torch: the factor is not rounded to the dtype.
  return (x.astype(jnp.float32) * factor).astype(x.dtype)


class LayerInput(nn.Module):
  """What a layer reads of its input: down(activation(gate(x)) * input)."""

  config: model_config.StackConfig

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B L D'], inputs: Float[Array, 'B #L J']
  ) -> Float[Array, 'B L D']:
    cfg = self.config
    inward = 'embed', 'layer_inputs'
    shape = cfg.width, cfg.layer_input_width
    gate, down = (
      (declare(self, name, kernel_init(axes, 0, 1), sizes), axes)
      for name, axes, sizes in (
        ('gate', inward, shape),
        ('down', inward[::-1], shape[::-1]),
      )
    )
    gate = project(x, gate[0], axes=gate[1])
    hidden = activations.ACTIVATIONS[cfg.activation](gate) * inputs
    return project(hidden.astype(x.dtype), down[0], axes=down[1])


class Head(nn.Module):
  """Declares the table of an untied head, for `logits`, and a bias."""

  config: model_config.StackConfig

  @nn.compact
  def __call__(self) -> Float[Array, 'V D']:
    cfg = self.config
    table = make_table(self, cfg, cfg.outputs, cfg.width**-0.5)
    if cfg.head.bias == self.name:
      self.param('logits_bias', bias_init('vocab'), table.shape[:1])
    return table


class Transform(nn.Module):
  """Layer and norm between the states and the table of a masked LM (BERT).

  Also declares its bias of the logits, for `base_model.BaseModel.projection`.

  Attributes:
    config: config of the stack.
    normed: whether a norm follows the activation; otherwise the activation is
      tanh (the pooler of a classifier).
  """

  config: model_config.StackConfig
  normed: bool = True

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B L D'] | None = None
  ) -> Float[Array, 'B L D'] | None:
    """Transforms states; without them only declares the parameters."""
    cfg, axes = self.config, ('embed', 'table_embed')
    shape = cfg.width, cfg.width
    kernel = declare(self, 'dense', kernel_init(axes, 0, 1), shape)
    bias = None
    if cfg.mlp_bias:
      bias = self.param('dense_bias', bias_init('table_embed'), shape[1:])
    if cfg.head.bias == self.name:
      self.param('logits_bias', bias_init('vocab'), (cfg.table_rows,))
    normalise = Norm(cfg, name='norm') if self.normed else None
    if x is None:  # Flax declares parameters at the first call.
      if normalise:
        normalise(jnp.zeros((1, 1, cfg.width)))
      return None
    x = project(x, kernel, bias, axes=axes)
    if not normalise:
      return jnp.tanh(x)
    return normalise(activations.ACTIVATIONS[cfg.activation](x))


class Bias(nn.Module):
  """Declares a bias of the logits that belongs to no other module."""

  config: model_config.StackConfig

  @nn.compact
  def __call__(self) -> None:
    self.param('logits_bias', bias_init('vocab'), (self.config.table_rows,))


class EmbeddingHead(nn.Module):
  """Declares projections and temperature for `embedding_head.vectors`."""

  config: model_config.StackConfig

  @nn.compact
  def __call__(self) -> None:
    head, axes = self.config.head, ('embed', 'mlp')
    widths = (self.config.width, *head.projections)
    for i, shape in enumerate(itertools.pairwise(widths)):
      init = kernel_init(axes[:: -1 if i % 2 else 1], 0, 1)
      self.param(f'projection_{i}', init, shape, jnp.float32)
    if head.temperature:
      # Its logarithm, so that any parameter value is a valid temperature.
      value = nn.initializers.constant(math.log(head.temperature))
      init = nn.with_logical_partitioning(value, ('reward',))  # Not sharded.
      self.param('log_temperature', init, (1,), jnp.float32)


# By `heads.Head.modules`.
HEADS = {
  'head': Head,
  'embedding': EmbeddingHead,
  'transform': Transform,
  'pooler': functools.partial(Transform, normed=False),
  'bias': Bias,
}


def make_table(
  module: nn.Module,
  config: model_config.StackConfig,
  rows: int,
  std: float,
  width: int = 0,
) -> jax.Array:
  """Declares a table [V, D] as the parameter 'table' of a module.

  Args:
    module: the module.
    config: the stack.
    rows: rows without padding.
    std: standard deviation of the initial values.
    width: columns D; 0 for the width of the stack.
  """
  # The single row of a reward model is neither padded nor sharded.
  is_divided = rows > 1
  init = nn.with_logical_partitioning(
    nn.initializers.normal(std),
    ('vocab' if is_divided else 'reward', 'table_embed'),
  )
  multiple = config.vocab_multiple if is_divided else 1
  shape = (-(-rows // multiple) * multiple, width or config.width)
  return kernel_forms.dense(declare(module, 'table', init, shape))


def declare_bias(
  module: nn.Module, config: model_config.StackConfig
) -> relative_bias.RelativeBias:
  """Declares a relative position bias [N, buckets] of a module."""
  buckets, distance = config.relative.buckets, config.relative.distance
  init = nn.with_logical_partitioning(
    nn.initializers.normal(config.width**-0.5), ('heads', 'buckets')
  )
  shape = config.heads, buckets
  table = module.param('relative_bias', init, shape, jnp.float32)
  return relative_bias.RelativeBias(table, distance)


def parameters(
  module: nn.Module, declare: Callable[[], dict[str, Any]]
) -> Mapping[str, Any]:
  """Returns the parameters of a module by name.

  Declares them during initialisation; otherwise returns the applied parameters
  in any form: arrays, merged kernels, `Quantized` or `Adapted`.
  """
  if module.is_initializing():
    return declare()
  return module.variables['params']


def declare(
  module: nn.Module,
  name: str,
  init: nn.initializers.Initializer,
  shape: Sequence[int],
) -> Any:
  """Declares a float32 kernel [*shape] as a parameter of a module.

  Returns:
    The array, or the `Quantized` or `Adapted` kernel in its place.
  """
  if module.has_variable('params', name):
    kernel = module.get_variable('params', name)
    # Flax would compare the shape of its first array.
    if isinstance(kernel, (kernel_forms.Quantized, kernel_forms.Adapted)):
      return kernel
  return module.param(name, init, tuple(shape), jnp.float32)


def logits(
  table: Float[Array, 'V D'],
  hidden: Float[Array, 'B T D'],
  vocab_size: int,
  softcap: float | None,
) -> Float[Array, 'B T vocab']:
  """Computes soft-capped float32 logits without padding columns."""
  x = products.logits(hidden, table.astype(hidden.dtype))
  # Slices after the constraint: only the padded V is divisible over the mesh.
  x = partition.shard(x, 'batch', 'length', 'act_vocab')[..., :vocab_size]
  return x if softcap is None else activations.softcap(x, softcap)


def rewards(
  table: Float[Array, 'V D'], states: Float[Array, 'B D']
) -> Float[Array, 'B']:
  """Computes float32 rewards: products of states with the table's first row."""
  # Not a matmul, which TPUs would compute in bfloat16.
  return jnp.sum(states.astype(jnp.float32) * table[0], axis=-1)


def project(
  x: Float[Array, 'B L *I'],
  kernel: Any,
  bias: Float[Array, '*J'] | None = None,
  *,
  axes: Sequence[str],
  product: Float[Array, 'B L *J'] | None = None,
) -> Float[Array, 'B L *J']:
  """Projects states with a kernel and adds a bias, rounding once.

  With an adapter (LoRA, arXiv:2106.09685) computes x W + scale (x A) B, without
  W + scale A B. A quantised kernel is dequantised here, and again in the
  backward pass, so that only one layer is dense at a time.

  On CPUs both operands are flattened to matrices: for contractions over several
  dimensions (batch and length in the gradients of kernels, heads and head_dim
  in gradients of states), XLA:CPU first copies its operands into transposed
  order, which costs a fifth of a training step. TPUs and GPUs choose layouts
  without copies, which flattening would prevent; flattening would also gather a
  sharded length.

  With a bias or an adapter the sum is computed in fp32: rounding the product
  first would increase the distance of Qwen's and Llama's bf16 logits to
  transformers' by up to half. On CPUs all products are fp32 (`ops.products`).

  Args:
    x: states; the dimensions after the first two are contracted.
    kernel: [*I, *J], an array or a kernel of `ops.kernel_forms`; with `product`
      None, or an adapter of None.
    bias: added to the product, or None.
    axes: logical axes of the kernel.
    product: the product, if `project_all` has computed it.

  Returns:
    The projected states in the dtype of `x`.
  """
  adapter = kernel if isinstance(kernel, kernel_forms.Adapted) else None
  kernel = adapter.kernel if adapter else kernel
  accumulate = None if bias is None and adapter is None else jnp.float32
  y = product
  if kernel is not None:
    y = _multiply(x, kernel, axes, accumulate)
  if adapter:
    contracted = x.ndim - 2
    a_axes, b_axes = (*axes[:contracted], 'rank'), ('rank', *axes[contracted:])
    low = _multiply(adapter.drop(x), adapter.a, a_axes, None).astype(x.dtype)
    update = _multiply(low, adapter.b, b_axes, jnp.float32)
    y = y + adapter.scale * update
  if bias is not None:
    y = y + bias.astype(x.dtype).astype(jnp.float32)
  # Names the rounded result, of half the size, not the products: an adapter has
  # two, and the product of a quantised kernel is inside another checkpoint.
  is_wide = math.prod(y.shape[2:]) > 2 * math.prod(x.shape[2:])
  name = products.WIDE if is_wide else products.NARROW
  return checkpoint_name(y.astype(x.dtype), name)


def project_all(
  x: Float[Array, 'B L *I'],
  params: Mapping[str, Any],
  axes: Mapping[str, Sequence[str]],
) -> list[jax.Array]:
  """Projects states with several kernels and adds biases; see `project`.

  Args:
    x: states.
    params: kernels by name, or merged kernels (`merge`) by joined names with
      separate adapters; biases as 'NAME_bias'.
    axes: logical axes of each kernel [*I, *J] by name.

  Returns:
    The projected states [B, L, *J] of each kernel.
  """
  merged, computed = '_'.join(axes), [None] * len(axes)
  if merged in MERGED and merged in params:
    is_sum = any(x in params or f'{x}_bias' in params for x in axes)
    accumulate = jnp.float32 if is_sum else None
    y = _multiply(x, params[merged], MERGED[merged], accumulate)
    outputs, unit = (-1, y.shape[-1]), 1  # [B, L, K, G + 2, H]
    if y.ndim == 3:
      y = y.reshape(*x.shape[:2], partition.active().size('mlp'), -1)
      outputs, unit = (-1,), y.shape[3] // len(axes)
    # Only the first kernel may have several units.
    start = y.shape[3] - unit * (len(axes) - 1)
    parts = jnp.split(y, [*range(start, y.shape[3], unit)], axis=3)
    computed = [part.reshape(*x.shape[:2], *outputs) for part in parts]
  return [
    project(
      x, params.get(name), params.get(f'{name}_bias'), axes=a, product=product
    )
    for (name, a), product in zip(axes.items(), computed, strict=True)
  ]


def merge(name: str, kernels: Sequence[Any], groups: int) -> Any:
  """Merges several kernels with the same inputs.

  Outputs are ordered by group, each with its part of every kernel: if groups
  are sharded, a device has the parts of its own heads or features, and
  `project_all` splits the product without communication.

  Args:
    name: key of `MERGED`.
    kernels: arrays [D, *J], or `Quantized`; the first may have more heads.
    groups: groups of outputs: key heads, or shards of features.

  Returns:
    [D, K, parts, H], or [D, J] of features, an array or `Quantized`.
  """

  def join(*arrays: jax.Array) -> jax.Array:
    rows = len(arrays[-1])
    width = arrays[-1].size // (rows * groups)
    y = jnp.concatenate(
      [x.reshape(rows, groups, -1, width) for x in arrays], axis=2
    )
    inputs, *outputs = MERGED[name]
    # TPUs would copy a matrix with a dimension as small as the number of parts.
    y = y.reshape(rows, -1) if len(outputs) == 1 else y
    # A scale has no inputs.
    return partition.shard(y, inputs if rows > 1 else None, *outputs)

  return jax.tree.map(join, *kernels)


def _multiply(
  x: jax.Array, kernel: Any, axes: Sequence[str | None], accumulate: Any
) -> jax.Array:
  """Multiplies states [B, L, *I] by a kernel [*I, *J] without adapter.

  Args:
    x: states.
    kernel: an array of any dtype, or `Quantized`.
    axes: logical axes of the kernel.
    accumulate: dtype of the result; None for the dtype of `x`. On CPUs
      products are float32.
  """
  if isinstance(kernel, kernel_forms.Quantized):
    # Otherwise the backward pass would keep the dense kernels of all layers.
    @jax.checkpoint
    def multiply(x, kernel):
      return _multiply(x, kernel.dequantize(x.dtype), axes, accumulate)

    return multiply(x, kernel)
  # Casts first, so that the gradient is summed over the mesh in the compute
  # dtype: half as many bytes in bfloat16.
  kernel = partition.sum_gradient_in_stages(kernel.astype(x.dtype), *axes)
  contracted = x.ndim - 2
  if products.on_cpu() and partition.active().size('length') == 1:
    rows = x.reshape(-1, math.prod(x.shape[2:]))
    y = products.matmul(rows, kernel.reshape(rows.shape[-1], -1))
    return y.reshape(*x.shape[:2], *kernel.shape[contracted:])
  return jnp.tensordot(x, kernel, contracted, preferred_element_type=accumulate)


class MLP(nn.Module):
  """Feed-forward of width F: down(activation(gate(x)) * up(x)).

  Without a gate: down(activation(up(x))).
  """

  config: model_config.StackConfig
  dtype: str
  mlp_width: int

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    inward, outward = ('embed', 'mlp'), ('mlp', 'embed')
    names = ('gate', 'up') if self.config.mlp_gated else ('up',)
    axes = dict.fromkeys(names, inward)
    weights = parameters(self, lambda: self._declare(axes | {'down': outward}))
    *gate, up = project_all(x.astype(self.dtype), weights, axes)
    activation = activations.ACTIVATIONS[self.config.activation]
    hidden = activation(gate[0]) * up if gate else activation(up)
    hidden = partition.shard(hidden, 'batch', 'length', 'act_mlp')
    return project_all(hidden.astype(self.dtype), weights, {'down': outward})[0]

  def _declare(self, axes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    sizes = {'embed': self.config.width, 'mlp': self.mlp_width}
    weights = {}
    for name, (inputs, outputs) in axes.items():
      init = kernel_init((inputs, outputs), 0, 1)
      shape = sizes[inputs], sizes[outputs]
      weights[name] = self.param(name, init, shape, jnp.float32)
      if self.config.mlp_bias:
        weights[f'{name}_bias'] = self.param(
          f'{name}_bias', bias_init(outputs), shape[1:], jnp.float32
        )
    return weights
