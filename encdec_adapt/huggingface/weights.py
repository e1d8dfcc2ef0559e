"""Maps between tensors of a Hugging Face folder and our parameters.

Each family has one table for both directions: our leaf within a layer -> their
tensor name. Our parameter table alone decides whether a model has a leaf (a
bias, a norm).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.models import heads, layer_leaves, model_config

_SUFFIXES = {'': 'weight', '_bias': 'bias'}
_ENDS = _SUFFIXES.items()
_NORM = (('scale', 'weight'), ('bias', 'bias'))  # Of LayerNorm.
_ATTENTION = {
  # Their names are the initials of ours.
  f'{name}{suffix}': f'{name[0]}_proj.{their_suffix}'
  for name in ('query', 'key', 'value', 'output')
  for suffix, their_suffix in _SUFFIXES.items()
} | {'query_norm': 'q_norm.weight', 'key_norm': 'k_norm.weight'}
_MLP = {
  f'mlp/{name}{suffix}': f'mlp.{name}_proj.{their_suffix}'
  for name in ('gate', 'up', 'down')
  for suffix, their_suffix in _SUFFIXES.items()
}
# Placeholder for the expert index in tensor names.
_EXPERT = '{}'
# Kernels with one input dimension, the first. Output kernels have two (heads,
# head_dim), other leaves none.
_KERNELS = frozenset(
  'query key value gate up down router shared_gate relative_bias'
  ' projection dense'.split()
)


def _layer(norms: Mapping[str, str], **attentions: str) -> dict[str, str]:
  """Returns a layer's table, given our norms and attentions -> theirs."""
  table = {f'{ours}/scale': f'{norm}.weight' for ours, norm in norms.items()}
  for ours, theirs in attentions.items():
    table |= {f'{ours}/{k}': f'{theirs}.{v}' for k, v in _ATTENTION.items()}
  return table | _MLP


# `post_attention_layernorm` is before the feed-forward in Llama, but after
# attention in Gemma.
LLAMA = _layer(
  {
    'pre_attention_norm': 'input_layernorm',
    'pre_mlp_norm': 'post_attention_layernorm',
  },
  attention='self_attn',
)
# Names in files; in memory, transformers 5 uses Qwen's name of the router.
MIXTRAL = LLAMA | {
  'experts/router': 'block_sparse_moe.gate.weight',
  'experts/gate': f'block_sparse_moe.experts.{_EXPERT}.w1.weight',
  'experts/up': f'block_sparse_moe.experts.{_EXPERT}.w3.weight',
  'experts/down': f'block_sparse_moe.experts.{_EXPERT}.w2.weight',
}
_EXPERTS = {'experts': f'experts.{_EXPERT}', 'experts/shared': 'shared_expert'}
QWEN_MOE = {
  **LLAMA,
  'experts/router': 'mlp.gate.weight',
  'experts/shared_gate': 'mlp.shared_expert_gate.weight',
  **{
    f'{ours}/{name}': f'mlp.{theirs}.{name}_proj.weight'
    for name in ('gate', 'up', 'down')
    for ours, theirs in _EXPERTS.items()
  },
}
GEMMA = _layer(
  {
    'pre_attention_norm': 'input_layernorm',
    'post_attention_norm': 'post_attention_layernorm',
    'pre_mlp_norm': 'pre_feedforward_layernorm',
    'post_mlp_norm': 'post_feedforward_layernorm',
  },
  attention='self_attn',
)
GEMMA4 = GEMMA | {
  'layer_scalar/scale': 'layer_scalar',
  'layer_input/gate': 'per_layer_input_gate.weight',
  'layer_input/down': 'per_layer_projection.weight',
  'post_layer_input_norm/scale': 'post_per_layer_input_norm.weight',
}
GEMMA4 |= {
  'post_dense_norm/scale': 'post_feedforward_layernorm_1.weight',
  'pre_experts_norm/scale': 'pre_feedforward_layernorm_2.weight',
  'post_experts_norm/scale': 'post_feedforward_layernorm_2.weight',
  'experts/router': 'router.proj.weight',
  'experts/router_scale': 'router.scale',
  'experts/expert_scale': 'router.per_expert_scale',
  # Not in files, which have one tensor of all experts.
  **{f'experts/{x}': f'experts.{_EXPERT}.{x}' for x in ('gate', 'up', 'down')},
}
# Names in a stack, of what makes the inputs of its layers.
_LAYER_INPUTS = {
  'table': 'embed_tokens_per_layer.weight',
  'projection': 'per_layer_model_projection.weight',
  'scale': 'per_layer_projection_norm.weight',
}
T5GEMMA = _layer(
  {
    'pre_attention_norm': 'pre_self_attn_layernorm',
    'post_attention_norm': 'post_self_attn_layernorm',
    'pre_cross_norm': 'pre_cross_attn_layernorm',
    'post_cross_norm': 'post_cross_attn_layernorm',
    'pre_mlp_norm': 'pre_feedforward_layernorm',
    'post_mlp_norm': 'post_feedforward_layernorm',
  },
  attention='self_attn',
  cross_attention='cross_attn',
)


