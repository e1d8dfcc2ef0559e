"""Shapes of models as frozen dataclasses: data only, no arrays.

A decoder-only model is one stack, an encoder-decoder two stacks that may
differ in every field.
"""

import dataclasses
import types
from typing import Any, Literal

from encdec_adapt.cli import errors
from encdec_adapt.ops import rope

LayerKind = Literal['local', 'global']

EOI_TOKEN = 256000  # The end of an image in Gemma 3's vocabulary.

# Fields with a few values.
_CHOICES = {
  'role': ('causal', 'bidirectional'),
  'window_rule': ('exclusive', 'inclusive', 'centered'),
  'norm_gain': ('one_plus', 'direct'),
  'activation': ('gelu_tanh', 'silu'),
  'attention_bias': ('none', 'qkv', 'qkvo'),
  'rope_scaling': ('none', 'linear', 'llama3'),
  'cross_layers': ('all', 'global'),
}
# Fields of a stack with experts.
_OF_EXPERTS = (
  'experts_per_token',
  'expert_mlp_width',
  'norm_topk',
  'shared_expert_width',
  'shared_expert_gate',
  'dense_layers',
)
# How a configuration file, whose values keep their type, says None.
NONE_AS = types.MappingProxyType(
  {
    'attention_softcap': 0.0,
    'final_softcap': 0.0,
    'local_rope_theta': 0.0,
    'eoi_token': -1,
  }
)


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """One transformer stack; the defaults are Gemma 2's.

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
    cross_merged: one attention over the decoder's own keys and the encoder's,
      made by the same projections (T5Gemma 2), in the place of two.
    cross_layers: which layers read the encoder, 'all' or 'global'.
    pattern: kinds of layers, repeated from layer 0.
    window: W of local layers, in tokens.
    window_rule: bidirectional local window, 'exclusive' |q-k| < W (the
      authors' code), 'inclusive' |q-k| <= W (transformers 5.23 eager) or
      'centered', W keys with the query's in their middle (T5Gemma 2).
    query_scale: query_pre_attn_scalar; scores are scaled by its -1/2 power.
    attention_softcap: cap of attention scores, None for no cap.
    final_softcap: cap of logits, None for no cap.
    rope_theta: base of the rotary embedding.
    rope_scaling: of its frequencies, 'none', 'linear' (all divided by
      `rope_factor`) or 'llama3' (`ops.rope.Scaling`).
    rope_factor: of the scaling.
    rope_low_factor: of 'llama3': wavelengths above the original length over
      this are divided.
    rope_high_factor: of 'llama3': those below the original length over this
      are kept.
    rope_original_length: of 'llama3', in tokens.
    local_rope_theta: base in local layers, which is then not scaled; None
      for the same embedding in all layers.
    norm_eps: epsilon inside the square root of RMSNorm.
    norm_gain: 'one_plus' (Gemma: 1 + scale, in float32) or 'direct' (Llama:
      scale, in the dtype of the activations).
    post_norms: also norm what attention and feed-forward add (Gemma 2).
    qk_norm: RMSNorm over H of queries and keys, before rotation.
    activation: of the gated feed-forward, 'gelu_tanh' or 'silu'.
    attention_bias: 'none', 'qkv' (Qwen 2) or 'qkvo'.
    mlp_bias: biases in the feed-forward.
    scale_embeddings: multiply embeddings by sqrt(D).
    eoi_token: token whose embedding is a vector of its own that is not
      scaled (T5Gemma 2's end of image), or None.
    tied_head: logits use the embedding table.
    experts: gated feed-forwards X of a layer, of which a token takes some; 0
      for one that all take. No field below means anything then.
    experts_per_token: how many of them a token takes.
    expert_mlp_width: width F of an expert, 0 for `mlp_width`.
    norm_topk: divide the probabilities of a token's experts by their sum.
    shared_expert_width: width of a feed-forward beside the experts that all
      tokens take; 0 for none (Qwen 2 MoE; DeepSeek's shared experts, in one).
    shared_expert_gate: times a sigmoid of the token (Qwen 2 MoE).
    dense_layers: first layers without experts (DeepSeek).
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
  cross_merged: bool = False
  cross_layers: Literal['all', 'global'] = 'all'
  pattern: tuple[LayerKind, ...] = ('local', 'global')
  window: int = 4096
  window_rule: Literal['exclusive', 'inclusive', 'centered'] = 'exclusive'
  query_scale: float = 256.0
  attention_softcap: float | None = 50.0
  final_softcap: float | None = 30.0
  rope_theta: float = 10000.0
  rope_scaling: Literal['none', 'linear', 'llama3'] = 'none'
  rope_factor: float = 1.0
  rope_low_factor: float = 1.0
  rope_high_factor: float = 4.0
  rope_original_length: int = 8192
  local_rope_theta: float | None = None
  norm_eps: float = 1e-6
  norm_gain: Literal['one_plus', 'direct'] = 'one_plus'
  post_norms: bool = True
  qk_norm: bool = False
  activation: Literal['gelu_tanh', 'silu'] = 'gelu_tanh'
  attention_bias: Literal['none', 'qkv', 'qkvo'] = 'none'
  mlp_bias: bool = False
  scale_embeddings: bool = True
  eoi_token: int | None = None
  tied_head: bool = True
  experts: int = 0
  experts_per_token: int = 0
  expert_mlp_width: int = 0
  norm_topk: bool = False
  shared_expert_width: int = 0
  shared_expert_gate: bool = False
  dense_layers: int = 0

  def __post_init__(self):
    positive = (
      'layers width mlp_width heads kv_heads head_dim vocab_size'
      ' vocab_multiple window rope_original_length'
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
    for name, choices in _CHOICES.items():
      if getattr(self, name) not in choices:
        raise errors.UserError(
          f'{name} is {getattr(self, name)!r}; choose one of'
          f' {", ".join(choices)}.'
        )
    above_zero = (
      'query_scale rope_theta norm_eps rope_factor rope_low_factor'
      ' rope_high_factor attention_softcap final_softcap local_rope_theta'
    ).split()
    for name in above_zero:
      value = getattr(self, name)
      if value is not None and value <= 0:
        raise errors.UserError(f'{name} is {value}; it must be above 0.')
    if self.rope_low_factor >= self.rope_high_factor:
      raise errors.UserError(
        f'rope_low_factor ({self.rope_low_factor}) must be below'
        f' rope_high_factor ({self.rope_high_factor}).'
      )
    if self.eoi_token is not None and not (
      0 <= self.eoi_token < self.vocab_size
    ):
      raise errors.UserError(
        f'eoi_token is {self.eoi_token}; it is an id below vocab_size,'
        f' {self.vocab_size}.'
      )
    if not self.pattern or set(self.pattern) - {'local', 'global'}:
      raise errors.UserError(
        f"pattern is {self.pattern}; it is a tuple of 'local' and 'global'."
      )

    if self.cross_merged and self.cross_width not in (None, self.width):
      raise errors.UserError(
        'merged attention projects the states of both stacks alike, so that'
        f" the encoder's width (cross_width, {self.cross_width}) must be the"
        f" decoder's, {self.width}; set cross_merged to False, or choose an"
        ' encoder of that width.'
      )
    self._check_experts()

  def _check_experts(self) -> None:
    if not self.experts:
      for name in _OF_EXPERTS:
        if getattr(self, name):
          raise errors.UserError(
            f'{name} is {getattr(self, name)} without experts; set experts, or'
            f' {name} to {type(getattr(self, name))()}.'
          )
      return
    for name in ('experts', 'expert_mlp_width', 'shared_expert_width'):
      if getattr(self, name) < 0:
        raise errors.UserError(
          f'{name} is {getattr(self, name)}; it must be at least 0.'
        )
    if not 1 <= self.experts_per_token <= self.experts:
      raise errors.UserError(
        f'experts_per_token is {self.experts_per_token}; it must be 1 to'
        f' experts ({self.experts}).'
      )
    if not 0 <= self.dense_layers < self.layers:
      raise errors.UserError(
        f'dense_layers is {self.dense_layers}; it must be 0 to'
        f' {self.layers - 1}, so that a layer has experts.'
      )
    if self.shared_expert_gate and not self.shared_expert_width:
      raise errors.UserError(
        'shared_expert_gate is set and shared_expert_width is 0; there is'
        ' nothing to gate.'
      )
    if self.mlp_bias:
      raise errors.UserError(
        'mlp_bias is set, and experts have no biases; clear it.'
      )

  @property
  def lead(self) -> tuple[LayerKind, ...]:
    """Kinds of the dense layers before those with experts."""
    return tuple(self.layer_kind(i) for i in range(self.dense_layers))

  @property
  def cycle(self) -> tuple[LayerKind, ...]:
    """The pattern as the layers after `lead` repeat it."""
    start = self.dense_layers % len(self.pattern)
    return self.pattern[start:] + self.pattern[:start]

  @property
  def repeats(self) -> int:
    """How often the whole pattern is repeated; these layers are scanned."""
    return (self.layers - self.dense_layers) // len(self.pattern)

  @property
  def tail(self) -> tuple[LayerKind, ...]:
    """Kinds of the layers after the last whole pattern."""
    return self.cycle[: (self.layers - self.dense_layers) % len(self.pattern)]

  @property
  def expert_width(self) -> int:
    """Width F of an expert."""
    return self.expert_mlp_width or self.mlp_width

  @property
  def table_rows(self) -> int:
    """Rows V of the embedding table, padding included."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @property
  def rope_scaling_rule(self) -> rope.Scaling:
    """Scaling of the rotary embedding of global layers."""
    return rope.Scaling(
      kind=self.rope_scaling,
      factor=self.rope_factor,
      low_factor=self.rope_low_factor,
      high_factor=self.rope_high_factor,
      original_length=self.rope_original_length,
    )

  def layer_kind(self, layer: int) -> LayerKind:
    """Kind of layer number `layer`, from 0."""
    return self.pattern[layer % len(self.pattern)]

  def reads_encoder(self, kind: LayerKind) -> bool:
    """Whether layers of this kind attend to the encoder."""
    return self.cross_width is not None and (
      self.cross_layers == 'all' or kind == 'global'
    )


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
  """A bidirectional encoder and a causal decoder with cross-attention.

  Attributes:
    encoder: the encoder's stack.
    decoder: the decoder's.
    shared_table: the encoder reads the decoder's embedding table and has
      none of its own (T5Gemma 2).
  """

  encoder: StackConfig
  decoder: StackConfig
  shared_table: bool = False

  def __post_init__(self):
    if self.encoder.cross_width is not None:
      raise errors.UserError('an encoder has no cross-attention.')
    if self.decoder.cross_width != self.encoder.width:
      raise errors.UserError(
        f'decoder.cross_width is {self.decoder.cross_width}; it must be the'
        f" encoder's width, {self.encoder.width}."
      )
    kinds = set(self.decoder.pattern[: self.decoder.layers])
    if not any(self.decoder.reads_encoder(kind) for kind in kinds):
      raise errors.UserError(
        f'no layer of the decoder reads the encoder: its pattern is'
        f" {self.decoder.pattern} and cross_layers 'global'."
      )
    if self.shared_table:
      for name in ('width', 'vocab_size', 'vocab_multiple', 'eoi_token'):
        ours, theirs = (getattr(s, name) for s in self.stacks.values())
        if ours != theirs:
          raise errors.UserError(
            f'a shared embedding table needs equal {name}; the encoder has'
            f' {ours}, the decoder {theirs}.'
          )

  @property
  def stacks(self) -> dict[str, StackConfig]:
    """Stacks by their name in the parameter tree."""
    return {'encoder': self.encoder, 'decoder': self.decoder}


