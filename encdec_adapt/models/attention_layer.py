"""Attention modules: projections around `ops.attention`.

Grouped-query attention with scores scaled by query_scale^-1/2 and soft-capped.
Self-attention rotates queries and keys, or adds a relative position bias to the
scores. Cross-attention has no position signal and no window. It reads the
normalised encoder output of the encoder's width, and has the decoder's heads,
scale and cap. In merged attention (T5Gemma 2) the decoder's self-attention
reads the encoder output too.

Blocks and stacks import this module, which imports neither.
"""

from collections.abc import Mapping
import itertools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import execution, layers, model_config
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import attention, masks, partition, relative_bias, rope

# Logical axes of the kernels.
_AXES = {
  'query': ('embed', 'heads', 'head_dim'),
  'key': ('embed', 'kv_heads', 'head_dim'),
  'value': ('embed', 'kv_heads', 'head_dim'),
  'output': ('heads', 'head_dim', 'embed'),
}

# Names of merged kernels (`layers.merge`).
_MERGED, _KEYS_VALUES = 'query_key_value', 'key_value'


def project_keys_values(
  config: model_config.StackConfig,
  params: Mapping[str, Any],
  source: Float[Array, 'B S E'],
) -> caches.KeyValues:
  """Projects keys and values [B, S, K, H], before rotation.

  Args:
    config: stack of the attending layer, with its heads (`of_kind`).
    params: parameters of its attention. Uses only the parameters of keys and
      values: 'key' [E, K, H], 'key_bias' [K, H], 'key_norm' [H], ..
    source: normalised states.
  """
  if _MERGED in params:
    # Drops the queries' kernels, to skip their product.
    params = {**params, _KEYS_VALUES: params[_MERGED][:, :, -2:]}
  projected = _project(params, source, *_names(config, _KEYS_VALUES))
  return _keys_values(config, params, *projected)


def _names(config: model_config.StackConfig, group: str) -> list[str]:
  """Returns the kernels of a group; values may have none."""
  names = group.split('_')
  return names[:-1] if config.values_are_keys else names


def _keys_values(
  config: model_config.StackConfig,
  params: Mapping[str, Any],
  key: Float[Array, 'B S K H'],
  value: Float[Array, 'B S K H'] | None = None,
) -> caches.KeyValues:
  """Returns normalised keys and values; None for values that are keys."""
  value = key if value is None else value
  key = _norm(config, params, 'key_norm', key)
  value = layers.norm(config, value, None) if config.value_norm else value
  # The single token of a decoding step cannot be sharded.
  length = 'kv_length' if key.shape[1] > 1 else None
  key, value = (
    partition.shard(x, 'batch', length, 'kv_heads', None) for x in (key, value)
  )
  return caches.KeyValues(key=key, value=value)


def _project(params, x: jax.Array, *names: str) -> list[jax.Array]:
  return layers.project_all(x, params, {name: _AXES[name] for name in names})


def _norm(config, params, name: str, x: jax.Array) -> jax.Array:
  # Before the rotation, as in transformers: gains differ by dimension, so the
  # order matters.
  return layers.norm(config, x, params[name]) if config.qk_norm else x


class _Attention(nn.Module):
  """Base of self- and cross-attention: parameters and shared steps.

  Attributes:
    config: the stack's shape, with the heads of this layer (`of_kind`).
    compute: execution choices.
    source_width: width of the source states of keys and values.
    shares: whether keys and values are those of another layer.
  """

  config: model_config.StackConfig
  compute: execution.ComputeConfig
  source_width: int
  shares: bool = False

  def setup(self):
    # A dict like the layer's parameters: `project_keys_values` accepts both, to
    # project a prompt's encoding without a module.
    self.weights = layers.parameters(self, self._declare)

  def _declare(self) -> dict[str, Any]:
    cfg = self.config
    of_source = (self.source_width, cfg.kv_heads, cfg.head_dim)
    # Products contract a kernel's first dimensions; its bias has the others.
    # Heads and head_dim stay separate, so that heads can be sharded.
    kernels = {
      'query': (1, (cfg.width, cfg.heads, cfg.head_dim)),
      'key': (1, of_source),
      'value': (1, of_source),
      'output': (2, (cfg.heads, cfg.head_dim, cfg.width)),
    }
    if cfg.values_are_keys or self.shares:
      del kernels['value']
    if self.shares:
      del kernels['key']
    biased = {'none': (), 'qkv': ('query', 'key', 'value'), 'qkvo': kernels}
    weights = {}
    for name, (contracted, shape) in kernels.items():
      axes, dims = _AXES[name], (0, 1, 2)
      # T5 scales the queries' initialisation, not the scores, by 1/sqrt(H).
      scale = 1 / cfg.head_dim if cfg.relative and name == 'query' else 1.0
      init = layers.kernel_init(
        axes, dims[:contracted], dims[contracted:], scale=scale
      )
      weights[name] = self.param(name, init, shape, jnp.float32)
      if name in biased[cfg.attention_bias]:
        init = layers.bias_init(*axes[contracted:])
        weights[f'{name}_bias'] = self.param(
          f'{name}_bias', init, shape[contracted:]
        )
    if cfg.qk_norm:
      for name in ('query_norm', 'key_norm')[: 2 - self.shares]:
        init = layers.gain_init(cfg, 'head_dim')
        weights[name] = self.param(name, init, (cfg.head_dim,))
    return weights

  def attend(
    self,
    q: Float[Array, 'B T N H'],
    source: caches.KeyValues,
    mask: masks.MaskSpec,
    *,
    cached: bool,
    bias: relative_bias.RelativeBias | None = None,
  ) -> Float[Array, 'B T D']:
    """Attends over the source and projects the result to the model width.

    Args:
      q: queries; with a cache, copies of one token's query, computed once.
      source: keys and values.
      mask: mask of the queries over the source.
      cached: whether the source comes from a cache.
      bias: relative position bias of the scores; None for none.
    """
    cfg, compute = self.config, self.compute
    # By heads, not head_dim: scores then need no sum over devices.
    q = partition.shard(q, 'batch', 'length', 'act_heads', None)
    out = attention.attention(
      q[:, :1] if cached else q,
      source.key,
      source.value,
      mask,
      scale=cfg.query_scale**-0.5,
      softcap=cfg.attention_softcap,
      bias=bias,
      backend=compute.cached_attention
      if cached
      else attention.for_heads(compute.attention, cfg.head_dim),
      chunk=compute.attention_chunk,
    )
    out = jnp.broadcast_to(out, q.shape)  # [B, T, N, H]
    out = partition.shard(out, 'batch', 'length', 'act_heads', None)
    return _project(self.weights, out, 'output')[0]