Index = tuple[int | slice, ...]


class Fused(NamedTuple):
  """A tensor in which several weights are concatenated.

  Attributes:
    parts: suffixes of the names of the weights; with a placeholder for the
      expert, of all experts, whose number is the first index of the tensor.
    axis: axis along which they are concatenated.
  """

  parts: tuple[str, ...]
  axis: int

  @property
  def per_expert(self) -> bool:
    """Whether the tensor has the weights of all experts."""
    return _EXPERT in self.parts[0]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Tensor names of a family.

  Attributes:
    layer: table of a layer, our leaf -> their name.
    encoder: table of an encoder layer, if different.
    stacks: our stack -> prefix of its tensor names.
    embedder: our stack with an embedding table -> prefix of the table's name.
    head: name of an untied head.
    score: name of the head of a sequence classifier.
    layers: prefix of a layer's index.
    norm: name of a stack's final norm, without prefix.
    bias: name of a stack's relative position bias, without prefix.
    leaves: our leaf outside of layers, with or without its stack -> their name,
      for leaves that the other fields do not name.
    head_by_value: whether a head is tied unless a tensor different from the
      table is stored, whatever config.json says.
    ignored: name prefixes of tensors unread by the class, or of towers.
    aliases: pattern of an alternative part of a name -> part used here.
    modules: prefix used here -> prefix of the module in memory, if different.
    fixed_bias: name of the bias of the logits [1, V], 0 in files of models
      without one; '' if the class has none.
    copies: name of a second copy of a tensor, from some writers -> name used by
      its class.
    fused: suffix of a tensor -> the weights in it. Of experts, the form of
      transformers 5 in memory and in some files.
    writes_fused: whether files are written in this form.
    inputs_first: whether kernels are stored as [in, out] (GPT-2).
    native: whether this is our native layout, with empty tables, our shapes,
      and names of our leaves with '.' for '/'.
  """

  layer: Mapping[str, str]
  stacks: Mapping[str, str]
  embedder: Mapping[str, str]
  head: str
  encoder: Mapping[str, str] = dataclasses.field(default_factory=dict)
  score: str = 'score.weight'
  layers: str = 'layers.'
  norm: str = 'norm.weight'
  bias: str | None = None
  leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
  head_by_value: bool = False
  ignored: tuple[str, ...] = ()
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed_bias: str = ''
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fused: Mapping[str, Fused] = dataclasses.field(default_factory=dict)
  writes_fused: bool = False
  inputs_first: bool = False
  native: bool = False

  def canonical(self, name: str) -> str:
    """Returns the canonical spelling of a stored tensor name."""
    for alias, part in self.aliases.items():
      name = re.sub(alias, part, name)
    return name

  def in_memory(self, name: str) -> str:
    """Returns the name of a tensor in a transformers model in memory."""
    for prefix, module in self.modules.items():
      if name.startswith(prefix):
        return module + name.removeprefix(prefix)
    return name

  def pieces(
    self, name: str, shape: tuple[int, ...]
  ) -> Mapping[str, Index | None]:
    """Returns the tensors in a stored tensor.

    Args:
      name: canonical name.
      shape: stored shape.

    Returns:
      Name -> its index in the tensor, or None for the whole tensor.
    """
    for end, fused in self.fused.items():
      dimensions = (3,) if fused.per_expert else (1, 2)
      if not name.endswith(end) or len(shape) not in dimensions:
        continue
      size, remainder = divmod(shape[fused.axis], len(fused.parts))
      if remainder:  # Refused as an unknown tensor.
        continue
      start, pieces = name.removesuffix(end), {}
      for i, part in enumerate(fused.parts):
        index: list[int | slice] = [slice(None)] * len(shape)
        index[fused.axis] = slice(i * size, (i + 1) * size)
        for x in range(shape[0]) if fused.per_expert else (slice(None),):
          # An expert is the first index; other tensors keep theirs.
          first = (x, *index[1:]) if fused.per_expert else index
          pieces[start + part.replace(_EXPERT, str(x))] = tuple(first)
      return pieces
    return {name: None}

  def written(self, name: str) -> str:
    """Returns the name of the tensor that a weight is written in."""
    for end, fused in self.fused.items() if self.writes_fused else ():
      for part in fused.parts:
        pattern = re.escape(part).replace(re.escape(_EXPERT), r'\d+')
        if match := re.search(f'{pattern}$', name):
          return name[: match.start()] + end
    return name

  def shape_of(self, name: str, parts: Sequence['Weight']) -> tuple[int, ...]:
    """Returns the shape of a written tensor.

    Args:
      name: name of the tensor (`written`).
      parts: the weights in it.
    """
    shape = list(parts[0].their_shape)
    if name == parts[0].name:
      return tuple(shape)
    end = next(end for end in self.fused if name.endswith(end))
    fused = self.fused[end]
    if fused.per_expert:
      shape.insert(0, len(parts) // len(fused.parts))
    shape[fused.axis] *= len(fused.parts)
    return tuple(shape)


def _fused(
  layer: Mapping[str, str], prefix: str = 'mlp.'
) -> Mapping[str, Fused]:
  gate, up, down = (layer[f'experts/{x}'] for x in ('gate', 'up', 'down'))
  return {
    f'{prefix}experts.gate_up_proj': Fused((gate, up), 1),
    f'{prefix}experts.down_proj': Fused((down,), 1),
  }


def _decoder_only(
  layer: Mapping[str, str], aliases: Mapping[str, str] = {}, **options: Any
) -> Layout:
  return Layout(
    layer=layer,
    stacks={'decoder': 'model.'},
    embedder={'decoder': 'model.embed_tokens.'},
    head='lm_head.weight',
    # Text part of a multimodal model, as saved and as in memory.
    aliases={
      r'^language_model\.(model|lm_head)\.': r'\1.',
      r'^model\.language_model\.': 'model.',
      **aliases,
    },
    **options,
  )


DECODER_ONLY_LLAMA = _decoder_only(LLAMA)
DECODER_ONLY_MIXTRAL = _decoder_only(
  MIXTRAL,
  {r'\.mlp\.gate\.': '.block_sparse_moe.gate.'},
  fused=_fused(MIXTRAL),
)
DECODER_ONLY_QWEN_MOE = _decoder_only(QWEN_MOE, fused=_fused(QWEN_MOE))
DECODER_ONLY_GEMMA = _decoder_only(GEMMA)
DECODER_ONLY_GEMMA4 = _decoder_only(
  GEMMA4,
  ignored=tuple(
    f'model.{x}.'
    for x in (
      'vision_tower vision_embedder embed_vision audio_tower embed_audio'
    ).split()
  ),
  fused=_fused(GEMMA4, prefix=''),
  writes_fused=True,
)
_PAIR = {'encoder': 'model.encoder.', 'decoder': 'model.decoder.'}
PAIR_T5GEMMA = Layout(
  layer=T5GEMMA,
  stacks=_PAIR,
  embedder={k: f'{v}embed_tokens.' for k, v in _PAIR.items()},
  head='lm_head.out_proj.weight',
)
# Both stacks share a table, stored with the encoder.
PAIR_T5GEMMA2 = Layout(
  layer=T5GEMMA,
  stacks=_PAIR,
  embedder={'decoder': 'model.encoder.embed_tokens.'},
  head='lm_head.out_proj.weight',
  aliases={r'^model\.encoder\.text_model\.': 'model.encoder.'},
  modules={'model.encoder.': 'model.encoder.text_model.'},
  # Both stacks name the table in memory, and some writers save both names.
  copies={
    f'model.decoder.embed_tokens.{name}': f'model.encoder.embed_tokens.{name}'
    for name in ('weight', 'eoi_embedding')
  },
)
# Embedding models; the class converts these names, as in a pair.
ENCODER_T5GEMMA2 = Layout(
  layer=T5GEMMA,
  stacks={'decoder': ''},
  embedder={'decoder': 'embed_tokens.'},
  head='',
)
_T5_BIAS = 'layer.0.SelfAttention.relative_attention_bias.weight'


def _t5_layer(*, gated: bool, crosses: bool) -> dict[str, str]:
  attention = {x: x[0] for x in ('query', 'key', 'value', 'output')}
  mlp = {'gate': 'wi_0', 'up': 'wi_1'} if gated else {'up': 'wi'}
  # Our module, theirs, its norm and its kernels.
  parts = [
    ('attention', 'SelfAttention', 'pre_attention_norm', attention),
    ('cross_attention', 'EncDecAttention', 'pre_cross_norm', attention),
    ('mlp', 'DenseReluDense', 'pre_mlp_norm', {**mlp, 'down': 'wo'}),
  ]
  if not crosses:
    del parts[1]
  table = {'attention/relative_bias': _T5_BIAS}
  for number, (ours, theirs, norm, kernels) in enumerate(parts):
    table[f'{norm}/scale'] = f'layer.{number}.layer_norm.weight'
    for name, their_name in kernels.items():
      table[f'{ours}/{name}'] = f'layer.{number}.{theirs}.{their_name}.weight'
  return table


@functools.cache
def t5_layout(*, gated: bool, pair: bool) -> Layout:
  """Returns the tensor names of T5, mT5 and UMT5.

  Args:
    gated: whether feed-forwards are gated.
    pair: whether the model is an encoder-decoder, not an encoder alone.
  """
  encoder = _t5_layer(gated=gated, crosses=False)
  common = {
    'embedder': {'decoder': 'shared.'},
    'head': 'lm_head.weight',
    'layers': 'block.',
    'norm': 'final_layer_norm.weight',
    'bias': f'block.0.{_T5_BIAS}',
    'copies': {
      f'{x}.embed_tokens.weight': 'shared.weight'
      for x in ('encoder', 'decoder')
    },
  }
  if not pair:
    ignored = 'decoder.block.', 'decoder.final', 'lm_head.'
    stacks = {'decoder': 'encoder.'}
    return Layout(layer=encoder, stacks=stacks, ignored=ignored, **common)
  cross = 'decoder.block.0.layer.1.EncDecAttention.'
  return Layout(
    layer=_t5_layer(gated=gated, crosses=True),
    encoder=encoder,
    stacks={'encoder': 'encoder.', 'decoder': 'decoder.'},
    head_by_value=True,
    # In the first files, for cross-attention, which has no bias.
    ignored=(f'{cross}relative_attention_bias.',),
    **common,
  )


def _layer_norm_table(
  kernels: Mapping[str, str], norms: Mapping[str, str]
) -> dict[str, str]:
  """Returns a layer's table with biases everywhere: our module -> theirs."""
  return {
    **{f'{x}{s}': f'{y}.{t}' for x, y in kernels.items() for s, t in _ENDS},
    **{f'{x}/{s}': f'{y}.{t}' for x, y in norms.items() for s, t in _NORM},
  }


