"""An encoder-decoder: two stacks, the second with cross-attention."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from encdec_adapt.models import (
  attention_layer,
  base_model,
  layers_index,
  model_config,
)
from encdec_adapt.models import cache as caches

Params = base_model.Params


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(base_model.Decoder):
  """A bidirectional encoder and a causal decoder that attends to it.

  Segments tie the two together: a decoder token sees encoder tokens of its
  own segment number.
  """

  config: model_config.EncoderDecoderConfig

  def encode(
    self,
    params: Params,
    tokens: Int[Array, 'B S'],
    segments: Int[Array, 'B S'],
    positions: Int[Array, 'B S'],
    *,
    routing: base_model.Routing = None,
    dropout: base_model.Dropout | None = None,
  ) -> Float[Array, 'B S E']:
    """Computes the encoder's states after its final norm.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment.
      routing: see `run_stack`.
      dropout: see `run_stack`.
    """
    if self.config.shared_table:
      embedder = params['decoder']['embedder']
      params = {'encoder': {**params['encoder'], 'embedder': embedder}}
    encoded, _ = self.run_stack(
      params,
      'encoder',
      tokens,
      segments,
      positions,
      routing=routing,
      dropout=dropout,
    )
    return encoded

  def prefill_cross(
    self, params: Params, encoded: Float[Array, 'B S E']
  ) -> dict[str, Any]:
    """Computes keys and values of an encoding for `caches.insert`.

    Returns:
      Keys and values by layer, [B, S, K, H]; None for layers that do not
      attend to the encoder.
    """
    stack = self.config.decoder

    def project(prefix: str, repeats: int | None) -> caches.KeyValues | None:
      """Keys and values of the layers whose leaves are at `prefix`."""
      if not stack.reads_encoder(layers_index.block_kind(stack, prefix)):
        return None
      block = layers_index.get_block(params['decoder'], prefix)
      name = 'attention' if stack.cross_merged else 'cross_attention'
      kernels = block[name]

      def fn(kernels):
        """Projects keys and values of one layer."""
        return attention_layer.project_keys_values(stack, kernels, encoded)

      return (fn if repeats is None else jax.vmap(fn))(kernels)

    return layers_index.map_blocks(stack, project)
