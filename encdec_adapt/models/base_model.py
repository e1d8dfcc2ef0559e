"""Base of all models: stacks, a head and decoding with a cache.

A model is a hashable value, its config and execution choices; its methods are
functions of parameters. The config gives its kind (`architecture`);
`encoder_decoder` adds the second stack. Imports neither `build` nor modules for
training or serving.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import (
  embedding_head,
  execution,
  expert_layer,
  heads,
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
    rate: fraction of zeroed values, in (0, 1).
    key: random key of all masks of the pass.
  """

  rate: float
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class BaseModel:
  """Base of all models; hashable, holds no arrays.

  The stack 'decoder' has the head: in models with a single stack, such as
  encoder-only models, that stack has this name.

  Attributes:
    config: shape of the model.
    compute: execution choices.
  """

  config: model_config.ModelConfig
  compute: execution.ComputeConfig

  @property
  def architecture(self) -> architectures.Architecture:
    """The kind of the model."""
    return self.config.architecture

  @property
  def table(self) -> Mapping[str, parameters.ParamInfo]:
    """Shape, dtype and logical axes of every parameter by path."""
    return parameters.parameter_table(self.config)

  def init(self, rng: jax.Array) -> dict[str, Any]:
    """Initialises float32 parameters; jit with `out_shardings` to shard."""
    return parameters.init(self.config, rng)

  def head(self, params: Params) -> Float[Array, 'V D']:
    """Returns the output table, including padding rows."""
    module = self.config.decoder.head.module or 'embedder'
    return kernel_forms.dense(params['decoder'][module]['table'])

  def pool(
    self, hidden: Float[Array, 'B L D'], segments: Tokens
  ) -> Float[Array, 'B L D']:
    """Replaces states with those that the labels of their texts are read from.

    Args:
      hidden: states of the decoder, unchanged with other heads.
      segments: segment of each token.
    """
    head = self.config.decoder.head
    if not isinstance(head, heads.Labels) or not head.pooled:
      return hidden
    return embedding_head.pool_in_place(hidden, segments, head.pooled)

  def projection(
    self, params: Params, hidden: Float[Array, 'B T D']
  ) -> tuple[Float[Array, 'B T J'], Float[Array, 'V J']]:
    """Returns states and a table whose products are the logits.

    A bias of the logits is a column of the table, and a 1 in each state; a
    fixed one has no gradient.
    """
    table, config = self.head(params), self.config.decoder
    decoder, head = params['decoder'], config.head
    if head.layer:
      layer = layers.HEADS[head.layer](config, name=head.layer)
      hidden = layer.apply({'params': decoder[head.layer]}, hidden)
    if not head.bias:
      return hidden, table
    bias = decoder[head.bias]['logits_bias'][:, None]
    if head.fixed_bias:
      bias = jax.lax.stop_gradient(bias)
    table = jnp.concatenate([table, bias.astype(table.dtype)], axis=1)
    ones = jnp.ones((*hidden.shape[:2], 1), hidden.dtype)
    return jnp.concatenate([hidden, ones], axis=2), table

  def logits(
    self, params: Params, hidden: Float[Array, 'B T D']
  ) -> Float[Array, 'B T vocab']:
    """Computes soft-capped float32 logits of the decoder's states.

    For generation and small inputs; training uses `ops.vocabulary_loss`, which
    never materialises the logits of all positions.
    """
    cfg = self.config.decoder
    hidden, table = self.projection(params, hidden)
    return layers.logits(table, hidden, cfg.outputs, cfg.final_softcap)

  def init_cache(
    self, batch: int, length: int, source: int = 0
  ) -> caches.Cache:
    """Returns an empty cache for `decode_step`; see `kv_cache.empty`."""
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
      routing: list that collects the router losses of its layers, for
        `expert_layer.mean_losses`; None to skip them.
      dropout: rate and key of dropout; None for no dropout.
      **kwargs: keyword arguments of the stack.
    """
    shape = self.config.stacks[name]
    apply = stack.Stack(shape, self.compute).apply
    variables = {'params': params[name]}
    if dropout is not None:
      # Flax derives keys from module paths, which are equal in both stacks of a
      # pair: with the same key, equal layers would drop the same values.
      number = list(self.config.stacks).index(name)
      key = jax.random.fold_in(dropout.key, number)
      kwargs |= {'dropout': dropout.rate, 'rngs': {'dropout': key}}
    # Flax computes the losses only if their collection is mutable, and returns
    # no collection for stacks without experts.
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
      encoded: encoder output, for encoder-decoders.
      encoder_segments: segments of the encoder's tokens.
      **options: `routing` and `dropout` of `run_stack`; for prefix decoders
        `prefix`, 1 at the inputs of each segment.
    """
    source = encoded, encoder_segments
    return self.run_stack(
      params, 'decoder', tokens, segments, positions, *source, **options
    )[0]

  def prefill(
    self, params: Params, tokens: Tokens, segments: Tokens, positions: Tokens
  ) -> Any:
    """Prefills prompts; bidirectional in a prefix decoder.

    Args:
      params: the model's parameters.
      tokens: token ids.
      segments: 1 at tokens, 0 at padding.
      positions: position of each token.

    Returns:
      Keys and values by layer, [B, L, K, H], for `kv_cache.insert`.
    """
    # All tokens of a prompt are prefix; other decoders ignore the option.
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
      States of the tokens, and the cache with the tokens appended.
    """
    tokens = tokens[:, None]
    # A row and its cache entries are a single segment, 1. Rows without a
    # request decode too: the shapes of the program are fixed.
    segments, positions = jnp.ones_like(tokens), cache.index[:, None]
    hidden, cache = self.run_stack(
      params, 'decoder', tokens, segments, positions, cached=cache
    )
    return hidden[:, 0], cache


@dataclasses.dataclass(frozen=True)
class SingleStack(BaseModel):
  """A causal or prefix decoder, an encoder-only model or a classifier."""

  config: model_config.DecoderOnlyConfig
