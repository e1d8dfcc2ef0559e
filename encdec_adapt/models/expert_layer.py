"""The feed-forward of a layer with experts, and where its losses are kept.

A router's losses are no part of a layer's output: they are sown into a
collection of their own, which exists where somebody collects it
(`decoder_only.Decoder.run_stack`) and costs nothing elsewhere.
"""

from collections.abc import Iterable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from encdec_adapt.models import layers, model_config
from encdec_adapt.ops import activations, experts, partition

COLLECTION = 'routing'


class Experts(nn.Module):
  """Gated feed-forwards, of which each token takes some.

  And beside them, where the stack has one, a shared one that all tokens take.
  """

  config: model_config.StackConfig
  dtype: jnp.dtype

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B L D'], real: Bool[Array, 'B L']
  ) -> Float[Array, 'B L D']:
    """What the experts add to the residual stream.

    Args:
      x: normalised states.
      real: tokens that are not padding; padding takes no expert.
    """
    cfg = self.config
    logits = self._router(x)
    chosen, shares = experts.route(
      logits, real, cfg.experts_per_token, normalise=cfg.norm_topk
    )
    if self.is_mutable_collection(COLLECTION):
      self.sow(
        COLLECTION,
        'losses',
        experts.losses(logits, real, chosen),
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
    """Logits [B, L, X], in float32 whatever the dtype of the products.

    As Switch Transformer (arXiv 2101.03961, section 2.4) has it.
    """
    init = layers.kernel_init(('embed', 'router'), 0, 1)
    shape = (self.config.width, self.config.experts)
    kernel = self.param('router', init, shape, jnp.float32)
    x = x.astype(jnp.float32)
    return jnp.einsum('BLD,DX->BLX', x, kernel, precision='highest')

  def _kernels(self, name: str, *axes: str) -> jax.Array:
    """Kernels [X, I, J] of all experts."""
    cfg = self.config
    sizes = {'embed': cfg.width, 'expert_mlp': cfg.expert_width}
    init = layers.kernel_init(('experts', *axes), 1, 2, batch_axis=0)
    shape = (cfg.experts, *(sizes[axis] for axis in axes))
    kernels = self.param(name, init, shape, jnp.float32).astype(self.dtype)
    return partition.summed_in_stages(kernels, 'experts', *axes)

  def _shared(self, x: jax.Array) -> jax.Array:
    cfg = self.config
    mlp = layers.MLP(cfg, self.dtype, cfg.shared_expert_width, name='shared')
    y = mlp(x)
    if cfg.shared_expert_gate:
      init = layers.kernel_init(('embed', 'router'), 0, 1)
      kernel = self.param('shared_gate', init, (cfg.width, 1), jnp.float32)
      gate = jnp.einsum('BLD,DJ->BLJ', x, kernel.astype(self.dtype))
      y = y * jax.nn.sigmoid(gate)
    return y


def mean_losses(collected: Iterable[Any]) -> experts.RouterLosses:
  """Mean over all layers with experts.

  Args:
    collected: the collections of one or more stacks.
  """
  found = jax.tree.leaves(
    list(collected), is_leaf=lambda x: isinstance(x, experts.RouterLosses)
  )
  # A scanned layer has one value for each repeat.
  return jax.tree.map(
    lambda *values: jnp.mean(jnp.concatenate([v.reshape(-1) for v in values])),
    *found,
  )
