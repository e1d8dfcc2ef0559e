"""Attention modules: projections around `ops.attention`.

Grouped-query attention, scores scaled by query_scale^-1/2 and soft-capped.
Self-attention rotates queries and keys. Cross-attention has no position
signal and no window, reads an encoding that is already normalised, of the
encoder's width, and has the decoder's heads, scale and cap.
"""

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import cache as caches
from encdec_adapt.models import execution as executions
from encdec_adapt.models import layers
from encdec_adapt.models.config import StackConfig
from encdec_adapt.ops import attention, masks, partition, rope


def project_keys_values(
  source: Float[Array, 'B S E'],
  key: Float[Array, 'E K H'],
  value: Float[Array, 'E K H'],
) -> caches.KeyValues:
  """Keys and values [B, S, K, H] in the source's dtype, before rotation."""

  def project(kernel: jax.Array) -> jax.Array:
    x = jnp.einsum('BSE,EKH->BSKH', source, kernel.astype(source.dtype))
    return partition.shard(x, 'batch', 'kv_length', 'kv_heads', None)

  return caches.KeyValues(key=project(key), value=project(value))


class _Attention(nn.Module):
  """Parameters and the steps that self- and cross-attention share.

  Attributes:
    config: the stack's shape.
    execution: how it is run.
    source_width: width of what keys and values are made of.
  """

  config: StackConfig
  execution: executions.Execution
  source_width: int

  def setup(self):
    cfg = self.config
    query_axes = ('embed', 'heads', 'head_dim')
    source_axes = ('embed', 'kv_heads', 'head_dim')
    output_axes = ('heads', 'head_dim', 'embed')
    source_shape = (self.source_width, cfg.kv_heads, cfg.head_dim)
    self.query = self.param(
      'query',
      layers.kernel_init(query_axes, 0, (1, 2)),
      (cfg.width, cfg.heads, cfg.head_dim),
    )
    source_init = layers.kernel_init(source_axes, 0, (1, 2))
    self.key = self.param('key', source_init, source_shape)
    self.value = self.param('value', source_init, source_shape)
    self.output = self.param(
      'output',
      layers.kernel_init(output_axes, (0, 1), 2),
      (cfg.heads, cfg.head_dim, cfg.width),
    )

  def queries(self, x: Float[Array, 'B T D']) -> Float[Array, 'B T N H']:
    """Queries, before rotation."""
    return jnp.einsum('BTD,DNH->BTNH', x, self.query.astype(x.dtype))

  def attend(
    self,
    q: Float[Array, 'B T N H'],
    source: caches.KeyValues,
    mask: masks.MaskSpec,
  ) -> Float[Array, 'B T D']:
    """Attention of the queries over the source, projected to the width."""
    cfg = self.config
    q = partition.shard(q, 'batch', 'length', 'act_heads', None)
    out = attention.attention(
      q,
      source.key,
      source.value,
      mask,
      scale=cfg.query_scale**-0.5,
      softcap=cfg.attention_softcap,
      backend=self.execution.attention_backend,
      chunk=self.execution.attention_chunk,
    )  # [B, T, N, H]
    out = partition.shard(out, 'batch', 'length', 'act_heads', None)
    out = checkpoint_name(out, executions.ATTENTION_OUTPUT)
    return jnp.einsum('BTNH,NHD->BTD', out, self.output.astype(out.dtype))


class SelfAttention(_Attention):
  """Attention of a sequence to itself, with rotary embedding."""

  def __call__(
    self,
    x: Float[Array, 'B L D'],
    rotation: tuple[Float[Array, 'B L 1 J'], Float[Array, 'B L 1 J']],
    mask: masks.MaskSpec,
    cached: caches.KeyValues | None,
    index: Int[Array, ''] | None,
  ) -> tuple[Float[Array, 'B L D'], caches.KeyValues | None]:
    """Attends over `x`, or over a cache after writing `x` to it.

    Args:
      x: normalised states.
      rotation: cosines and sines of the positions (`rope.angles`).
      mask: its keys are those of `x`, or with a cache the cache's entries.
      cached: entries of earlier tokens, or None.
      index: where the cache is written.

    Returns:
      The output, and the cache with `x` in it (None without one).
    """
    q = rope.rotate(self.queries(x), *rotation)
    source = project_keys_values(x, self.key, self.value)
    source = source.replace(key=rope.rotate(source.key, *rotation))
    if cached is not None:
      source = cached = caches.write(cached, source, index)
    return self.attend(q, source, mask), cached


class CrossAttention(_Attention):
  """Attention of a decoder to the encoder's output."""

  def __call__(
    self,
    x: Float[Array, 'B T D'],
    encoded: Float[Array, 'B S E'] | None,
    mask: masks.MaskSpec,
    cached: caches.KeyValues | None,
  ) -> Float[Array, 'B T D']:
    """Reads `cached` where given, `encoded` otherwise."""
    source = cached
    if source is None:
      source = project_keys_values(encoded, self.key, self.value)
    return self.attend(self.queries(x), source, mask)
