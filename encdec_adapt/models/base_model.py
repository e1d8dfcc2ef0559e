"""A causal decoder: one stack and its head."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import cache as caches
from encdec_adapt.models import (
  execution,
  expert_layer,
  layers,
  model_config,
  parameters,
  stack,
)

Params = Mapping[str, Any]
Tokens = Int[Array, 'B L']
Routing = list[Any] | None


class Dropout(NamedTuple):
  """Dropout of a forward pass in training.

  Attributes:
    rate: share of the values that is zeroed, in (0, 1).
    key: random key of all masks of the pass.
  """

  rate: float
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Base of every model with a decoder; hashable, holds no arrays.

  Attributes:
    config: shape of the model.
    compute: how the model is computed.
  """

  config: model_config.ModelConfig
  compute: execution.ComputeConfig

  @property
  def architecture(self) -> architectures.Architecture:
    """The kind of the model."""
    return self.config.architecture

  @property
  def table(self) -> Mapping[str, parameters.ParamInfo]:
    """Path of every parameter to its shape, dtype and logical axes."""
    return parameters.parameter_table(self.config)

  def init(self, rng: jax.Array) -> dict[str, Any]:
    """Initialises float32 parameters; jit with `out_shardings` to shard."""
    return parameters.init(self.config, rng)

  def head(self, params: Params) -> Float[Array, 'V D']:
    """Returns the output table, padding rows included."""
    own = self.config.decoder.has_head
    return params['decoder']['head' if own else 'embedder']['table']

  def logits(
    self, params: Params, hidden: Float[Array, 'B T D']
  ) -> Float[Array, 'B T vocab']:
    """Computes soft-capped float32 logits of the decoder's states.

    For small uses and generation; training has `ops.vocabulary_loss`.
    """
    cfg = self.config.decoder
    return layers.logits(
      self.head(params), hidden, cfg.outputs, cfg.final_softcap
    )

  def init_cache(
    self, batch: int, length: int, source: int = 0
  ) -> caches.Cache:
    """Makes an empty cache for `decode_step`; see `caches.empty`."""
    return caches.empty(
      self.config.decoder, batch, length, source, self.compute.dtype
    )

  def run_stack(
    self,
    params: Params,
    name: str,
    *args: Any,
    routing: Routing = None,
    dropout: Dropout | None = None,
    **kwargs: Any,
  ):
    """Applies the stack of that name (see `stack.Stack.__call__`).

    Args:
      params: the model's parameters.
      name: name of the stack.
      *args: positional arguments of the stack.
      routing: list to which the router losses of its layers are appended, for
        `expert_layer.mean_losses`; None to skip them.
      dropout: rate and key of dropout; None for none.
      **kwargs: keyword arguments of the stack.
    """
    shape = self.config.stacks[name]
    apply = stack.Stack(shape, self.compute).apply
    variables = {'params': params[name]}
    if dropout is not None:
      # Modules draw by their path, which the stacks of a pair share.
      number = list(self.config.stacks).index(name)
      key = jax.random.fold_in(dropout.key, number)
      kwargs |= {'dropout': dropout.rate, 'rngs': {'dropout': key}}
    if routing is None or not shape.experts:
      return apply(variables, *args, **kwargs)
    collection = expert_layer.COLLECTION
    result, aside = apply(variables, *args, mutable=[collection], **kwargs)
    routing.append(aside[collection])
    return result

  def decode(
    self,
    params: Params,
    tokens: Tokens,
    segments: Tokens,
    positions: Tokens,
    encoded: Float[Array, 'B S E'] | None = None,
    encoder_segments: Int[Array, 'B S'] | None = None,
    *,
    prefix: Tokens | None = None,
    routing: Routing = None,
    dropout: Dropout | None = None,
  ) -> Float[Array, 'B L D']:
    """Computes the decoder's states after its final norm.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment.
      encoded: output of the encoder of an encoder-decoder.
      encoder_segments: segments of the encoder's tokens.
      prefix: 1 at the inputs of each segment, for a prefix decoder.
      routing: see `run_stack`.
      dropout: see `run_stack`.
    """
    hidden, _ = self.run_stack(
      params,
      'decoder',
      tokens,
      segments,
      positions,
      encoded,
      encoder_segments,
      prefix=prefix,
      routing=routing,
      dropout=dropout,
    )
    return hidden

  def prefill(
    self,
    params: Params,
    tokens: Tokens,
    segments: Tokens,
    positions: Tokens,
  ) -> Any:
    """Reads prompts, which a prefix decoder reads from both sides.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: 1 at tokens, 0 at padding.
      positions: position of each token.

    Returns:
      Keys and values by layer, [B, L, K, H], for `caches.insert`.
    """
    _, entries = self.run_stack(
      params,
      'decoder',
      tokens,
      segments,
      positions,
      prefix=segments,
      collect=True,
    )
    return entries

  def decode_step(
    self, params: Params, tokens: Int[Array, 'B'], cache: caches.Cache
  ) -> tuple[Float[Array, 'B D'], caches.Cache]:
    """Reads the next token of each row.

    Args:
      params: the model's parameters.
      tokens: token ids.
      cache: cache of earlier tokens, whose indices are the tokens' positions.

    Returns:
      States of the tokens, and the cache with them added.
    """
    tokens = tokens[:, None]
    hidden, cache = self.run_stack(
      params,
      'decoder',
      tokens,
      jnp.ones_like(tokens),
      cache.index[:, None],
      cached=cache,
    )
    return hidden[:, 0], cache


@dataclasses.dataclass(frozen=True)
class DecoderOnly(Decoder):
  """A causal or prefix decoder, or an encoder-only model."""

  config: model_config.DecoderOnlyConfig