_QUERY_KEY_VALUE = 'query', 'key', 'value'
_GPT2 = _layer_norm_table(
  {
    # Files have queries, keys and values in one tensor.
    **{f'attention/{x}': f'attn.{x}' for x in _QUERY_KEY_VALUE},
    'attention/output': 'attn.c_proj',
    'mlp/up': 'mlp.c_fc',
    'mlp/down': 'mlp.c_proj',
  },
  {'pre_attention_norm': 'ln_1', 'pre_mlp_norm': 'ln_2'},
)
_BERT = _layer_norm_table(
  {
    **{f'attention/{x}': f'attention.self.{x}' for x in _QUERY_KEY_VALUE},
    'attention/output': 'attention.output.dense',
    'mlp/up': 'intermediate.dense',
    'mlp/down': 'output.dense',
  },
  {
    'post_attention_norm': 'attention.output.LayerNorm',
    'post_mlp_norm': 'output.LayerNorm',
  },
)
DECODER_ONLY_GPT2 = Layout(
  layer=_GPT2,
  stacks={'decoder': 'transformer.'},
  embedder={'decoder': 'transformer.wte.'},
  head='lm_head.weight',
  layers='h.',
  norm='ln_f.weight',
  leaves={
    'embedder/positions': 'transformer.wpe.weight',
    'final_norm/bias': 'transformer.ln_f.bias',
  },
  # The first files lack the prefix.
  aliases={r'^(wte|wpe|h|ln_f)\.': r'transformer.\1.'},
  fused={
    f'attn.c_attn.{end}': Fused(
      tuple(f'attn.{x}.{end}' for x in _QUERY_KEY_VALUE), -1
    )
    for end in ('weight', 'bias')
  },
  writes_fused=True,
  inputs_first=True,
)


