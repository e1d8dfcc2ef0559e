"""Converts stacks between a Hugging Face config.json and our configs.

A family is data: a map of its fields to ours, and our fields that it fixes;
`class_defaults` has the defaults of its class. Rotary and window fields are
read in the spelling of transformers 4 and 5, and written in the spelling of 5.
Source of names and rules: transformers 5.24, `configuration_<family>.py`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.huggingface import (
  class_defaults,
  raw_fields,
  rotary_fields,
  weights,
)
from encdec_adapt.models import heads, model_config

Raw = Mapping[str, Any]

_COMMON = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'width',
  'intermediate_size': 'mlp_width',
  'num_hidden_layers': 'layers',
  'num_attention_heads': 'heads',
  'num_key_value_heads': 'kv_heads',
  'head_dim': 'head_dim',
  'rms_norm_eps': 'norm_eps',
}
# Derived from other sizes if absent, as in old Llama files.
_OPTIONAL = ('num_key_value_heads', 'head_dim')
_SLIDING, _FULL = 'sliding_attention', 'full_attention'
KINDS = {_SLIDING: 'local', _FULL: 'global'}
_ACTIVATIONS = {'gelu_pytorch_tanh': 'gelu_tanh', 'silu': 'silu'}
_CAPS = {'attention_softcap', 'final_softcap'}  # null for none.
_FLOATS = {'norm_eps', 'query_scale', *_CAPS}


@dataclasses.dataclass(frozen=True)
class Family:
  """A decoder-only family.

  Attributes:
    model_type: `model_type` in its config.json.
    architecture: transformers class.
    layout: tensor names.
    activation: field of the activation.
    gelu: our activation if that field is 'gelu'; None for an error.
    bias: our `attention_bias` if a file sets `bias_field`.
    bias_field: field for biases in attention; None if every model of the family
      has `bias`.
    windows_by_layer: whether files may list the layers with a window; if not,
      all or none have a window, by `layer_types`.
    aliases: alternative spelling of a field -> spelling used here.
    fields: field of the file -> our field, in addition to the common fields.
    fixed: our fields with the same value in every model of the family.
    layer_types: returns the kinds of layers for files without a list; empty if
      files must have a list.
    spell: returns the fields in the spelling used here, given the parsed object
      and the name of its file.
    has_classifier: whether transformers has a class for classification.
  """

  model_type: str
  architecture: str
  layout: weights.Layout = weights.DECODER_ONLY_LLAMA
  activation: str = 'hidden_act'
  gelu: str | None = None
  bias: str = 'qkvo'
  bias_field: str | None = 'attention_bias'
  windows_by_layer: bool = True
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  layer_types: Callable[[Raw], list[str]] = lambda raw: [_FULL]
  spell: Callable[[Raw, str], Raw] = lambda raw, file: raw
  has_classifier: bool = True

  @property
  def name(self) -> str:
    """Prefix of its other transformers classes."""
    name = self.architecture.removesuffix('ForCausalLM')
    # The shorter names are of classes for images.
    return f'{name}Text' if name in ('Gemma3', 'Gemma4') else name

  @property
  def classifier(self) -> str:
    """transformers class for sequence classification."""
    return f'{self.name}ForSequenceClassification'

  @property
  def defaults(self) -> Raw:
    """Defaults of its class for absent fields."""
    return class_defaults.DEFAULTS[self.model_type]

  @property
  def local_theta(self) -> bool:
    """Whether local layers have a separate rotary base (Gemma 3 and 4)."""
    return 'rope_local_base_freq' in self.defaults


def _alternating(period: int) -> Callable[[Raw], list[str]]:
  def kinds(raw: Raw) -> list[str]:
    # Field of Gemma 3 before transformers 5.
    every = raw.get('sliding_window_pattern') or period
    return [_SLIDING] * (every - 1) + [_FULL]

  return kinds


def _mistral_kinds(raw: Raw) -> list[str]:
  return [_FULL if raw.get('sliding_window') is None else _SLIDING]


def _all_or_none(raw: Raw) -> list[str]:
  return _mistral_kinds(raw) if raw['use_sliding_window'] else [_FULL]


def _qwen_kinds(raw: Raw) -> list[str]:
  if _all_or_none(raw) == [_FULL]:
    return [_FULL]
  layers = raw['num_hidden_layers']
  full = min(raw['max_window_layers'], layers)
  return [_FULL] * full + [_SLIDING] * (layers - full)


# Gemma 4's fields of global layers -> fields of all layers.
_GLOBAL = {
  'global_head_dim': 'head_dim',
  'num_global_key_value_heads': 'num_key_value_heads',
}


def _spell_gemma4(raw: Raw, file: str) -> Raw:
  """Returns Gemma 4's fields with heads of global layers by name.

  transformers 5.24 writes them by layer. 0 stands for those of other layers.
  """
  rows = raw.get('vocab_size_per_layer_input', raw['vocab_size'])
  if raw['hidden_size_per_layer_input'] and rows != raw['vocab_size']:
    raise errors.UserError(
      f'{file} has vocab_size_per_layer_input = {rows}, which is supported only'
      f' if it is vocab_size, {raw["vocab_size"]}.'
    )
  kinds = raw.get('layer_types')
  if kinds is None:  # As in its class: five to one, and the last global.
    layers = raw['num_hidden_layers']
    kinds = [_FULL if i % 6 == 5 else _SLIDING for i in range(layers)]
    kinds[-1] = _FULL
  elif kinds[-1:] != [_FULL]:
    raise errors.UserError(
      f'{file} lists {kinds[-1:]} as the last of its layer_types, and'
      f' transformers makes the last layer of Gemma 4 a {_FULL!r}; so must the'
      ' file.'
    )
  sizes = {name: raw.get(name) for name in _GLOBAL}
  if 'global_head_dim' not in raw:
    sizes['global_head_dim'] = 512  # The class default.
  if not raw['attention_k_eq_v']:
    sizes['num_global_key_value_heads'] = None
  if 'per_layer_config' in raw:
    by_layer = raw['per_layer_config'] or {}
    full = {f'{i}' for i, kind in enumerate(kinds) if kind == _FULL}
    # Numbers of layers, padded with zeros to one width.
    numbers = {f'{x}'.lstrip('0') or '0' for x in by_layer}
    first = next(iter(by_layer.values()), {})
    alike = all(value == first for value in by_layer.values())
    known = isinstance(first, Mapping) and first.keys() <= {*_GLOBAL.values()}
    if not alike or not known or numbers not in (set(), full):
      raise errors.UserError(
        f'{file} has per_layer_config {by_layer!r}; supported are equal'
        f' {" and ".join(_GLOBAL.values())} of all full_attention layers.'
      )
    sizes = {name: first.get(other) for name, other in _GLOBAL.items()}
  wide = raw.get('use_double_wide_mlp') and raw['num_kv_shared_layers']
  spelled = {
    name: sizes[name] if sizes[name] != raw[other] else 0
    for name, other in _GLOBAL.items()
  }
  rotary = raw.get('rope_parameters') or class_defaults.GEMMA4_ROPE
  # Without experts, their fields are unread.
  experts = {} if raw['enable_moe_block'] else dict.fromkeys(_GEMMA4_EXPERTS, 0)
  return {
    **raw,
    **experts,
    'norm_topk_prob': raw['enable_moe_block'],
    'layer_types': kinds,
    'rope_parameters': rotary,
    'hidden_size_per_layer_input': raw['hidden_size_per_layer_input'] or 0,
    'use_double_wide_mlp': 2 * raw['intermediate_size'] if wide else 0,
    **{name: size or 0 for name, size in spelled.items()},
  }


_GEMMA_FIELDS = {
  'query_pre_attn_scalar': 'query_scale',
  'final_logit_softcapping': 'final_softcap',
}
_GEMMA4_EXPERTS = {
  'num_experts': 'experts',
  'top_k_experts': 'experts_per_token',
  'moe_intermediate_size': 'expert_mlp_width',
}
_NO_CAPS = {'attention_softcap': None, 'final_softcap': None}
# A pre-norm block without Gemma's extras.
_PLAIN = {
  **_NO_CAPS,
  'norm_gain': 'direct',
  'post_norms': False,
  'scale_embeddings': False,
}
_MOE_FIELDS = {
  'num_experts': 'experts',
  'num_experts_per_tok': 'experts_per_token',
  'moe_intermediate_size': 'expert_mlp_width',
  'norm_topk_prob': 'norm_topk',
}

FAMILIES: Mapping[str, Family] = {
  family.model_type: family
  for family in (
    Family(
      'gemma',
      'GemmaForCausalLM',
      # The first files say gelu for its tanh approximation.
      gelu='gelu_tanh',
      windows_by_layer=False,
      fixed={**_NO_CAPS, 'post_norms': False},
    ),
    Family(
      'gemma2',
      'Gemma2ForCausalLM',
      weights.DECODER_ONLY_GEMMA,
      activation='hidden_activation',
      fields={**_GEMMA_FIELDS, 'attn_logit_softcapping': 'attention_softcap'},
      layer_types=_alternating(2),
    ),
    Family(
      'gemma3_text',
      'Gemma3ForCausalLM',
      weights.DECODER_ONLY_GEMMA,
      activation='hidden_activation',
      fields=_GEMMA_FIELDS,
      # Files have an attention soft-cap unused by the model.
      fixed={'qk_norm': True, 'attention_softcap': None},
      layer_types=_alternating(6),
    ),
    Family(
      'gemma4_text',
      'Gemma4ForCausalLM',
      weights.DECODER_ONLY_GEMMA4,
      activation='hidden_activation',
      fields={
        'final_logit_softcapping': 'final_softcap',
        'global_head_dim': 'global_head_dim',
        'num_global_key_value_heads': 'global_kv_heads',
        'attention_k_eq_v': 'values_are_keys',
        'hidden_size_per_layer_input': 'layer_input_width',
        'num_kv_shared_layers': 'sharing_layers',
        'use_double_wide_mlp': 'sharing_mlp_width',
        'enable_moe_block': 'experts_beside_mlp',
        'norm_topk_prob': 'norm_topk',
        **_GEMMA4_EXPERTS,
      },
      fixed={
        'attention_softcap': None,
        'query_scale': 1.0,
        'qk_norm': True,
        'value_norm': True,
        'norm_gain': 'direct_fp32',
        'layer_scalar': True,
      },
      spell=_spell_gemma4,
      has_classifier=False,
    ),
    Family('llama', 'LlamaForCausalLM', windows_by_layer=False, fixed=_PLAIN),
    Family(
      'mistral',
      'MistralForCausalLM',
      bias='none',
      bias_field=None,
      windows_by_layer=False,
      fixed=_PLAIN,
      layer_types=_mistral_kinds,
    ),
    Family(
      'qwen2',
      'Qwen2ForCausalLM',
      bias='qkv',
      bias_field=None,
      fixed=_PLAIN,
      layer_types=_qwen_kinds,
    ),
    Family(
      'qwen3',
      'Qwen3ForCausalLM',
      fixed={**_PLAIN, 'qk_norm': True},
      layer_types=_qwen_kinds,
    ),
    Family(
      'mixtral',
      'MixtralForCausalLM',
      weights.DECODER_ONLY_MIXTRAL,
      bias='none',
      bias_field=None,
      windows_by_layer=False,
      aliases={'num_experts': 'num_local_experts'},
      fields={
        'num_local_experts': 'experts',
        'num_experts_per_tok': 'experts_per_token',
      },
      fixed={**_PLAIN, 'norm_topk': True},
      layer_types=_mistral_kinds,
    ),
    Family(
      'qwen2_moe',
      'Qwen2MoeForCausalLM',
      weights.DECODER_ONLY_QWEN_MOE,
      bias='qkv',
      bias_field='qkv_bias',
      aliases={'num_local_experts': 'num_experts'},
      fields={
        **_MOE_FIELDS,
        'shared_expert_intermediate_size': 'shared_expert_width',
      },
      fixed={**_PLAIN, 'shared_expert_gate': True},
      # Versions differ in the layers that a window applies to.
      layer_types=lambda raw: [] if raw['use_sliding_window'] else [_FULL],
    ),
    Family(
      'qwen3_moe',
      'Qwen3MoeForCausalLM',
      weights.DECODER_ONLY_QWEN_MOE,
      windows_by_layer=False,
      # transformers 5 writes the first name, older versions the second.
      aliases={'num_local_experts': 'num_experts'},
      fields=_MOE_FIELDS,
      fixed={**_PLAIN, 'qk_norm': True},
      layer_types=_all_or_none,
    ),
  )
}


def layout_of(
  family: Family, stack: model_config.StackConfig
) -> weights.Layout:
  """Returns the tensor names of a stack; layers that share have unread ones."""
  names = (
    f'model.layers.{i}.self_attn.{name}.'
    for i in range(stack.owning, stack.layers)
    for name in ('k_proj', 'v_proj', 'k_norm')
  )
  ignored = *family.layout.ignored, *names
  return dataclasses.replace(family.layout, ignored=ignored)


def stack_from_raw(
  raw: Raw, family: Family, file: str
) -> model_config.StackConfig:
  """Returns the stack of a config.json or of an object in it.

  Args:
    raw: parsed object.
    family: family of the fields.
    file: name of the file, for error messages.

  Raises:
    UserError: a field is missing or unsupported by our models, or fields are
      inconsistent; names the file and fields.
  """
  spelled = {
    name: raw[alias] for alias, name in family.aliases.items() if alias in raw
  }
  raw_fields.check(raw, file)
  # An alias overrides a default, and the main spelling overrides its alias.
  raw = family.spell({**family.defaults, **spelled, **raw}, file)
  fields = dict(family.fixed)
  for theirs, ours in {**_COMMON, **family.fields}.items():
    if theirs not in raw and theirs not in _OPTIONAL:
      raise errors.UserError(f'{file} has no {theirs}. Download it again.')
    if raw.get(theirs) is not None:
      fields[ours] = raw[theirs]
    elif ours in _CAPS:
      fields[ours] = None
    elif theirs in family.fields:
      raise errors.UserError(f'{file} has no {theirs}. Download it again.')
  fields.setdefault('kv_heads', fields['heads'])
  fields.setdefault('head_dim', fields['width'] // fields['heads'])
  fields.setdefault('query_scale', fields['head_dim'])
  for ours in _FLOATS & fields.keys():  # JSON writes 30.0 as 30 too.
    if fields[ours] is not None:
      fields[ours] = float(fields[ours])
  fields['head'] = heads.Tokens(raw['tie_word_embeddings'])
  fields['activation'] = _activation(raw, family, file)
  # `raw` has the class default of an absent `bias_field`.
  has_bias = family.bias_field is None or raw.get(family.bias_field)
  fields['attention_bias'] = family.bias if has_bias else 'none'
  fields['mlp_bias'] = bool(raw.get('mlp_bias'))
  fields['pattern'] = _pattern(raw, family, file)
  if raw.get('sliding_window'):  # Qwen 2 MoE writes 0 for none.
    fields['window'] = raw['sliding_window']
  fields |= rotary_fields.fields_from_raw(
    raw, file, local_theta=family.local_theta
  )
  if 'mlp_only_layers' in raw:
    fields['dense_layers'] = _dense_layers(raw, file)
  # 'vision' is causal for text.
  if raw.get('use_bidirectional_attention') not in (None, False, 'vision'):
    raise errors.UserError(
      f'{file} sets use_bidirectional_attention; only causal decoders are'
      ' supported. Clear it, and set the role of the stack when adapting.'
    )
  try:
    return model_config.StackConfig(**fields)
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error


def raw_from_stack(
  stack: model_config.StackConfig, family: Family
) -> dict[str, Any]:
  """Returns the fields of a config.json, in the spelling of transformers 5.

  Args:
    stack: stack config.
    family: target family.

  Raises:
    UserError: no model of the family has this stack; names the field.
  """
  raw: dict[str, Any] = {
    theirs: getattr(stack, ours)
    for theirs, ours in {**_COMMON, **family.fields}.items()
  }
  raw['tie_word_embeddings'] = stack.head.tied
  raw['model_type'] = family.model_type
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  raw[family.activation] = activations.get(stack.activation, stack.activation)
  kinds = {ours: theirs for theirs, ours in KINDS.items()}
  raw['layer_types'] = [kinds[stack.layer_kind(i)] for i in range(stack.layers)]
  local = 'local' in stack.pattern
  raw['sliding_window'] = stack.window if local else None
  if 'use_sliding_window' in family.defaults:
    raw['use_sliding_window'] = local
    # For older versions without layer_types.
    raw['max_window_layers'] = raw['layer_types'].count(_FULL)
  if family.bias_field is not None:
    raw[family.bias_field] = stack.attention_bias != 'none'
  if 'mlp_bias' in family.defaults:
    raw['mlp_bias'] = stack.mlp_bias
  # An integer in published files: their class declares an integer.
  if 'query_pre_attn_scalar' in raw and stack.query_scale.is_integer():
    raw['query_pre_attn_scalar'] = int(stack.query_scale)
  for name, other in _GLOBAL.items() if 'global_head_dim' in raw else ():
    raw[name] = raw[name] or raw[other]
  if 'use_double_wide_mlp' in raw:
    raw['vocab_size_per_layer_input'] = raw['vocab_size']
    raw['use_double_wide_mlp'] = raw['use_double_wide_mlp'] > 0
    raw |= {name: raw[name] or None for name in _GEMMA4_EXPERTS}
    del raw['norm_topk_prob']  # True with experts.
  if 'mlp_only_layers' in family.defaults:
    raw['decoder_sparse_step'] = 1
    raw['mlp_only_layers'] = list(range(stack.dense_layers))
  raw['rope_parameters'] = rotary_fields.raw_from_stack(
    stack, local_theta=family.local_theta
  )
  # Reading back finds every field unsupported by the family, including fields
  # added to our configs later.
  back = stack_from_raw(raw, family, 'the exported config')
  back = comparable(dataclasses.replace(back, role=stack.role), stack)
  for field in dataclasses.fields(stack):
    ours, theirs = getattr(stack, field.name), getattr(back, field.name)
    if ours != theirs:
      raise errors.UserError(
        f'{field.name} is {ours!r}, and a {family.model_type} model can only'
        f' have {theirs!r}.'
      )
  return raw


def comparable(
  stack: model_config.StackConfig, ours: model_config.StackConfig
) -> model_config.StackConfig:
  """Copies the fields absent from a config.json from our stack.

  Args:
    stack: stack read from a config.json.
    ours: stack that the config.json was written for.
  """
  return dataclasses.replace(
    stack,
    vocab_multiple=ours.vocab_multiple,  # Padding rows are not exported.
    pattern=ours.pattern,  # The file lists the kind of every layer.
    window=stack.window if 'local' in stack.pattern else ours.window,
    window_rule=ours.window_rule,
  )


def _activation(raw: Raw, family: Family, file: str) -> str:
  """Returns our activation.

  Gemma 1 files may have two fields. They must agree, as versions of
  transformers differ in which they use.
  """
  values = {**_ACTIVATIONS, 'gelu': family.gelu}
  fields = {family.activation: values.get(raw[family.activation])}
  if raw.get('hidden_activation') is not None:
    fields['hidden_activation'] = _ACTIVATIONS.get(raw['hidden_activation'])
  activation, *conflicts = set(fields.values())
  if activation is None or conflicts:
    text = ' and '.join(f'{name} = {raw[name]!r}' for name in fields)
    raise errors.UserError(
      f'{file} has {text}; supported are {", ".join(_ACTIVATIONS)}.'
    )
  return activation


def _dense_layers(raw: Raw, file: str) -> int:
  dense = sorted(raw['mlp_only_layers'] or [])
  if raw['decoder_sparse_step'] != 1 or dense != list(range(len(dense))):
    raise errors.UserError(
      f'{file} has decoder_sparse_step = {raw["decoder_sparse_step"]} and'
      f' mlp_only_layers = {dense}; layers without experts must come'
      ' before those with them: 1, and [0, 1, ..].'
    )
  return len(dense)


def _pattern(
  raw: Raw, family: Family, file: str
) -> tuple[model_config.LayerKind, ...]:
  layers = raw['num_hidden_layers']
  named = raw.get('layer_types')
  if named is None:
    named = family.layer_types(raw)
    if not named:
      raise errors.UserError(
        f'{file} sets use_sliding_window without layer_types; versions of'
        ' transformers differ in which layers then have a window. List them.'
      )
  elif not family.windows_by_layer and (
    set(named) != (usual := set(family.layer_types(raw)))
  ):
    raise errors.UserError(
      f'{file} lists layer_types {", ".join(sorted(set(named)))}; with this'
      f' sliding_window, {family.model_type} has {", ".join(usual)} only.'
    )
  elif len(named) != layers:
    raise errors.UserError(
      f'{file} lists {len(named)} layer_types for {layers} layers.'
    )
  unknown = sorted(set(named) - set(KINDS))
  if unknown:
    raise errors.UserError(
      f'{file} has layers of type {unknown[0]!r}; supported are'
      f' {", ".join(KINDS)}.'
    )
  kinds = pattern_of([named[i % len(named)] for i in range(layers)])
  if 'local' in kinds and not raw.get('sliding_window'):
    raise errors.UserError(
      f'{file} has sliding_attention layers and no sliding_window.'
    )
  return kinds


def pattern_of(named: Sequence[str]) -> tuple[model_config.LayerKind, ...]:
  """Returns our pattern of the kinds of all layers, as files name them."""
  kinds = [KINDS[name] for name in named]
  # Shortest period: the model scans over periods, so a longer pattern compiles
  # more layers, and equal models must have equal configs.
  periods = range(1, len(kinds) + 1)
  period = next(p for p in periods if kinds[p:] == kinds[:-p])
  return tuple(kinds[:period])