class SelfAttention(_Attention):
  """Self-attention with positions."""

  def setup(self):
    """Also declares the bias of the layer, if it has its own."""
    super().setup()
    positions = self.config.relative
    if positions and positions.kind == 'relative_each':
      self.bias = layers.declare_bias(self, self.config)

  def __call__(
    self,
    x: Float[Array, 'B L D'],
    rotation: tuple[Float[Array, 'B #L 1 J'], Float[Array, 'B #L 1 J']] | None,
    mask: masks.MaskSpec,
    cached: caches.KeyValues | None,
    slot: Int[Array, 'B'] | None,
    memory: Float[Array, 'B S D'] | None = None,
    bias: relative_bias.RelativeBias | None = None,
    shared: caches.KeyValues | None = None,
  ) -> tuple[Float[Array, 'B L D'], caches.KeyValues | None, caches.KeyValues]:
    """Attends over `x`, or over a cache after writing `x` to it.

    Args:
      x: normalised states; with a cache, copies of one token's states.
      rotation: cosines and sines of the positions (`rope.angles`); None in
        stacks with other positions.
      mask: mask over the keys of `x`, or over the cache's entries.
      cached: entries of earlier tokens, or None.
      slot: cache slot for the token of each row.
      memory: the encoder's output in merged attention without a cache; its
        unrotated keys follow the others in `mask`.
      bias: relative position bias of the stack, or None.
      shared: keys and values of another layer, in place of those of `x`.

    Returns:
      The output; keys and values: the updated cache, or [B, L, K, H] of `x`
      without a cache; and all that were read, for `shared`.
    """
    if shared is not None:
      (q,) = _project(self.weights, x, 'query')
      q = _norm(self.config, self.weights, 'query_norm', q)
      q, is_cached = rope.rotate(q, *rotation), slot is not None
      return self.attend(q, shared, mask, cached=is_cached), None, shared
    groups = [['query'], _names(self.config, _KEYS_VALUES)]
    if _MERGED in self.weights:
      groups = [_MERGED.split('_')]
    projected = [_project(self.weights, x, *names) for names in groups]
    q, *entries = itertools.chain(*projected)
    q = _norm(self.config, self.weights, 'query_norm', q)
    if cached is not None:
      entries = [y[:, :1] for y in entries]
    entries = _keys_values(self.config, self.weights, *entries)
    if rotation is not None:
      q = rope.rotate(q, *rotation)
      entries = entries.replace(key=rope.rotate(entries.key, *rotation))
    elif bias is None and self.config.relative:
      bias = self.bias
    source = entries
    # Writes the cache before reading it: the mask includes the token's own key.
    # Cached keys are already rotated by their absolute positions.
    if cached is not None:
      entries = caches.write(cached, entries, slot)
      source = caches.transposed(entries)
    elif memory is not None:
      added = project_keys_values(self.config, self.weights, memory)
      source = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1), entries, added
      )
    is_cached = cached is not None
    out = self.attend(q, source, mask, cached=is_cached, bias=bias)
    return out, entries, source


class CrossAttention(_Attention):
  """Cross-attention of a decoder to the encoder's output."""

  def __call__(
    self,
    x: Float[Array, 'B T D'],
    encoded: Float[Array, 'B S E'] | None,
    mask: masks.MaskSpec,
    cached: caches.KeyValues | None,
    shared: caches.KeyValues | None = None,
  ) -> tuple[Float[Array, 'B T D'], caches.KeyValues]:
    """Attends to `shared` or `cached` if given, else to `encoded`.

    Returns:
      The output, and the keys and values that were read.
    """
    # Neither queries nor keys are rotated, as in T5Gemma.
    if shared is not None:
      source = shared
    elif cached is not None:
      source = caches.transposed(cached)
    else:
      source = project_keys_values(self.config, self.weights, encoded)
    (q,) = _project(self.weights, x, 'query')
    q = _norm(self.config, self.weights, 'query_norm', q)
    is_cached = encoded is None
    return self.attend(q, source, mask, cached=is_cached), source