@functools.cache
def bert_layout(
  prefix: str,
  transform: str,
  dense: str,
  norm: str,
  bias: str,
  pooler: str,
  score: str,
) -> Layout:
  """Returns the tensor names of BERT or RoBERTa.

  Args:
    prefix: start of the encoder's names: 'bert.' or 'roberta.' in files with a
      head, else empty.
    transform: start of the names of the head's layer and norm.
    dense: rest of the name of the layer.
    norm: rest of the name of the norm.
    bias: name of the bias of the logits.
    pooler: name of a classifier's layer.
    score: name of a classifier's head.
  """
  embeddings = f'{prefix}embeddings.'
  decoder = f'{bias.removesuffix("bias")}decoder.'
  return Layout(
    layer=_BERT,
    stacks={'decoder': prefix},
    embedder={'decoder': f'{embeddings}word_embeddings.'},
    head=f'{decoder}weight',
    score=f'{score}.weight',
    layers='encoder.layer.',
    leaves={
      'embedder/positions': f'{embeddings}position_embeddings.weight',
      'embedder/types': f'{embeddings}token_type_embeddings.weight',
      **{f'embedder/norm/{s}': f'{embeddings}LayerNorm.{t}' for s, t in _NORM},
      **{f'transform/dense{s}': f'{transform}{dense}.{t}' for s, t in _ENDS},
      **{f'transform/norm/{s}': f'{transform}{norm}.{t}' for s, t in _NORM},
      'transform/logits_bias': bias,
      **{f'pooler/dense{s}': f'{pooler}.{t}' for s, t in _ENDS},
      'head/logits_bias': f'{score}.bias',
    },
    aliases={r'LayerNorm\.gamma$': 'LayerNorm.weight'}
    | {r'LayerNorm\.beta$': 'LayerNorm.bias'},
    copies={f'{decoder}bias': bias},
    # The pooler of models for masked tokens, and the next sentence.
    ignored=(f'{prefix}pooler.', 'cls.seq_relationship.'),
  )


