"""Mixture-of-experts feed-forward, and the collection of its router losses.

Router losses are not part of a layer's output: they are sown into a separate
collection, and computed only if the caller makes it mutable
(`base_model.BaseModel.run_stack`). Imports no attention.
"""

from collections.abc import Iterable
from typing import Any

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from encdec_adapt.models import layers, model_config
from encdec_adapt.ops import activations, experts, partition, products

COLLECTION = 'routing'


class Experts(nn.Module):
  """Mixture of gated feed-forwards, with an optional shared expert."""

  config: model_config.StackConfig
  dtype: str

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B L D'],
    routed: Float[Array, 'B L D'],
    real: Bool[Array, 'B L'],
  ) -> Float[Array, 'B L D']:
    """Computes the update of the residual stream.

    Args:
      x: normalised states.
      routed: states that the router reads.
      real: False for padding, which is routed to no expert.
    """
    cfg = self.config
    logits = self._router(routed)
    chosen, shares = experts.route(
      logits, real, cfg.experts_per_token, normalise=cfg.norm_topk
    )
    if cfg.experts_beside_mlp:
      init = nn.with_logical_partitioning(nn.initializers.ones, ('router',))
      scale = self.param('expert_scale', init, (cfg.experts,), jnp.float32)
      # Padding has an id beyond the last expert.
      shares = shares * jnp.take(scale, chosen, mode='clip')
    # Checked first: `sow` would discard the losses only after tracing them.
    if self.is_mutable_collection(COLLECTION):
      self.sow(
        COLLECTION,
        'losses',
        experts.losses(logits, real, chosen),
        # A single value, not Flax's tuple of the values of all calls.
        init_fn=lambda: None,
        reduce_fn=lambda _, new: new,
      )
    y = experts.feed_forward(
      x,
      chosen,
      shares,
      self._kernels('gate', 'embed', 'expert_mlp'),
      self._kernels('up', 'embed', 'expert_mlp'),
      self._kernels('down', 'expert_mlp', 'embed'),
      activations.ACTIVATIONS[cfg.activation],
    )
    if cfg.shared_expert_width:
      y = y + self._shared(x)
    return partition.shard(y, 'batch', 'length', 'act_embed')

  def _router(self, x: jax.Array) -> jax.Array:
    """Computes float32 router logits [B, L, X]."""
    # In bfloat16 training diverged (Switch Transformer, arXiv 2101.03961,
    # section 2.4). 'highest', as TPUs multiply float32 in bfloat16 by default.
    init = layers.kernel_init(('embed', 'router'), 0, 1)
    shape = (self.config.width, self.config.experts)
    kernel = self.param('router', init, shape, jnp.float32)
    x = x.astype(jnp.float32)
    if self.config.experts_beside_mlp:
      # transformers 5.24, `modeling_gemma4.py`, `Gemma4TextRouter`.
      gain = layers.gain_init(self.config, 'embed')
      width = self.config.width
      scale = self.param('router_scale', gain, (width,), jnp.float32)
      x = layers.norm(self.config, x, scale) * width**-0.5
    y = jnp.einsum('BLD,DX->BLX', x, kernel, precision='highest')
    return checkpoint_name(y, products.NARROW)

  def _kernels(self, name: str, *axes: str) -> jax.Array:
    """Declares the kernels [X, I, J] of all experts."""
    cfg = self.config
    sizes = {'embed': cfg.width, 'expert_mlp': cfg.expert_width}
    # A batch axis: experts do not count towards the fan-in.
    init = layers.kernel_init(('experts', *axes), 1, 2, batch_axis=0)
    shape = (cfg.experts, *(sizes[axis] for axis in axes))
    kernels = self.param(name, init, shape, jnp.float32).astype(self.dtype)
    return partition.sum_gradient_in_stages(kernels, 'experts', *axes)

  def _shared(self, x: jax.Array) -> jax.Array:
    cfg = self.config
    y = layers.MLP(cfg, self.dtype, cfg.shared_expert_width, name='shared')(x)
    if cfg.shared_expert_gate:
      init = layers.kernel_init(('embed', 'router'), 0, 1)
      kernel = self.param('shared_gate', init, (cfg.width, 1), jnp.float32)
      gate = jnp.einsum('BLD,DJ->BLJ', x, kernel.astype(self.dtype))
      y = y * jax.nn.sigmoid(checkpoint_name(gate, products.NARROW))
    return y


def mean_losses(collected: Iterable[Any]) -> experts.RouterLosses:
  """Averages the router losses over all layers with experts.

  Args:
    collected: the collections of the stacks.
  """
  losses = jax.tree.leaves(
    list(collected), is_leaf=lambda x: isinstance(x, experts.RouterLosses)
  )
  # Averages over layers, not leaves: a scanned layer has a value per repeat.
  return jax.tree.map(
    lambda *values: jnp.mean(jnp.concatenate([v.reshape(-1) for v in values])),
    *losses,
  )
