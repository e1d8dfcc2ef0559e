"""Base class of models: stacks, a head, and decoding with a cache.

A model is a hashable value: its config and execution options. Its methods are
functions of parameters. Its architecture is part of the config;
`encoder_decoder` adds the second stack.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import (
  execution,
  expert_layer,
  layers,
  model_config,
  parameters,
  stack,
)
from encdec_adapt.models import kv_cache as caches
from encdec_adapt.ops import kernel_forms

Params = Mapping[str, Any]
Tokens = Int[Array, 'B L']
Routing = list[Any] | None


class Dropout(NamedTuple):
  """Dropout of a forward pass in training.

  Attributes:
    rate: dropout rate, in (0, 1).
    key: random key of all masks of the pass.
  """

  rate: float
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """Base class of models; hashable, without arrays.

  The stack named 'decoder' has the head. It is the only stack of a single-stack
  model, even of an encoder-only model.

  Attributes:
    config: shape of the model.
    compute: execution options.
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
    """Returns the output table, including padding rows."""
    module = self.config.decoder.head.module or 'embedder'
    return kernel_forms.dense(params['decoder'][module]['table'])

  def logits(
    self, params: Params, hidden: Float[Array, 'B T D']
  ) -> Float[Array, 'B T vocab']:
    """Computes soft-capped float32 logits of the decoder's states.

    For small inputs and generation; training uses `ops.vocabulary_loss`, which
    never holds the logits of all positions.
    """
    cfg = self.config.decoder
    return layers.logits(
      self.head(params), hidden, cfg.outputs, cfg.final_softcap
    )

  def init_cache(
    self, batch: int, length: int, source: int = 0
  ) -> caches.Cache:
    """Returns an empty cache for `decode_step`; see `caches.empty`."""
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
    """Applies a stack (see `stack.Stack.__call__`).

    Args:
      params: the model's parameters.
      name: name of the stack in `config.stacks`.
      *args: positional arguments of the stack.
      routing: a list; the router losses of the layers are appended, for
        `expert_layer.mean_losses`. None skips them.
      dropout: rate and key of dropout; None for none.
      **kwargs: keyword arguments of the stack.
    """
    shape = self.config.stacks[name]
    apply = stack.Stack(shape, self.compute).apply
    variables = {'params': params[name]}
    if dropout is not None:
      # Modules draw by their path, which the stacks of a pair share: with an
      # equal key, equal layers of both would drop the same values.
      number = list(self.config.stacks).index(name)
      key = jax.random.fold_in(dropout.key, number)
      kwargs |= {'dropout': dropout.rate, 'rngs': {'dropout': key}}
    # Flax computes the losses only if their collection is mutable, and omits it
    # for a stack without experts.
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
    **options: Any,
  ) -> Float[Array, 'B L D']:
    """Computes the decoder's states after its final norm.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: segment of each token, from 1; 0 is padding.
      positions: position of each token within its segment.
      encoded: output of the encoder of an encoder-decoder.
      encoder_segments: segments of the encoder's tokens.
      **options: `routing` and `dropout` of `run_stack`; for a prefix decoder
        `prefix`, 1 at the inputs of each segment.
    """
    source = encoded, encoder_segments
    return self.run_stack(
      params, 'decoder', tokens, segments, positions, *source, **options
    )[0]

  def prefill(
    self, params: Params, tokens: Tokens, segments: Tokens, positions: Tokens
  ) -> Any:
    """Reads prompts; a prefix decoder attends to them bidirectionally.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: 1 at tokens, 0 at padding.
      positions: position of each token.

    Returns:
      Keys and values by layer, [B, L, K, H], for `caches.insert`.
    """
    # A prompt is all inputs, so that its tokens are the prefix; decoders of
    # other roles ignore it.
    options = {'prefix': segments, 'collect': True}
    return self.run_stack(
      params, 'decoder', tokens, segments, positions, **options
    )[1]

  def decode_step(
    self, params: Params, tokens: Int[Array, 'B'], cache: caches.Cache
  ) -> tuple[Float[Array, 'B D'], caches.Cache]:
    """Computes the states of the next token of each row.

    Args:
      params: the model's parameters.
      tokens: token ids.
      cache: cache of earlier tokens; its indices are the tokens' positions.

    Returns:
      States of the tokens, and the cache with the tokens added.
    """
    tokens = tokens[:, None]
    # A row and its cache are a single segment, 1. Rows without a request also
    # read tokens: the shapes of the program are fixed.
    segments, positions = jnp.ones_like(tokens), cache.index[:, None]
    hidden, cache = self.run_stack(
      params, 'decoder', tokens, segments, positions, cached=cache
    )
    return hidden[:, 0], cache


@dataclasses.dataclass(frozen=True)
class SingleStack(BaseModel):
  """A causal or prefix decoder, an encoder-only model or a classifier."""

  config: model_config.DecoderOnlyConfig