_MODERN_BERT = {
  'pre_attention_norm/scale': 'attn_norm.weight',
  'pre_mlp_norm/scale': 'mlp_norm.weight',
  # Files have queries, keys and values in one tensor, and gate and up.
  **{f'attention/{x}': f'attn.{x}.weight' for x in _QUERY_KEY_VALUE},
  'attention/output': 'attn.Wo.weight',
  **{f'mlp/{x}': f'mlp.{x}.weight' for x in ('gate', 'up')},
  'mlp/down': 'mlp.Wo.weight',
}


@functools.cache
def modern_bert_layout(prefix: str) -> Layout:
  """Returns the tensor names of ModernBERT.

  Args:
    prefix: start of the encoder's names: 'model.' in files with a head, else
      empty.
  """
  embeddings = f'{prefix}embeddings.'
  return Layout(
    layer=_MODERN_BERT,
    stacks={'decoder': prefix},
    embedder={'decoder': f'{embeddings}tok_embeddings.'},
    head='decoder.weight',
    score='classifier.weight',
    norm='final_norm.weight',
    leaves={
      'embedder/norm/scale': f'{embeddings}norm.weight',
      'transform/dense': 'head.dense.weight',
      'transform/norm/scale': 'head.norm.weight',
      'transform/logits_bias': 'decoder.bias',
      'head/logits_bias': 'classifier.bias',
    },
    fused={
      'attn.Wqkv.weight': Fused(
        tuple(f'attn.{x}.weight' for x in _QUERY_KEY_VALUE), 0
      ),
      'mlp.Wi.weight': Fused(('mlp.gate.weight', 'mlp.up.weight'), 0),
    },
    writes_fused=True,
  )