ModelConfig = DecoderOnlyConfig | EncoderDecoderConfig


def encoder_decoder(
  encoder: StackConfig,
  decoder: StackConfig,
  *,
  causal_encoder: bool = False,
  shared_table: bool = False,
  **cross: Any,
) -> EncoderDecoderConfig:
  """The encoder-decoder of two decoder-only stacks.

  Args:
    encoder: becomes the encoder; it has no head.
    decoder: becomes the decoder.
    causal_encoder: let the encoder attend causally.
    shared_table: of `EncoderDecoderConfig`. By default the encoder's table
      stays its own (T5Gemma ties the decoder's head only).
    **cross: `cross_merged` and `cross_layers` of the decoder.
  """
  return EncoderDecoderConfig(
    encoder=dataclasses.replace(
      encoder,
      role='causal' if causal_encoder else 'bidirectional',
      tied_head=True,
    ),
    decoder=dataclasses.replace(
      decoder, role='causal', cross_width=encoder.width, **cross
    ),
    shared_table=shared_table,
  )


def t5gemma2(
  encoder: StackConfig,
  decoder: StackConfig,
  *,
  eoi_token: int = EOI_TOKEN,
  **options: Any,
) -> EncoderDecoderConfig:
  """The T5Gemma 2 of two Gemma 3 stacks (arXiv 2512.14856; transformers).

  Merged attention, one table for both stacks, a vector of its own for one
  token, and W keys around the query in the encoder's local layers.

  Args:
    encoder: becomes the encoder.
    decoder: becomes the decoder.
    eoi_token: the end of an image, `StackConfig.eoi_token` of both.
    **options: others than these of `encoder_decoder`.
  """
  return encoder_decoder(
    dataclasses.replace(encoder, eoi_token=eoi_token, window_rule='centered'),
    dataclasses.replace(decoder, eoi_token=eoi_token),
    shared_table=True,
    cross_merged=True,
    **options,
  )


def with_vocab_multiple(config: ModelConfig, multiple: int) -> ModelConfig:
  """The model with its tables padded to a multiple of so many rows."""
  return dataclasses.replace(
    config,
    **{
      name: dataclasses.replace(stack, vocab_multiple=multiple)
      for name, stack in config.stacks.items()
    },
  )


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
  """Fields in which two models differ, but for the padding of their tables.

  Returns:
    Lines such as 'decoder.width is 16 and 32'; empty for equal models.
  """
  if type(one) is not type(other):
    return [f'one is {type(one).__name__}, the other {type(other).__name__}']
  lines = []
  for field in dataclasses.fields(one):
    ours, theirs = (getattr(model, field.name) for model in (one, other))
    if not isinstance(ours, StackConfig):
      if ours != theirs:
        lines.append(f'{field.name} is {ours!r} and {theirs!r}')
      continue
    for part in dataclasses.fields(StackConfig):
      pair = getattr(ours, part.name), getattr(theirs, part.name)
      if pair[0] != pair[1] and part.name != 'vocab_multiple':
        lines.append(f'{field.name}.{part.name} is {pair[0]!r} and {pair[1]!r}')
  return lines
