"""Shapes of models as frozen dataclasses: data only, no arrays.

A decoder-only model is one stack, an encoder-decoder two stacks that may
differ in every field.
"""

import dataclasses
from typing import Literal

from encdec_adapt.runtime import errors

LayerKind = Literal['local', 'global']


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """One transformer stack (Gemma 2 blocks).

  Attributes:
    layers: number of layers.
    width: residual width D.
    mlp_width: width F of one branch of the gated feed-forward.
    heads: query heads N.
    kv_heads: key/value heads K; N must be a multiple.
    head_dim: H, free of `width`.
    vocab_size: tokens of the vocabulary; logits beyond it do not exist.
    vocab_multiple: the table is padded to a multiple of this many rows, so
      that it divides over a mesh. Padding rows are masked in every loss and
      stripped on export.
    role: 'causal' or 'bidirectional' self-attention.
    cross_width: encoder width that cross-attention reads, or None for a
      stack without cross-attention.
    pattern: kinds of layers, repeated from layer 0.
    window: W of local layers, in tokens.
    window_rule: bidirectional local window, 'exclusive' |q-k| < W (the
      authors' code) or 'inclusive' |q-k| <= W (transformers 5.23 eager).
    query_scale: query_pre_attn_scalar; scores are scaled by its -1/2 power.
    attention_softcap: cap of attention scores, None for no cap.
    final_softcap: cap of logits, None for no cap.
    rope_theta: base of the rotary embedding.
    norm_eps: epsilon inside the square root of RMSNorm.
    tied_head: logits use the embedding table.
  """

  layers: int
  width: int
  mlp_width: int
  heads: int
  kv_heads: int
  head_dim: int
  vocab_size: int
  vocab_multiple: int = 1
  role: Literal['causal', 'bidirectional'] = 'causal'
  cross_width: int | None = None
  pattern: tuple[LayerKind, ...] = ('local', 'global')
  window: int = 4096
  window_rule: Literal['exclusive', 'inclusive'] = 'exclusive'
  query_scale: float = 256.0
  attention_softcap: float | None = 50.0
  final_softcap: float | None = 30.0
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  tied_head: bool = True

  def __post_init__(self):
    positive = (
      'layers width mlp_width heads kv_heads head_dim vocab_size'
      ' vocab_multiple window'
    ).split()
    for name in positive:
      if getattr(self, name) < 1:
        raise errors.UserError(
          f'{name} is {getattr(self, name)}; it must be at least 1.'
        )
    if self.heads % self.kv_heads:
      raise errors.UserError(
        f'heads ({self.heads}) is not a multiple of kv_heads'
        f' ({self.kv_heads}); choose kv_heads that divides heads.'
      )
    if self.head_dim % 2:
      raise errors.UserError(
        f'head_dim is {self.head_dim}; rotary embedding needs an even one.'
      )
    if self.role not in ('causal', 'bidirectional'):
      raise errors.UserError(
        f'role is {self.role!r}; it is causal or bidirectional.'
      )
    if self.window_rule not in ('exclusive', 'inclusive'):
      raise errors.UserError(
        f'window_rule is {self.window_rule!r}; it is exclusive or inclusive.'
      )
    for name in ('query_scale', 'rope_theta', 'norm_eps'):
      if getattr(self, name) <= 0:
        raise errors.UserError(
          f'{name} is {getattr(self, name)}; it must be above 0.'
        )
    for name in ('attention_softcap', 'final_softcap'):
      cap = getattr(self, name)
      if cap is not None and cap <= 0:
        raise errors.UserError(f'{name} is {cap}; it must be above 0.')
    if not self.pattern or set(self.pattern) - {'local', 'global'}:
      raise errors.UserError(
        f"pattern is {self.pattern}; it is a tuple of 'local' and 'global'."
      )

  @property
  def repeats(self) -> int:
    """How often the whole pattern is repeated; these layers are scanned."""
    return self.layers // len(self.pattern)

  @property
  def tail(self) -> tuple[LayerKind, ...]:
    """Kinds of the layers after the last whole pattern."""
    return self.pattern[: self.layers % len(self.pattern)]

  @property
  def table_rows(self) -> int:
    """Rows V of the embedding table, padding included."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  def layer_kind(self, layer: int) -> LayerKind:
    """Kind of layer number `layer`, from 0."""
    return self.pattern[layer % len(self.pattern)]


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig:
  """A causal decoder."""

  decoder: StackConfig

  def __post_init__(self):
    if self.decoder.cross_width is not None:
      raise errors.UserError(
        'a decoder-only model has no cross-attention; cross_width is'
        f' {self.decoder.cross_width}, it must be None.'
      )

  @property
  def stacks(self) -> dict[str, StackConfig]:
    """Stacks by their name in the parameter tree."""
    return {'decoder': self.decoder}


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
  """A bidirectional encoder and a causal decoder with cross-attention."""

  encoder: StackConfig
  decoder: StackConfig

  def __post_init__(self):
    if self.encoder.cross_width is not None:
      raise errors.UserError('an encoder has no cross-attention.')
    if self.decoder.cross_width != self.encoder.width:
      raise errors.UserError(
        f'decoder.cross_width is {self.decoder.cross_width}; it must be the'
        f" encoder's width, {self.encoder.width}."
      )

  @property
  def stacks(self) -> dict[str, StackConfig]:
    """Stacks by their name in the parameter tree."""
    return {'encoder': self.encoder, 'decoder': self.decoder}


ModelConfig = DecoderOnlyConfig | EncoderDecoderConfig


def encoder_decoder(
  encoder: StackConfig, decoder: StackConfig, *, causal_encoder: bool = False
) -> EncoderDecoderConfig:
  """The encoder-decoder of two decoder-only stacks.

  Roles and `cross_width` are set here; everything else is theirs. The
  encoder's table stays its own (T5Gemma ties the decoder's head only), and
  an encoder has no head.
  """
  return EncoderDecoderConfig(
    encoder=dataclasses.replace(
      encoder,
      role='causal' if causal_encoder else 'bidirectional',
      tied_head=True,
    ),
    decoder=dataclasses.replace(
      decoder, role='causal', cross_width=encoder.width
    ),
  )