_BART_ATTENTIONS = {'attention': 'self_attn', 'cross_attention': 'encoder_attn'}
PAIR_BART = Layout(
  layer=_layer_norm_table(
    {
      **{
        f'{ours}/{x}': f'{theirs}.{x[0]}_proj'
        for ours, theirs in _BART_ATTENTIONS.items()
        for x in _QUERY_KEY_VALUE
      },
      **{f'{x}/output': f'{y}.out_proj' for x, y in _BART_ATTENTIONS.items()},
      'mlp/up': 'fc1',
      'mlp/down': 'fc2',
    },
    # BART has norms after the sums, mBART before attention.
    {
      f'{place}_{ours}_norm': theirs
      for place in ('pre', 'post')
      for ours, theirs in (
        ('attention', 'self_attn_layer_norm'),
        ('cross', 'encoder_attn_layer_norm'),
        ('mlp', 'final_layer_norm'),
      )
    },
  ),
  stacks=_PAIR,
  embedder={'decoder': 'model.shared.'},
  head='lm_head.weight',
  norm='layer_norm.weight',
  leaves={
    **{
      f'{k}/embedder/positions': f'{v}embed_positions.weight'
      for k, v in _PAIR.items()
    },
    **{
      f'{k}/embedder/norm/{s}': f'{v}layernorm_embedding.{t}'
      for k, v in _PAIR.items()
      for s, t in _NORM
    },
    **{f'{k}/final_norm/bias': f'{v}layer_norm.bias' for k, v in _PAIR.items()},
    'bias/logits_bias': 'final_logits_bias',
  },
  ignored=tuple(f'{x}version' for x in _PAIR.values()),
  # Folders of the class without a head lack the prefix.
  aliases={r'^(shared|encoder|decoder)\.': r'model.\1.'},
  fixed_bias='final_logits_bias',
  copies={
    f'{x}embed_tokens.weight': 'model.shared.weight' for x in _PAIR.values()
  },
)
BART_CLASSIFIER = dataclasses.replace(
  PAIR_BART,
  score='classification_head.out_proj.weight',
  leaves={
    **PAIR_BART.leaves,
    **{f'pooler/dense{s}': f'classification_head.dense.{t}' for s, t in _ENDS},
    'head/logits_bias': 'classification_head.out_proj.bias',
  },
  fixed_bias='',
)
NATIVE = Layout(layer={}, stacks={}, embedder={}, head='', native=True)


