"""An encoder-decoder: two stacks, the second with cross-attention.

Imports `base_model`, but no modules for building, training or serving.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import (
  attention_layer,
  base_model,
  embedding_head,
  layers_index,
  model_config,
)
from encdec_adapt.models import kv_cache as caches

Params = base_model.Params


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(base_model.BaseModel):
  """A bidirectional encoder and a causal decoder with cross-attention.

  Segments connect them: a decoder token sees the encoder tokens with the same
  segment number.
  """

  config: model_config.EncoderDecoderConfig

  def encode(
    self,
    params: Params,
    tokens: Int[Array, 'B S'],
    segments: Int[Array, 'B S'],
    positions: Int[Array, 'B S'],
    **options: Any,
  ) -> Float[Array, 'B S E']:
    """Computes the encoder's states after its final norm.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment.
      **options: `routing` and `dropout` of `run_stack`.
    """
    # Shared tables are stored and trained in the decoder only.
    encoder, decoder = params['encoder'], params['decoder']
    for part in self.config.shared_parts:
      module, leaf = part.split('/')
      shared = {leaf: decoder[module][leaf]}
      encoder = {**encoder, module: {**encoder.get(module, {}), **shared}}
    params = {'encoder': encoder}
    return self.run_stack(
      params, 'encoder', tokens, segments, positions, **options
    )[0]

  def rotate(
    self,
    tokens: Int[Array, 'B L'],
    segments: Int[Array, 'B L'],
    positions: Int[Array, 'B L'],
  ) -> Int[Array, 'B L']:
    """Returns each text shifted right by one, its last token first."""
    last = embedding_head.pool_in_place(tokens[..., None], segments, 'last')
    return jnp.where(positions == 0, last[..., 0], jnp.roll(tokens, 1, axis=1))

  def prefill_cross(
    self, params: Params, encoded: Float[Array, 'B S E']
  ) -> dict[str, Any]:
    """Computes keys and values of an encoding, for `kv_cache.insert`.

    Returns:
      Keys and values by layer, [B, S, K, H]; None for layers without
      attention to the encoder.
    """
    stack = self.config.decoder

    def project(prefix: str, repeats: int | None) -> caches.KeyValues | None:
      kind = layers_index.block_kind(stack, prefix)
      if not stack.reads_encoder(kind) or layers_index.shares(prefix):
        return None
      # Merged attention projects both stacks' states with the same kernels.
      name = 'attention' if stack.cross_merged else 'cross_attention'
      weights = layers_index.get_block(params['decoder'], prefix)[name]
      fn = functools.partial(
        attention_layer.project_keys_values,
        stack.of_kind(kind),
        source=encoded,
      )
      return (fn if repeats is None else jax.vmap(fn))(weights)

    return layers_index.map_blocks(stack, project)
