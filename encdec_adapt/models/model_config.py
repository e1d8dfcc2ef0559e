"""Model shapes as frozen dataclasses: data only, no arrays.

A decoder-only model is a single stack, an encoder-decoder two stacks that may
differ in every field. Modules of layers import this module.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

from flax import traverse_util

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import heads as heads_lib
from encdec_adapt.ops import masks, passage_segments, relative_bias, rope

LayerKind = Literal['local', 'global']

EOI_TOKEN = 256000  # The end of an image in Gemma 3's vocabulary.

# Keys used only with rotary positions.
_OF_ROTARY = ('rope_theta', 'rope_scaling', 'local_rope_theta')
# Keys used only in stacks with experts.
_OF_EXPERTS = (
  'experts_per_token',
  'expert_mlp_width',
  'norm_topk',
  'shared_expert_width',
  'shared_expert_gate',
  'experts_beside_mlp',
  'dense_layers',
)


class Group(NamedTuple):
  """Consecutive layers, stored together.

  Attributes:
    name: name in the parameter tree.
    start: number of the first layer.
    kinds: kinds of the layers, or of a repeat of them.
    repeats: repeats, stacked along a leading axis and scanned; 0 for separate
      leaves.
    shares: whether the layers read keys and values of earlier ones.
  """

  name: str
  start: int
  kinds: tuple[LayerKind, ...]
  repeats: int = 0
  shares: bool = False

  @property
  def stop(self) -> int:
    """Number of the last layer, plus 1."""
    return self.start + len(self.kinds) * (self.repeats or 1)


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """A transformer stack; the defaults are a small Gemma 2.

  Fields with `keys.key` are the configuration keys of `config.model.encoder`
  and `config.model.decoder`. The model sets the other fields:

  Attributes:
    vocab_multiple: the embedding table is padded to a multiple of this many
      rows, to be divisible over a mesh. Padding rows are masked in every loss
      and stripped on export.
    role: 'causal', 'prefix' (bidirectional over the inputs, then causal) or
      'bidirectional' self-attention.
    cross_width: width of the encoder for cross-attention; None without
      cross-attention.
    cross_merged: whether to use a single attention over the decoder's and the
      encoder's keys, with shared projections (T5Gemma 2), instead of two.
    cross_layers: layers that attend to the encoder, 'all' or 'global'.
    window_rule: bidirectional local window, 'exclusive' |q-k| < W (the
      authors' code), 'inclusive' |q-k| <= W (transformers 5.23 eager) or
      'centered', W keys around the query (T5Gemma 2).
    eoi_token: token with a separate, unscaled embedding (T5Gemma 2's end of
      image), or None.
    head: head of the stack; `heads.Head()` in an encoder.
  """

  # `presets` passes the first six fields by position.

  layers: int = keys.key(4, 'Number of layers.', at_least=1)
  width: int = keys.key(128, 'Residual width D.', at_least=1)
  mlp_width: int = keys.key(
    512, 'Width F of one branch of the feed-forward.', at_least=1
  )
  heads: int = keys.key(4, 'Query heads N.', at_least=1)
  kv_heads: int = keys.key(2, 'Key/value heads K; divides heads.', at_least=1)
  head_dim: int = keys.key(32, 'Head dimension H; even if rotated.', at_least=1)
  vocab_size: int = keys.key(
    4096, 'Tokens of the vocabulary; logits beyond it do not exist.', at_least=1
  )
  vocab_multiple: int = 1
  role: Literal['causal', 'prefix', 'bidirectional'] = 'causal'
  cross_width: int | None = None
  cross_merged: bool = False
  cross_layers: Literal['all', 'global'] = 'all'
  pattern: tuple[LayerKind, ...] = keys.key(
    ('local', 'global'), 'Kinds of layers, repeated from layer 0.'
  )
  window: int = keys.key(
    4096, 'Window W of local layers in tokens.', at_least=1
  )
  window_rule: Literal['exclusive', 'inclusive', 'centered'] = 'exclusive'
  query_scale: float = keys.key(
    32.0,
    'query_pre_attn_scalar: scores are multiplied by its -1/2 power.',
    above=0,
  )
  attention_softcap: float | None = keys.key(
    50.0, 'Soft-cap of attention scores; 0 for none.', above=0, none=0.0
  )
  final_softcap: float | None = keys.key(
    30.0, 'Soft-cap of logits; 0 for none.', above=0, none=0.0
  )
  positions: relative_bias.Positions = keys.section(
    relative_bias.Positions, switch='kind'
  )
  passages: passage_segments.Passages = keys.section(
    passage_segments.Passages, switch='length'
  )
  rope_theta: float = keys.key(
    10000.0, 'Base of the rotary embedding.', above=0
  )
  rope_scaling: rope.Scaling = keys.section(rope.Scaling, switch='kind')
  local_rope_theta: float | None = keys.key(
    None,
    'RoPE base of local layers, which is never scaled; 0: as global layers.',
    above=0,
    none=0.0,
  )
  norm: Literal['rms', 'layer'] = keys.key(
    'rms',
    "Norms: 'rms', or 'layer', which subtract the mean (BERT, GPT-2).",
    one_of=('rms', 'layer'),
  )
  norm_bias: bool = keys.key(False, "Biases of norms 'layer' (BERT, GPT-2).")
  first_norm: bool = keys.key(
    True, 'A norm before the attention of layer 0 (ModernBERT has none).'
  )
  norm_eps: float = keys.key(
    1e-6, 'Epsilon inside the square root of norms.', above=0
  )
  norm_gain: Literal['one_plus', 'direct', 'direct_fp32'] = keys.key(
    'one_plus',
    "Gain of norms: 'one_plus' (Gemma 1 to 3: 1 + scale, in float32), 'direct'"
    " (Llama, Qwen: scale, in the dtype of the activations) or 'direct_fp32'"
    " (Gemma 4, and every norm 'layer': scale, in float32).",
    one_of=('one_plus', 'direct', 'direct_fp32'),
  )
  post_norms: bool = keys.key(
    True, 'Norms after attention and feed-forward too (Gemma).'
  )
  qk_norm: bool = keys.key(
    False, 'RMSNorm of queries and keys before rotation (Gemma 3, Qwen 3).'
  )
  norms_after_sum: bool = keys.key(
    False,
    'Normalise x + f(x) in each layer, not the input of f; without a final norm'
    ' (BERT).',
  )
  embedding_norm: bool = keys.key(False, 'A norm of the embeddings (BERT).')
  token_types: int = keys.key(
    0,
    'Vectors of token types, the first of which is added to all embeddings'
    ' (BERT); 0 for none.',
    at_least=0,
  )
  value_norm: bool = keys.key(
    False, 'RMSNorm of values, without gain (Gemma 4).'
  )
  global_head_dim: int = keys.key(
    0, 'Head dimension of global layers; 0 for head_dim.', at_least=0
  )
  global_kv_heads: int = keys.key(
    0, 'Key/value heads of global layers; 0 for kv_heads.', at_least=0
  )
  values_are_keys: bool = keys.key(
    False,
    'Global layers have no kernel of values: values are the keys before their'
    ' norm and rotation (Gemma 4).',
  )
  sharing_layers: int = keys.key(
    0,
    'Last layers without keys and values of their own: they read those of the'
    ' last layer of their kind before them (Gemma 4 E2B and E4B).',
    at_least=0,
  )
  sharing_mlp_width: int = keys.key(
    0,
    'Width F of the feed-forward of these layers; 0 for mlp_width.',
    at_least=0,
  )
  layer_input_width: int = keys.key(
    0,
    'Width of what each layer reads from a second table of tokens (Gemma 4 E2B'
    ' and E4B); 0 for no second table.',
    at_least=0,
  )
  layer_scalar: bool = keys.key(
    False,
    'Multiply the states after each layer by a frozen scalar, copied from the'
    ' source (Gemma 4).',
  )
  activation: Literal['gelu_tanh', 'gelu', 'silu', 'relu'] = keys.key(
    'gelu_tanh',
    "Activation of the feed-forward: 'gelu_tanh', 'gelu' (BERT), 'silu' (Llama,"
    " Qwen) or 'relu' (T5).",
    one_of=('gelu_tanh', 'gelu', 'silu', 'relu'),
  )
  mlp_gated: bool = keys.key(
    True,
    'Multiply the activation by a second branch; else a single branch (T5).',
  )
  attention_bias: Literal['none', 'qkv', 'qkvo'] = keys.key(
    'none',
    "Biases of attention projections: 'none', 'qkv' (Qwen 2) or 'qkvo'.",
    one_of=('none', 'qkv', 'qkvo'),
  )
  mlp_bias: bool = keys.key(False, 'Biases in the feed-forward.')
  scale_embeddings: bool = keys.key(
    True, 'Multiply embeddings by sqrt(width) (Gemma).'
  )
  eoi_token: int | None = None
  head: heads_lib.Head = heads_lib.Tokens()
  experts: int = keys.key(
    0,
    'Feed-forwards of a layer of which each token takes some; 0 for one that'
    ' all tokens take (then leave the keys below).',
    at_least=0,
  )
  experts_per_token: int = keys.key(0, 'Experts of a token.', at_least=0)
  expert_mlp_width: int = keys.key(
    0, 'Width F of an expert; 0 for mlp_width.', at_least=0
  )
  norm_topk: bool = keys.key(
    False,
    "Divide the probabilities of a token's experts by their sum (Mixtral).",
  )
  shared_expert_width: int = keys.key(
    0,
    'Width of a shared expert, which every token takes in addition; 0 for none'
    " (Qwen 2 MoE; DeepSeek's shared experts, concatenated).",
    at_least=0,
  )
  shared_expert_gate: bool = keys.key(
    False, 'Multiply the shared expert by a sigmoid of the token (Qwen 2 MoE).'
  )
  experts_beside_mlp: bool = keys.key(
    False,
    'Experts beside a feed-forward of mlp_width that every token takes, each'
    ' with norms of its own (Gemma 4 26B-A4B).',
  )
  dense_layers: int = keys.key(
    0, 'First layers without experts (DeepSeek).', at_least=0
  )

  def __post_init__(self):
    keys.check(self, '')
    for name in ('kv_heads', 'global_kv_heads'):
      if (count := getattr(self, name)) and self.heads % count:
        raise errors.UserError(
          f'heads ({self.heads}) is not a multiple of {name} ({count}); choose'
          f' {name} that divides heads.'
        )
    if self.norm_bias and self.norm != 'layer':
      raise errors.UserError(
        f"norm_bias is set with norm {self.norm!r}; set norm to 'layer'."
      )
    if self.norm == 'layer' and self.norm_gain != 'direct_fp32':
      raise errors.UserError(
        f"norm is 'layer' with norm_gain {self.norm_gain!r}; set norm_gain to"
        " 'direct_fp32'."
      )
    if self.norms_after_sum and not self.first_norm:
      raise errors.UserError(
        'first_norm is False with norms_after_sum, which have none before'
        ' attention; set it to True.'
      )
    if self.norms_after_sum and self.post_norms:
      raise errors.UserError(
        'norms_after_sum and post_norms are set, and norms have one place;'
        ' clear one of them.'
      )
    kind = self.positions.kind
    default, values = keys.defaults(type(self)), keys.values_of(self)
    for name in () if kind == 'rotary' else _OF_ROTARY:
      if values[name] != default[name]:
        raise errors.UserError(
          f'{name} is {values[name]} with positions.kind {kind!r}, which'
          ' rotates nothing; leave its default, or set positions.kind to'
          " 'rotary'."
        )
    if kind != 'rotary':
      self._check_without_rotation()
    else:
      for name in ('head_dim', 'global_head_dim'):
        if (size := getattr(self, name)) % 2:
          raise errors.UserError(
            f'{name} is {size}; rotary embedding needs an even one.'
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
    if self.values_are_keys and self.cross_width not in (None, self.width):
      raise errors.UserError(
        'values_are_keys is not supported with an encoder of width'
        f' {self.cross_width} and a decoder of width {self.width}; choose an'
        f' encoder of width {self.width}.'
      )
    own = map(self.layer_kind, range(self.dense_layers, max(self.owning, 0)))
    kinds = map(self.layer_kind, range(self.layers))
    if self.sharing_layers and not {*kinds} <= {*own}:
      raise errors.UserError(
        f'sharing_layers is {self.sharing_layers} of {self.layers} layers; each'
        ' kind of layer needs one with keys and values before them.'
      )
    if self.sharing_mlp_width and not self.sharing_layers:
      raise errors.UserError(
        f'sharing_mlp_width is {self.sharing_mlp_width} without sharing_layers;'
        ' set it to 0.'
      )
    self.head.sizes(self.width)  # Checks them.
    pooled = getattr(self.head, 'pooled', '')
    if pooled == 'first' and self.role == 'causal':
      raise errors.UserError(
        f"head.pooled is {pooled!r}, and a causal decoder's first state reads"
        " only the first token; set it to 'last' or 'mean'."
      )
    self._check_experts()

  def _check_without_rotation(self) -> None:
    kind = self.positions.kind
    if self.sharing_layers:
      raise errors.UserError(
        f'sharing_layers is {self.sharing_layers} with positions.kind {kind!r};'
        ' layers that share need rotary positions. Set it to 0.'
      )
    if self.relative and self.attention_softcap is not None:
      raise errors.UserError(
        f'attention_softcap is {self.attention_softcap} with positions.kind'
        f' {kind!r}; set it to 0, as the bias is added to scores without a cap.'
      )
    if self.cross_merged:
      raise errors.UserError(
        f'positions.kind is {kind!r}, and merged attention has keys without a'
        ' position; set cross_merged to False.'
      )

  def _check_experts(self) -> None:
    if not self.experts:
      # A key without effect is an error: the model would differ from what the
      # config seems to describe.
      for name in _OF_EXPERTS:
        if value := getattr(self, name):
          raise errors.UserError(
            f'{name} is {value} without experts; set experts, or {name} to'
            f' {type(value)()}.'
          )
      return
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
    if not self.mlp_gated:
      raise errors.UserError(
        'mlp_gated is False, and experts are gated; set it.'
      )

  @property
  def relative(self) -> relative_bias.Positions | None:
    """The relative position bias; None for other positions."""
    kinds = 'relative', 'relative_each'
    return self.positions if self.positions.kind in kinds else None

  @property
  def owning(self) -> int:
    """Number of layers with keys and values of their own, the first ones."""
    return self.layers - self.sharing_layers

  @property
  def groups(self) -> tuple[Group, ...]:
    """The layers in order: leading ones, repeats of the pattern, rest.

    Layers without experts lead, and one without its first norm. If layers share
    keys and values, the last pattern before them is in 'tail': a scan would
    stack the keys and values of all repeats. The layers that share are repeats
    and a rest of their own.
    """
    period, groups = len(self.pattern), []

    def kinds(start: int, stop: int) -> tuple[LayerKind, ...]:
      return tuple(map(self.layer_kind, range(start, stop)))

    if lead := max(self.dense_layers, not self.first_norm):
      groups.append(Group('lead', 0, kinds(0, lead)))
    for names, start, stop in (
      (('blocks', 'tail'), lead, self.owning),
      (('sharing_blocks', 'sharing_tail'), self.owning, self.layers),
    ):
      shares = start == self.owning
      kept = self.sharing_layers > 0 and not shares
      repeats = max((stop - start) // period - kept, 0)
      middle = start + repeats * period
      if repeats:
        pattern = kinds(start, start + period)
        groups.append(Group(names[0], start, pattern, repeats, shares))
      if middle < stop:
        groups.append(Group(names[1], middle, kinds(middle, stop), 0, shares))
    return tuple(groups)

  @property
  def expert_width(self) -> int:
    """Width F of an expert."""
    return self.expert_mlp_width or self.mlp_width

  @property
  def table_rows(self) -> int:
    """Rows V of the embedding table, including padding."""
    return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

  @property
  def outputs(self) -> int:
    """Number of logits per state."""
    return self.head.outputs(self.vocab_size)

  def mlp_width_of(self, layer: int) -> int:
    """Returns the width F of the feed-forward of a layer without experts."""
    shares = layer >= self.owning
    return shares and self.sharing_mlp_width or self.mlp_width

  def layer_kind(self, layer: int) -> LayerKind:
    """Returns the kind of layer `layer`, from 0."""
    return self.pattern[layer % len(self.pattern)]

  def of_kind(self, kind: LayerKind) -> 'StackConfig':
    """Returns the stack with the heads of layers of a kind in all layers."""
    is_global = kind == 'global'
    return dataclasses.replace(
      self,
      head_dim=is_global and self.global_head_dim or self.head_dim,
      kv_heads=is_global and self.global_kv_heads or self.kv_heads,
      values_are_keys=is_global and self.values_are_keys,
      global_head_dim=0,
      global_kv_heads=0,
    )

  @property
  def kinds(self) -> tuple['StackConfig', ...]:
    """The stack with the heads of each layer, from layer 0."""
    by_kind = {kind: self.of_kind(kind) for kind in set(self.pattern)}
    return tuple(by_kind[self.layer_kind(i)] for i in range(self.layers))

  def mask(self, kind: LayerKind) -> masks.MaskSpec:
    """Returns the mask of self-attention in layers of a kind, without arrays.

    A prefix decoder has kind 'prefix', even for rows without a prefix.
    """
    window, rule = self.window_of(kind)
    return masks.MaskSpec(
      kind='full' if self.role == 'bidirectional' else self.role,
      window=window,
      window_rule=rule,
      q_segments=None,
      kv_segments=None,
    )

  def window_of(self, kind: LayerKind) -> tuple[int | None, str]:
    """Returns the window of layers of a kind, None without one, and its rule.

    The window of global layers is the longest passage, so that kernels skip
    other passages.
    """
    if kind == 'local':
      return self.window, self.window_rule
    return self.passages.length or None, 'exclusive'

  def reads_encoder(self, kind: LayerKind) -> bool:
    """Returns whether layers of this kind attend to the encoder."""
    return self.cross_width is not None and (
      self.cross_layers == 'all' or kind == 'global'
    )


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig:
  """A single stack: a causal or prefix decoder, or an encoder-only model.

  The three differ only in the role of the stack, so each may start from the
  weights of another. An encoder-only model is a bidirectional stack with a head
  for masked tokens; other heads turn stacks into classifiers, reward models and
  embedding models.
  """

  decoder: StackConfig
  # No second stack to share them.
  shared_table: ClassVar[bool] = False
  shared_parts: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self):
    _require_no_passages('decoder', self.decoder)

  @property
  def stacks(self) -> dict[str, StackConfig]:
    """Stacks by their name in the parameter tree."""
    return {'decoder': self.decoder}

  @property
  def prompt_reader(self) -> StackConfig:
    """The stack that reads prompts."""
    return self.decoder

  @property
  def architecture(self) -> architectures.Architecture:
    """The kind of the model."""
    stack = architectures.of_stack(self.decoder.role)
    return self.decoder.head.architecture(stack)


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig:
  """A bidirectional encoder and a causal decoder with cross-attention.

  Attributes:
    encoder: the encoder's stack.
    decoder: the decoder's stack.
    shared_table: whether the encoder uses the decoder's embedding table
      (T5Gemma 2); norms and positions of embeddings are its own (BART).
  """

  encoder: StackConfig
  decoder: StackConfig
  shared_table: bool = False

  def __post_init__(self):
    _require_no_passages('decoder', self.decoder)
    self.decoder.head.architecture(architectures.ENCODER_DECODER)  # Checks it.
    if self.encoder.role != 'bidirectional':
      _require_no_passages('causal encoder', self.encoder)
    # A pattern longer than the stack may have a kind without layers.
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
  def shared_parts(self) -> tuple[str, ...]:
    """The encoder's parameters that are stored with the decoder.

    Two second tables of one shape are a single one: they are half of a model.
    """
    shapes = {
      (x.vocab_size, x.vocab_multiple, x.layers, x.layer_input_width)
      for x in self.stacks.values()
    }
    inputs = self.decoder.layer_input_width and len(shapes) == 1
    has_eoi = self.decoder.eoi_token is not None
    parts = {
      'embedder/table': self.shared_table,
      'embedder/eoi': self.shared_table and has_eoi,
      'layer_inputs/table': inputs,
    }
    return tuple(name for name, is_shared in parts.items() if is_shared)

  @property
  def stacks(self) -> dict[str, StackConfig]:
    """Stacks by their name in the parameter tree."""
    return {'encoder': self.encoder, 'decoder': self.decoder}

  @property
  def prompt_reader(self) -> StackConfig:
    """The stack that reads prompts."""
    return self.encoder

  @property
  def architecture(self) -> architectures.Architecture:
    """The kind of the model."""
    return self.decoder.head.architecture(architectures.ENCODER_DECODER)


ModelConfig = DecoderOnlyConfig | EncoderDecoderConfig


def encoder_decoder(
  encoder: StackConfig,
  decoder: StackConfig,
  *,
  causal_encoder: bool = False,
  shared_table: bool = False,
  **cross: Any,
) -> EncoderDecoderConfig:
  """Builds an encoder-decoder from two decoder-only stacks.

  Args:
    encoder: becomes the encoder; its head is dropped.
    decoder: becomes the decoder.
    causal_encoder: whether the encoder attends causally.
    shared_table: see `EncoderDecoderConfig`. By default the encoder keeps a
      separate table (T5Gemma ties only the decoder's head).
    **cross: `cross_merged` and `cross_layers` of the decoder.
  """
  return EncoderDecoderConfig(
    encoder=dataclasses.replace(
      encoder,
      role='causal' if causal_encoder else 'bidirectional',
      head=heads_lib.Head(),
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
  """Builds a T5Gemma 2 from two Gemma 3 stacks (arXiv 2512.14856).

  It has merged attention, a shared table, a separate vector for the end of an
  image, and centered windows of W keys in the encoder's local layers.

  Args:
    encoder: becomes the encoder.
    decoder: becomes the decoder.
    eoi_token: the end of an image, `StackConfig.eoi_token` of both stacks.
    **options: further options of `encoder_decoder`.
  """
  return encoder_decoder(
    dataclasses.replace(encoder, eoi_token=eoi_token, window_rule='centered'),
    dataclasses.replace(decoder, eoi_token=eoi_token),
    shared_table=True,
    cross_merged=True,
    **options,
  )


def without_passages(config: ModelConfig) -> ModelConfig:
  """Returns a model that reads its inputs as one text."""
  stacks = {
    name: dataclasses.replace(stack, passages=passage_segments.Passages())
    for name, stack in config.stacks.items()
  }
  return dataclasses.replace(config, **stacks)


def _require_no_passages(name: str, stack: StackConfig) -> None:
  if stack.passages.length:
    raise errors.UserError(
      f'passages.length of the {name} is {stack.passages.length}; only the'
      ' bidirectional encoder of a pair reads passages. Set it to 0.'
    )


def check_positions(
  config: ModelConfig, lengths: Mapping[str, int], remedy: str = 'shorten them'
) -> None:
  """Checks that rows fit the learned positions of a model.

  Args:
    config: the model.
    lengths: stack -> tokens that it reads.
    remedy: end of the message, an imperative.

  Raises:
    UserError: they do not; names the stack and both numbers.
  """
  for name, length in lengths.items():
    stack = config.stacks[name]
    limit = stack.positions.limit
    length = min(length, stack.passages.length or length)
    if length > limit:
      raise errors.UserError(
        f'rows have {length} tokens for the {name}, which has {limit} learned'
        f' positions (config.model.{name}.positions); {remedy}.'
      )


def without_cross_attention(decoder: StackConfig) -> DecoderOnlyConfig:
  """Returns a stack as a decoder-only model, which reads no passages."""
  stack = dataclasses.replace(
    decoder,
    cross_width=None,
    cross_merged=False,
    cross_layers='all',
    passages=passage_segments.Passages(),
  )
  return DecoderOnlyConfig(stack)


def with_head(config: ModelConfig, head: heads_lib.Head) -> ModelConfig:
  """Returns a model with another head.

  Args:
    config: the model.
    head: the head; reward heads have no soft-cap.
  """
  fields: dict[str, Any] = {'head': head}
  if isinstance(head, heads_lib.Reward):
    fields['final_softcap'] = None
  decoder = dataclasses.replace(config.decoder, **fields)
  return dataclasses.replace(config, decoder=decoder)


def reward_model(config: ModelConfig) -> ModelConfig:
  """Returns the model with a reward head."""
  return with_head(config, heads_lib.Reward().replaces(config.decoder.head))


def classifier(config: ModelConfig, labels: int) -> ModelConfig:
  """Returns the model with a head for the labels of texts.

  A head for labels keeps its form. Encoders that were trained as such have that
  of their classes, and pairs that of BART; others read the state of the
  labelled token.
  """
  head, stack = config.decoder.head, config.decoder
  if not isinstance(head, heads_lib.Labels):
    head = heads_lib.Labels(labels)
    if config.architecture.encodes_prompt:
      head = heads_lib.Labels(labels, 'last', 'pooler')
    elif stack.token_types or not stack.first_norm:
      # BERT and RoBERTa have types; only ModernBERT lacks the norm.
      layer = 'pooler' if stack.token_types else 'transform'
      head = heads_lib.Labels(labels, 'first', layer)
  return with_head(config, dataclasses.replace(head, labels=labels))


def prompt_model(
  config: ModelConfig, head: heads_lib.Head
) -> DecoderOnlyConfig:
  """Returns the prompt-reading stack as a model with another head."""
  stack = config.prompt_reader
  role = stack.role
  if isinstance(head, heads_lib.Embedding) and role == 'prefix':
    # A prompt is all prefix, hence bidirectional.
    role = 'bidirectional'
  return DecoderOnlyConfig(
    dataclasses.replace(
      stack, role=role, head=head, passages=passage_segments.Passages()
    )
  )


def embedding_model(
  config: ModelConfig, head: heads_lib.Embedding | None = None
) -> DecoderOnlyConfig:
  """Returns a model as an embedding model without a learned temperature.

  Args:
    config: the model; an embedding model keeps its head.
    head: the head to put on the prompt-reading stack of another model; None for
      mean pooling.

  Raises:
    UserError: a head is given for an embedding model.
  """
  current = config.decoder.head
  if not isinstance(current, heads_lib.Embedding):
    return prompt_model(config, head or heads_lib.Embedding())
  if head:
    raise errors.UserError(
      f'--embedding={head.pooling} is for a model without a head of embeddings,'
      ' and this model has one (config.model.head); leave it out.'
    )
  # The temperature is used only in training.
  return prompt_model(config, dataclasses.replace(current, temperature=0.0))


def with_head_of(config: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Returns the part of a model that initialises a target, with its head.

  Args:
    config: the source model.
    target: the model to initialise. Classifiers of a single stack, embedding
      models and encoder-only models take only the prompt-reading stack; all
      others take every stack.
  """
  head = target.decoder.head
  if not target.architecture.is_encoder:
    return with_head(config, head.replaces(config.decoder.head))
  source = config.prompt_reader.head
  if isinstance(source, type(head)):
    if isinstance(head, heads_lib.Tokens):
      head = source
    elif isinstance(head, heads_lib.Embedding):
      # Keeps trained projections.
      head = dataclasses.replace(head, projections=source.projections)
  return prompt_model(config, head)


def source_stack(target: ModelConfig, source: ModelConfig) -> str:
  """Returns the name of the source stack for the target's decoder."""
  if not target.architecture.is_encoder:
    return 'decoder'
  return source.architecture.prompt_stack


def with_vocab_multiple(config: ModelConfig, multiple: int) -> ModelConfig:
  """Returns the model with tables padded to a multiple of `multiple` rows."""
  return dataclasses.replace(
    config,
    **{
      name: dataclasses.replace(stack, vocab_multiple=multiple)
      for name, stack in config.stacks.items()
    },
  )


def differences(model: ModelConfig, reference: ModelConfig) -> list[str]:
  """Returns the differing fields of two models, except table padding.

  Returns:
    Lines such as 'decoder.width is 16 and 32'; empty for equal models.
  """
  kinds = [type(config).__name__ for config in (model, reference)]
  if kinds[0] != kinds[1]:
    return [f'one is {kinds[0]}, the other {kinds[1]}']
  values, expected = (
    traverse_util.flatten_dict(dataclasses.asdict(config), sep='.')
    for config in (model, reference)
  )
  # The heads may have different fields.
  names = dict.fromkeys([*values, *expected])
  return [
    f'{name} is {value!r} and {expected.get(name)!r}'
    for name, value in ((name, values.get(name)) for name in names)
    # Padding depends on the mesh, and is stripped on export.
    if value != expected.get(name) and not name.endswith('.vocab_multiple')
  ]