@dataclasses.dataclass(frozen=True)
class Weight:
  """A tensor, and its parameter or part of a parameter.

  Attributes:
    name: tensor name.
    leaf: name of our leaf (`models.layer_leaves`).
    shape: shape of our leaf, or of the part.
    rows: number of rows of a table without padding; None for other leaves.
    native: whether the tensor has our leaf's shape.
    part: index of an expert on our leaf's first axis; None for the whole leaf.
    inputs_first: whether a kernel is stored as [in, out].
    is_row: whether a vector is stored as [1, rows].
  """

  name: str
  leaf: str
  shape: tuple[int, ...]
  rows: int | None = None
  native: bool = False
  part: int | None = None
  inputs_first: bool = False
  is_row: bool = False

  @property
  def their_shape(self) -> tuple[int, ...]:
    """Shape of the tensor: [out, in] for a kernel, heads flattened."""
    if self.rows is not None:
      return (*[1] * self.is_row, self.rows, *self.shape[1:])
    if self.native:
      return self.shape
    if not (inputs := self._inputs):
      return (math.prod(self.shape),)
    sizes = math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs])
    return sizes[::-1] if self.inputs_first else sizes

  def to_ours(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our leaf as a view of the tensor; tables lack padding."""
    if self.rows is not None:
      return tensor[0] if self.is_row else tensor
    is_turned = self._inputs and not self.inputs_first
    return (tensor.T if is_turned else tensor).reshape(self.shape)

  def to_theirs(self, leaf: np.ndarray) -> np.ndarray:
    """Returns the tensor from our leaf, a view if possible."""
    if self.rows is not None:
      rows = leaf[: self.rows]
      return rows[None] if self.is_row else rows
    if not self._inputs or self.inputs_first:
      return leaf.reshape(self.their_shape)
    return leaf.reshape(self.their_shape[::-1]).T

  @property
  def _inputs(self) -> int:
    """Number of leading, contracted dimensions; 0 for a vector."""
    name = self.leaf.rpartition('/')[2]
    # Native tensors are stored unchanged, like vectors.
    if self.native:
      return 0
    return 2 if name == 'output' else int(name in _KERNELS)


def weights(
  config: model_config.ModelConfig, layout: Layout
) -> Mapping[str, Weight]:
  """Returns all tensors of a model by name.

  Args:
    config: model config.
    layout: tensor names.

  Raises:
    UserError: the family has no tensor for a parameter of the model.
  """
  return {
    weight.name: weight
    for leaf, info in layer_leaves.leaves_of(config).items()
    for weight in _weights(config, layout, leaf, info.shape)
  }


def joined(config: model_config.ModelConfig) -> int:
  """Returns the most parameters that a tensor of its class joins."""
  stack = config.decoder
  if stack.norm == 'layer':  # GPT-2 and ModernBERT: queries, keys and values.
    return 3
  return 1 + stack.experts_beside_mlp


def copies(
  config: model_config.ModelConfig, layout: Layout
) -> Mapping[str, str]:
  """Returns the name of each possible copy of a tensor -> its main name.

  Args:
    config: model config. A tied head is a copy of the table.
    layout: tensor names.
  """
  # The native layout stores each leaf once; a tied head is not a leaf.
  if layout.native or config.decoder.head.module:
    return layout.copies
  table = f'{layout.embedder["decoder"]}weight'
  return {**layout.copies, layout.head: table}


def _weights(
  config: model_config.ModelConfig,
  layout: Layout,
  leaf: str,
  shape: tuple[int, ...],
) -> Iterator[Weight]:
  stack, part, *inner = leaf.split('/')
  rows = None
  if inner == ['table']:
    # Our tables may be padded for sharding; the padding is not exported.
    sizes = config.stacks[stack]
    known = dict.fromkeys(('embedder', 'layer_inputs'), sizes.vocab_size)
    known['head'] = sizes.outputs
    rows = known.get(part)
  elif inner in (['positions'], ['types']):
    rows = shape[0]
  elif inner == ['logits_bias']:
    sizes = config.stacks[stack]
    rows = sizes.outputs if part == 'head' else sizes.vocab_size
  if layout.native:
    yield Weight(leaf.replace('/', '.'), leaf, shape, rows, native=True)
    return
  if part == 'embedding':  # Stored in separate files (`embedding_files`).
    return
  name, path = None, '/'.join([part, *inner])
  if theirs := layout.leaves.get(leaf) or layout.leaves.get(path):
    name = theirs
  elif part == 'layers':
    number, *inner = inner
    table = (stack == 'encoder' and layout.encoder) or layout.layer
    if theirs := table.get('/'.join(inner)):
      name = f'{layout.stacks[stack]}{layout.layers}{number}.{theirs}'
  elif part == 'final_norm':
    name = f'{layout.stacks[stack]}{layout.norm}'
  elif part == 'relative_bias':
    name = layout.bias and f'{layout.stacks[stack]}{layout.bias}'
  elif part == 'layer_inputs':
    name = f'{layout.stacks[stack]}{_LAYER_INPUTS[inner[0]]}'
  elif part == 'head':
    scores = heads.classifies(config.stacks[stack].head)
    name = layout.score if scores else layout.head
  elif stack in layout.embedder:
    theirs = 'eoi_embedding' if inner == ['eoi'] else 'weight'
    name = f'{layout.embedder[stack]}{theirs}'
  if name is None:
    raise errors.UserError(
      f'{leaf} has no counterpart in this layout; export with'
      ' --layout=encdec_adapt instead.'
    )
  if _EXPERT not in name:
    yield Weight(
      name,
      leaf,
      shape,
      rows,
      inputs_first=layout.inputs_first,
      is_row=name == layout.fixed_bias,
    )
    return
  for expert in range(shape[0]):
    tensor = name.replace(_EXPERT, str(expert))
    yield Weight(tensor, leaf, shape[1:], part=expert)
