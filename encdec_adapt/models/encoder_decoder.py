"""An encoder-decoder: two stacks, the second with cross-attention."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from encdec_adapt.models import attention, decoder_only, layers_index
from encdec_adapt.models import cache as caches
from encdec_adapt.models.config import EncoderDecoderConfig

Params = decoder_only.Params


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(decoder_only.Decoder):
  """A bidirectional encoder and a causal decoder that attends to it.

  Segments tie the two together: a decoder token sees encoder tokens of its
  own segment number.
  """

  config: EncoderDecoderConfig

  def encode(
    self,
    params: Params,
    tokens: Int[Array, 'B S'],
    segments: Int[Array, 'B S'],
    positions: Int[Array, 'B S'],
  ) -> Float[Array, 'B S E']:
    """The encoder's states after its final norm, as `decode` reads them.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment.
    """
    encoded, _ = self.run_stack(params, 'encoder', tokens, segments, positions)
    return encoded

  def decode(
    self,
    params: Params,
    tokens: Int[Array, 'B T'],
    segments: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    encoded: Float[Array, 'B S E'],
    encoder_segments: Int[Array, 'B S'],
  ) -> Float[Array, 'B T D']:
    """The decoder's states after its final norm."""
    hidden, _ = self.run_stack(
      params,
      'decoder',
      tokens,
      segments,
      positions,
      encoded,
      encoder_segments,
    )
    return hidden

  def prefill_cross(
    self,
    params: Params,
    encoded: Float[Array, 'B S E'],
    encoder_segments: Int[Array, 'B S'],
  ) -> caches.CrossCache:
    """Keys and values of every layer's cross-attention, for `decode_step`."""

    def project(prefix: str, repeats: int | None) -> caches.KeyValues:
      """Keys and values of the layers whose leaves are at `prefix`."""
      block = layers_index.get_block(params['decoder'], prefix)
      kernels = block['cross_attention']
      fn = attention.project_keys_values
      if repeats is not None:
        fn = jax.vmap(fn, in_axes=(None, 0, 0))
      return fn(encoded, kernels['key'], kernels['value'])

    return caches.CrossCache(
      layers=layers_index.map_blocks(self.config.decoder, project),
      segments=encoder_segments,
    )

  def decode_step(
    self,
    params: Params,
    tokens: Int[Array, 'B T'],
    *,
    segments: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    cache: caches.Cache,
    cross: caches.CrossCache,
  ) -> tuple[Float[Array, 'B T D'], caches.Cache]:
    """Continues rows by the next tokens, one or many.

    The caller sees to it that no more tokens are written than the cache has
    entries; which of them are visible is decided by segments and positions.

    Returns:
      States of the new tokens, and the cache with them added.
    """
    return self.run_stack(
      params,
      'decoder',
      tokens,
      segments,
      positions,
      cached=cache,
      cross_cached=cross,
    )
