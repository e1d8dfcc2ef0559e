"""A stack: embedding, leading layers, the scanned pattern, a tail, a norm."""

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import (
  block,
  execution,
  expert_layer,
  layers,
  model_config,
)
from encdec_adapt.models import cache as caches
from encdec_adapt.ops import masks, rope

Tokens = Int[Array, 'B L']


class _Group(nn.Module):
  """Consecutive layers of these kinds, each rematerialised separately."""

  config: model_config.StackConfig
  compute: execution.ComputeConfig
  kinds: tuple[model_config.LayerKind, ...]
  sparse: bool
  prevent_cse: bool

  @nn.compact
  def __call__(self, x, context, cached, cross_cached):
    make_block = block.Block
    if self.compute.remat != 'none':
      policy = execution.REMAT_POLICIES[self.compute.remat]
      make_block = nn.remat(
        block.Block, policy=policy, prevent_cse=self.prevent_cse
      )
    updated = {}
    for j, kind in enumerate(self.kinds):
      name = f'layer_{j}'
      layer = make_block(
        self.config, self.compute, kind, self.sparse, name=name
      )
      x, updated[name] = layer(
        x, context, _entry(cached, name), _entry(cross_cached, name)
      )
    return x, updated


class Stack(nn.Module):
  """Token ids to states after the final norm."""

  config: model_config.StackConfig
  compute: execution.ComputeConfig

  @nn.compact
  def __call__(
    self,
    tokens: Tokens,
    segments: Tokens,
    positions: Tokens,
    encoded: Float[Array, 'B S E'] | None = None,
    encoder_segments: Int[Array, 'B S'] | None = None,
    cached: caches.Cache | None = None,
    prefix: Tokens | None = None,
    dropout: float = 0.0,
    collect: bool = False,
  ) -> tuple[Float[Array, 'B L D'], Any]:
    """Runs the stack.

    Args:
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment; without a cache
        they rise by one from token to token (`MaskSpec.aligned`).
      encoded: for a stack with cross-attention, the encoder's output.
      encoder_segments: segments of the encoder's tokens.
      cached: cache of earlier tokens and of the encoder's, to which this
        call's, one per row at the row's index, are added.
      prefix: for a prefix decoder, 1 at tokens that all of their segment see;
        None where there are none.
      dropout: rate of dropout of the embeddings and of what each layer adds;
        above 0 it needs the random stream 'dropout'.
      collect: whether to return keys and values without a cache.

    Returns:
      The states after the final norm, and the cache; without one, keys and
      values by layer, [B, L, K, H], if they are collected.
    """
    cfg = self.config
    if cached is not None:
      encoder_segments = cached.encoder_segments
    context = block.Context(
      rotations={
        kind: _rotation(cfg, kind, positions, self.compute.dtype)
        for kind in sorted(set(cfg.pattern))
      },
      masks=_self_masks(
        cfg, segments, positions, cached, encoder_segments, prefix
      ),
      slots=None if cached is None else _slots(cfg, cached),
      encoded=encoded,
      cross_mask=None
      if cfg.cross_width is None
      else masks.cross(segments, encoder_segments),
      real=segments > 0 if cfg.experts else None,
      dropout=dropout,
      collect=collect,
    )

    embedder = layers.Embedder(cfg, self.compute.dtype, name='embedder')
    x = layers.dropout(embedder(tokens), dropout)
    if cfg.has_head:
      layers.Head(cfg, name='head')()

    entries = None if cached is None else cached.layers
    cross_entries = None if cached is None else cached.cross
    updated = {}
    for name, group in self._groups().items():
      x, updated[name] = group(
        x, context, _entry(entries, name), _entry(cross_entries, name)
      )
    x = layers.RMSNorm(cfg, name='final_norm')(x)
    if cached is None:
      return x, updated
    cached = cached.replace(layers=updated, index=cached.index + 1)
    return x, caches.shard(cached)

  def _groups(self) -> dict[str, nn.Module]:
    """Returns modules of leading layers, scanned pattern and tail, if any."""
    cfg, compute = self.config, self.compute
    sparse = cfg.experts > 0
    groups = {}
    if cfg.lead:
      groups['lead'] = _Group(cfg, compute, cfg.lead, False, True, name='lead')
    if cfg.repeats:
      unroll = min(compute.scan_unroll, cfg.repeats)
      scanned = nn.scan(
        _Group,
        variable_axes={'params': 0, expert_layer.COLLECTION: 0},
        split_rngs={'params': True, 'dropout': True},
        length=cfg.repeats,
        in_axes=(nn.broadcast, 0, 0),
        unroll=unroll,
        metadata_params={nn.PARTITION_NAME: 'layers'},
        check_constancy_invariants=False,
      )
      # The loop keeps forward and backward pass apart, unless all of it is
      # unrolled: then XLA would merge what remat asks it to compute twice.
      groups['blocks'] = scanned(
        cfg,
        compute,
        cfg.cycle,
        sparse,
        unroll == cfg.repeats,
        name='blocks',
      )
    if cfg.tail:
      groups['tail'] = _Group(cfg, compute, cfg.tail, sparse, True, name='tail')
    return groups


def _entry(tree: dict[str, Any] | None, name: str) -> Any:
  return None if tree is None else tree[name]


def _slots(
  config: model_config.StackConfig, cached: caches.Cache
) -> dict[str, jax.Array]:
  """Returns where each kind of layer keeps the next token of each row, [B]."""
  return {
    kind: cached.index % caches.slots(config, kind, cached.length)
    for kind in sorted(set(config.pattern))
  }


def _rotation(
  config: model_config.StackConfig,
  kind: model_config.LayerKind,
  positions: jax.Array,
  dtype,
) -> tuple[jax.Array, jax.Array]:
  """Returns cosines and sines of the positions for layers of this kind."""
  theta, scaling = config.rope_theta, rope.Scaling.parse(config.rope_scaling)
  if kind == 'local' and config.local_rope_theta is not None:
    theta, scaling = config.local_rope_theta, rope.Scaling()
  return rope.angles(positions, config.head_dim, theta, dtype, scaling)


def _self_masks(
  config: model_config.StackConfig,
  segments: jax.Array,
  positions: jax.Array,
  cached: caches.Cache | None,
  encoder_segments: jax.Array | None,
  prefix: jax.Array | None,
) -> dict[str, masks.MaskSpec]:
  """Mask of self-attention for each kind of layer in the pattern."""
  make = masks.causal
  if config.role == 'bidirectional':
    make = functools.partial(
      masks.bidirectional, window_rule=config.window_rule
    )
  elif config.role == 'prefix' and prefix is not None:
    make = functools.partial(masks.prefix, kv_prefix=prefix)

  def make_kind(kind: model_config.LayerKind) -> masks.MaskSpec:
    """Makes a kind's mask; in merged attention the encoder's keys follow."""
    entries = None
    if cached is not None:
      count = caches.slots(config, kind, cached.length)
      found = caches.slot_positions(cached.index, count)
      entries = (found >= 0).astype(jnp.int32), found
    spec = make(
      segments,
      positions,
      window=config.window if kind == 'local' else None,
      keys=entries,
      aligned=cached is None,
    )
    if config.cross_merged and config.reads_encoder(kind):
      spec = masks.with_memory(spec, encoder_segments)
    return spec

  return {kind: make_kind(kind) for kind in sorted(set(config.pattern))}
