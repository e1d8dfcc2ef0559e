"""A stack: embedding, leading layers, scanned pattern, tail, final norm.

Models (`base_model`) import this module.
"""

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
  heads,
  layers,
  model_config,
)
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import masks, passage_segments, products, rope

Tokens = Int[Array, 'B L']


class _Group(nn.Module):
  """Consecutive layers, each rematerialised separately."""

  config: model_config.StackConfig
  compute: execution.ComputeConfig
  group: model_config.Group
  prevent_cse: bool

  @nn.compact
  def __call__(self, x, context, cached, cross_cached, inputs):
    make_block = block.Block
    # Per layer, not per group: the backward pass then holds recomputed values
    # of a single layer at a time.
    if self.compute.remat != 'none':
      make_block = nn.remat(
        block.Block,
        policy=self.compute.saveable,
        prevent_cse=self.prevent_cse,
      )
    cfg, group, updated, read = self.config, self.group, {}, {}
    for j, kind in enumerate(group.kinds):
      # Names are paths in the parameter tree (`layers_index`).
      name, number = f'layer_{j}', group.start + j
      layer = make_block(
        cfg,
        self.compute,
        kind,
        sparse=cfg.experts > 0 and number >= cfg.dense_layers,
        mlp_width=cfg.mlp_width_of(number),
        shares=group.shares,
        normed=cfg.first_norm or number > 0,
        name=name,
      )
      x, updated[name], read[kind] = layer(
        x,
        context,
        _entry(cached, name),
        _entry(cross_cached, name),
        None if inputs is None else inputs[:, :, j],
      )
    # A scan would stack what all repeats have read.
    return x, (updated, None if group.repeats else read)


class Stack(nn.Module):
  """Maps token ids to states after the final norm."""

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
    """Applies the stack.

    Args:
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment; without a cache,
        positions increase by 1 per token (`MaskSpec.aligned`).
      encoded: the encoder's output, for stacks with cross-attention.
      encoder_segments: segments of the encoder's tokens.
      cached: cache of earlier tokens and of the encoder; this call appends a
        token per row, at the row's index.
      prefix: 1 at tokens visible to their whole segment, for prefix decoders;
        None for no prefix.
      dropout: dropout rate of the embeddings and of each layer's updates; above
        0 it requires the random stream 'dropout'.
      collect: whether to return keys and values without a cache.

    Returns:
      The states after the final norm, and the cache; without a cache, keys and
      values by layer, [B, L, K, H], if `collect`.
    """
    cfg, copies = self.config, 1
    if cached is not None:
      encoder_segments = cached.encoder_segments
      copies = products.copies(len(tokens))
    examples = segments
    if cfg.passages.length:
      segments, positions = passage_segments.split(
        cfg.passages, tokens, segments
      )
    # Angles and masks depend only on the kind of a layer: computed once, before
    # the scan, which would recompute them for every repeat. Sorted, because the
    # order of a set of strings varies between processes, which must trace the
    # same program.
    kinds = sorted(set(cfg.pattern))
    is_shared = cfg.relative is not None and cfg.relative.kind == 'relative'
    context = block.Context(
      bias=layers.declare_bias(self, cfg) if is_shared else None,
      rotations={
        kind: _rotation(cfg, kind, positions, self.compute.dtype)
        for kind in kinds
      },
      masks={
        kind: _self_mask(
          cfg, kind, segments, positions, cached, encoder_segments, prefix
        )
        for kind in kinds
      },
      # Modulo for the ring buffer (`caches.slots`). Finished rows also continue
      # past their last position until the batch stops.
      slots=None
      if cached is None
      else {
        kind: cached.index % caches.slots(cfg, kind, cached.length)
        for kind in kinds
      },
      encoded=encoded,
      cross_mask=None
      if cfg.cross_width is None
      else masks.cross(examples, encoder_segments),
      real=jnp.repeat(segments > 0, copies, axis=1) if cfg.experts else None,
      dropout=dropout,
      collect=collect,
    )

    embedder = layers.Embedder(cfg, self.compute.dtype, name='embedder')
    x, inputs = embedder(tokens, positions), None
    if cfg.layer_input_width:
      make = layers.LayerInputs(cfg, self.compute.dtype, name='layer_inputs')
      inputs = make(tokens, x)  # [B, L, N, J]
    x = layers.dropout(x, dropout)
    if copies > 1:
      x = jnp.repeat(x, copies, axis=1)
    for name in cfg.head.modules:
      # Only declares the parameters, for the losses: most losses never
      # materialise the logits of all positions.
      layers.HEADS[name](cfg, name=name)()

    entries = None if cached is None else cached.layers
    cross_entries = None if cached is None else cached.cross
    updated = {}
    for group in cfg.groups:
      name = group.name
      x, (updated[name], read) = self._make(group)(
        x,
        context,
        _entry(entries, name),
        _entry(cross_entries, name),
        _inputs_of(group, inputs),
      )
      if name == 'tail':  # Sharing layers follow.
        context = context.replace(shared=read)
    if not cfg.norms_after_sum:
      x = layers.Norm(cfg, name='final_norm')(x)
    if copies > 1:
      x = x[:, :1]
    if isinstance(cfg.head, heads.Tokens) and cfg.head.scaled:
      # Scaled here, because losses multiply states by the head in several ways.
      x = x * jnp.asarray(cfg.width**-0.5, x.dtype)
    if cached is None:
      return x, updated
    cached = cached.replace(layers=updated, index=cached.index + 1)
    # The decoding loop carries the cache, so its sharding must not change in a
    # step.
    return x, caches.shard(cached)

  def _make(self, group: model_config.Group) -> nn.Module:
    cfg, compute = self.config, self.compute
    if not group.repeats:
      return _Group(cfg, compute, group, True, name=group.name)
    unroll = min(compute.scan_unroll, group.repeats)
    scanned = nn.scan(
      _Group,
      # Router losses are stacked by repeat, like parameters.
      variable_axes={'params': 0, expert_layer.COLLECTION: 0},
      # Without splits all repeats would have the same initial weights and
      # dropout masks.
      split_rngs={'params': True, 'dropout': True},
      length=group.repeats,
      in_axes=(nn.broadcast, 0, 0, 0),
      unroll=unroll,
      metadata_params={nn.PARTITION_NAME: 'layers'},
      # Blocks have no broadcast variables, and checking would trace the body
      # again.
      check_constancy_invariants=False,
    )
    # The loop separates forward and backward pass unless fully unrolled: then
    # XLA's CSE would undo the rematerialisation.
    prevent_cse = unroll == group.repeats
    return scanned(cfg, compute, group, prevent_cse, name=group.name)


