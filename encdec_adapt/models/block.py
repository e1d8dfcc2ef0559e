"""A transformer layer: attention, feed-forward and the residual stream."""

from collections.abc import Mapping
import types
from typing import Any

from flax import linen as nn
import flax.struct
from jaxtyping import Array, Float

from encdec_adapt.models import (
  attention_layer,
  execution,
  expert_layer,
  layers,
  model_config,
)
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import partition

# Parts of a block for cross-attention -> parts of self-attention, from which
# adaptation initialises them.
CROSS: Mapping[str, str] = types.MappingProxyType(
  {
    'pre_cross_norm': 'pre_attention_norm',
    'cross_attention': 'attention',
    'post_cross_norm': 'post_attention_norm',
  }
)


@flax.struct.dataclass
class Context:
  """Inputs shared by all layers of a stack.

  Attributes:
    rotations: cosines and sines of the positions (`rope.angles`) by kind of
      layer; None in stacks with other positions.
    masks: MaskSpec of self-attention by kind of layer; in merged attention
      the last keys are the encoder's.
    bias: relative position bias shared by all layers, or None.
    slots: cache slot for the token of each row, int32 [B], by kind of layer;
      None without a cache.
    encoded: the encoder's output [B, S, E]; None without cross-attention, and
      if its keys and values are cached.
    cross_mask: MaskSpec of cross-attention, or None.
    real: False for padding, bool [B, L]; None in stacks without experts.
    dropout: dropout rate in [0, 1); requires the random stream 'dropout'.
    shared: kind of layer -> keys and values that sharing layers read in
      self-attention, and in cross-attention or None; None without such layers.
    collect: whether layers return keys and values without a cache.
  """

  # A pytree, since scan and rematerialisation pass it as an argument; fields
  # that change the program are static.
  rotations: dict[str, Any]
  masks: dict[str, Any]
  bias: Any = None
  slots: Any = None
  encoded: Any = None
  cross_mask: Any = None
  real: Any = None
  shared: Any = None
  dropout: float = flax.struct.field(pytree_node=False, default=0.0)
  collect: bool = flax.struct.field(pytree_node=False, default=False)


class Block(nn.Module):
  """Self-attention, optional cross-attention, and feed-forward.

  Each adds post_norm(f(pre_norm(x))) to the residual stream, or f(pre_norm(x))
  in stacks without post-norms; with norms after the sum, the stream becomes
  post_norm(x + f(x)). Dropout applies to these updates, as in T5Gemma
  (transformers, modeling_t5gemma.py). A layer scalar multiplies the sum
  (Gemma 4).

  Attributes:
    config: the stack's shape.
    compute: execution choices.
    kind: kind of the layer.
    sparse: whether its feed-forward has experts.
    mlp_width: width of its feed-forward that every token takes.
    shares: whether it reads the keys and values in `Context.shared`.
    normed: whether it has a norm before attention.
  """

  config: model_config.StackConfig
  compute: execution.ComputeConfig
  kind: model_config.LayerKind
  sparse: bool = False
  mlp_width: int = 0
  shares: bool = False
  normed: bool = True

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    context: Context,
    cached: caches.KeyValues | None,
    cross_cached: caches.KeyValues | None,
    inputs: Float[Array, 'B #L J'] | None = None,
  ) -> tuple[Float[Array, 'B L D'], caches.KeyValues | None, Any]:
    cfg, compute = self.config.of_kind(self.kind), self.compute

    def norm(name: str, x):
      return layers.Norm(cfg, name=name)(x)

    def pre_norm(name: str, x):
      return x if cfg.norms_after_sum else norm(name, x)

    def add(x, update, post_norm):
      if cfg.post_norms:
        update = norm(post_norm, update)
      # After the post-norm, which would cancel the factor 1 / (1 - rate).
      x = x + layers.dropout(update, context.dropout)
      x = norm(post_norm, x) if cfg.norms_after_sum else x
      return partition.shard(x, 'batch', 'length', 'act_embed')

    reads_encoder = cfg.reads_encoder(self.kind)
    memory = context.encoded if reads_encoder and cfg.cross_merged else None
    shared, cross_shared = (
      context.shared[self.kind]
      if self.shares
      else (
        None,
        None,
      )
    )
    attend = attention_layer.SelfAttention(
      cfg, compute, cfg.width, self.shares, name='attention'
    )
    y, entries, read = attend(
      pre_norm('pre_attention_norm', x) if self.normed else x,
      context.rotations[self.kind],
      context.masks[self.kind],
      cached,
      None if context.slots is None else context.slots[self.kind],
      memory,
      context.bias,
      shared,
    )
    cross_read = None
    x = add(x, y, 'post_attention_norm')

    if reads_encoder and not cfg.cross_merged:
      cross = attention_layer.CrossAttention(
        cfg, compute, cfg.cross_width, self.shares, name='cross_attention'
      )
      y, cross_read = cross(
        pre_norm('pre_cross_norm', x),
        context.encoded,
        context.cross_mask,
        cross_cached,
        cross_shared,
      )
      x = add(x, y, 'post_cross_norm')

    y = pre_norm('pre_mlp_norm', x)
    is_beside = self.sparse and cfg.experts_beside_mlp
    if self.sparse:
      experts = expert_layer.Experts(cfg, compute.dtype, name='experts')
    if not self.sparse or is_beside:
      width = self.mlp_width or cfg.mlp_width
      dense = layers.MLP(cfg, compute.dtype, width, name='mlp')(y)
    if is_beside:
      y = experts(norm('pre_experts_norm', x), x, context.real)
      y = norm('post_dense_norm', dense) + norm('post_experts_norm', y)
    else:
      y = experts(y, y, context.real) if self.sparse else dense
    # In training, drops the entries: scan would stack them, [R, B, L, K, H].
    keep = context.collect or cached is not None
    x = add(x, y, 'post_mlp_norm')
    if inputs is not None:
      y = layers.LayerInput(cfg, name='layer_input')(x, inputs)
      x = add(x, y, 'post_layer_input_norm')
    if cfg.layer_scalar:
      x = layers.LayerScalar(name='layer_scalar')(x)
    entries = entries if keep else None
    # For layers that share them.
    is_read = cfg.sharing_layers > 0 and not self.shares
    return x, entries, (read, cross_read) if is_read else None
