"""Modules without attention: RMSNorm, the embedding table, the MLP.

Initialisation, of every model here: kernels are truncated normal with
variance 1 / fan-in, so that projections keep unit variance (about the 0.02 of
Hugging Face at width 2304, and right at toy widths too); tables are normal
with variance 1 / D, so that embeddings scaled by sqrt(D) have unit variance
and tied logits start near N(0, 1); norm scales are 0, a gain of one.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models.config import StackConfig
from encdec_adapt.ops import activations, embedding, norms, partition


def kernel_init(
  axes: Sequence[str],
  in_axis: int | Sequence[int],
  out_axis: int | Sequence[int],
) -> nn.initializers.Initializer:
  """Initialiser of a kernel with these logical axes.

  Args:
    axes: one logical name per dimension.
    in_axis: dimensions that a product contracts.
    out_axis: dimensions that it produces.
  """
  init = nn.initializers.variance_scaling(
    1.0, 'fan_in', 'truncated_normal', in_axis=in_axis, out_axis=out_axis
  )
  return nn.with_logical_partitioning(init, tuple(axes))


class RMSNorm(nn.Module):
  """Root-mean-square norm with gain 1 + scale."""

  config: StackConfig

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    init = nn.with_logical_partitioning(nn.initializers.zeros, ('embed',))
    scale = self.param('scale', init, (self.config.width,), jnp.float32)
    return norms.rms_norm(x, scale, self.config.norm_eps)


class Table(nn.Module):
  """A token table [V, D]: an embedding, or a head that is not tied."""

  config: StackConfig

  @nn.compact
  def __call__(self) -> Float[Array, 'V D']:
    cfg = self.config
    init = nn.with_logical_partitioning(
      nn.initializers.normal(cfg.width**-0.5), ('vocab', 'table_embed')
    )
    return self.param('table', init, (cfg.table_rows, cfg.width), jnp.float32)


def embed(
  table: Float[Array, 'V D'], tokens: Int[Array, 'B L'], dtype: jnp.dtype
) -> Float[Array, 'B L D']:
  """Rows of the table times sqrt(D), which is rounded to `dtype` first."""
  x = embedding.lookup(table, tokens, dtype)
  x = x * jnp.sqrt(jnp.float32(table.shape[1])).astype(dtype)
  return partition.shard(x, 'batch', 'length', 'act_embed')


def logits(
  table: Float[Array, 'V D'],
  hidden: Float[Array, 'B T D'],
  vocab_size: int,
  softcap: float | None,
) -> Float[Array, 'B T vocab']:
  """Soft-capped logits in float32 of the vocabulary's tokens."""
  x = jnp.einsum(
    'BTD,VD->BTV',
    hidden,
    table.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )
  x = partition.shard(x, 'batch', 'length', 'act_vocab')[..., :vocab_size]
  return x if softcap is None else activations.softcap(x, softcap)


class MLP(nn.Module):
  """Gated feed-forward: down(gelu(gate(x)) * up(x)), no biases."""

  config: StackConfig
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x: Float[Array, 'B L D']) -> Float[Array, 'B L D']:
    inner = (self.config.width, self.config.mlp_width)
    init = kernel_init(('embed', 'mlp'), 0, 1)
    gate = self._kernel('gate', init, inner)
    up = self._kernel('up', init, inner)
    down = self._kernel(
      'down', kernel_init(('mlp', 'embed'), 0, 1), inner[::-1]
    )
    hidden = activations.gelu_tanh(jnp.einsum('BLD,DF->BLF', x, gate))
    hidden = hidden * jnp.einsum('BLD,DF->BLF', x, up)
    hidden = partition.shard(hidden, 'batch', 'length', 'act_mlp')
    return jnp.einsum('BLF,FD->BLD', hidden, down)

  def _kernel(self, name, init, shape) -> jax.Array:
    return self.param(name, init, shape, jnp.float32).astype(self.dtype)