def _entry(tree: dict[str, Any] | None, name: str) -> Any:
  return None if tree is None else tree[name]


def _inputs_of(group: model_config.Group, inputs: Any) -> Any:
  """Returns inputs of a group, [B, L, N, J], or of repeats, [R, B, L, N, J]."""
  if inputs is None:
    return None
  inputs = inputs[:, :, group.start : group.stop]
  if not group.repeats:
    return inputs
  shape = *inputs.shape[:2], group.repeats, len(group.kinds), inputs.shape[3]
  return jnp.moveaxis(inputs.reshape(shape), 2, 0)


def _rotation(
  config: model_config.StackConfig,
  kind: model_config.LayerKind,
  positions: jax.Array,
  dtype,
) -> tuple[jax.Array, jax.Array] | None:
  if config.positions.kind != 'rotary':
    return None
  theta, scaling = config.rope_theta, config.rope_scaling
  # Gemma 3 scales only global layers: distances in local layers stay below the
  # window, however long the text.
  if kind == 'local' and config.local_rope_theta is not None:
    theta, scaling = config.local_rope_theta, rope.Scaling()
  head_dim = config.of_kind(kind).head_dim
  return rope.angles(positions, head_dim, theta, dtype, scaling)


def _self_mask(
  config: model_config.StackConfig,
  kind: model_config.LayerKind,
  segments: jax.Array,
  positions: jax.Array,
  cached: caches.Cache | None,
  encoder_segments: jax.Array | None,
  prefix: jax.Array | None,
) -> masks.MaskSpec:
  """Returns the mask of self-attention in layers of this kind.

  In merged attention the encoder's keys follow the decoder's.
  """
  keys = None
  if cached is not None:
    # `index` is the position of this call's token, written to the cache before
    # attention reads it. A cache row is a single segment, 1, and 0 in empty
    # slots.
    count = caches.slots(config, kind, cached.length)
    slot_positions = caches.slot_positions(cached.index, count)
    keys = (slot_positions >= 0).astype(jnp.int32), slot_positions
  window, rule = config.window_of(kind)
  make = masks.causal
  if config.role == 'bidirectional':
    make = functools.partial(masks.bidirectional, window_rule=rule)
  # Without a prefix, as in a decoding step, a prefix decoder is causal: the new
  # token follows all others.
  elif config.role == 'prefix' and prefix is not None:
    make = functools.partial(masks.prefix, kv_prefix=prefix)
  spec = make(
    segments,
    positions,
    window=window,
    keys=keys,
    # Slots of a ring are not ordered by position.
    aligned=cached is None,
  )
  if config.cross_merged and config.reads_encoder(kind):
    spec = masks.with_memory(spec, encoder_segments)
  return spec
