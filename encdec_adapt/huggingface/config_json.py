"""Converts whole models between config.json files and our configs."""

from collections.abc import Mapping
import copy
import dataclasses
from typing import Any

from encdec_adapt.base import errors, keys, saved_keys
from encdec_adapt.huggingface import (
  bart_json,
  class_defaults,
  families,
  layer_norm_json,
  raw_fields,
  t5_json,
  torch_export,
  weights,
)
from encdec_adapt.models import heads, model_config, model_section


@dataclasses.dataclass(frozen=True)
class Pair:
  """An encoder-decoder family with stacks of a decoder-only family.

  Attributes:
    model_type: `model_type` in its config.json.
    architecture: transformers class.
    family: family of both stacks.
    layout: tensor names.
    encoder_path: key path of the encoder's fields in its config.json.
    part_types: stack -> `model_type` of its fields.
    merged: whether the decoder has merged attention and both stacks share one
      embedding table.
  """

  model_type: str
  architecture: str
  family: families.Family
  layout: weights.Layout
  encoder_path: tuple[str, ...]
  part_types: Mapping[str, str]
  merged: bool = False


PAIRS: Mapping[str, Pair] = {
  pair.model_type: pair
  for pair in (
    Pair(
      't5gemma',
      'T5GemmaForConditionalGeneration',
      families.FAMILIES['gemma2'],
      weights.PAIR_T5GEMMA,
      ('encoder',),
      dict.fromkeys(('encoder', 'decoder'), 't5_gemma_module'),
    ),
    Pair(
      't5gemma2',
      'T5Gemma2ForConditionalGeneration',
      families.FAMILIES['gemma3_text'],
      weights.PAIR_T5GEMMA2,
      ('encoder', 'text_config'),
      {'encoder': 't5gemma2_text', 'decoder': 't5gemma2_decoder'},
      merged=True,
    ),
  )
}

# `model_type` of our native layout, for models without a transformers class.
NATIVE_TYPE = 'encdec_adapt'
# Multimodal models, of which we read the text part.
_WITH_TEXT = 'gemma3', 'gemma4', 'gemma4_unified'
# `model_type` of the encoder of a T5Gemma 2 alone.
ENCODER_TYPE = 't5gemma2_encoder'
# Our field, ignored by transformers, in the config.json of a T5Gemma with a
# different window rule in the encoder than in its authors' code.
WINDOW = 'encoder_window'
# Fields of a reward model: a sequence classifier with a single label.
_ONE_LABEL = {'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}}
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
# Fields absent from our model configs; an export carries them over from the
# source's config.json.
CARRIED = (
  *TOKEN_IDS,
  'max_position_embeddings',
  'initializer_range',
  'attention_dropout',
  'router_aux_loss_coef',
)


def raw_from_model(
  config: model_config.ModelConfig,
) -> tuple[dict[str, Any], weights.Layout]:
  """Returns the config.json of a model for its transformers class.

  Args:
    config: model config, written for the first family that supports it.

  Returns:
    The content in the spelling of transformers 5, and the tensor names.

  Raises:
    UserError: no transformers class supports the model; lists the reason for
      every family.
  """
  # Users of a class give it the states of all passages (`encoder_outputs`).
  config = model_config.without_passages(config)
  is_pair = config.architecture.encodes_prompt
  kind = config.decoder.head.kind
  kinds = ('tokens',) if is_pair else (*_MAKERS,)
  if config.decoder.norm == 'layer':
    kinds += ('labels',)
  if kind not in kinds:
    raise errors.UserError(
      f'transformers has no class for this model, whose head is of kind {kind}.'
    )
  if config.decoder.relative or config.decoder.norm == 'layer':
    module = bart_json if is_pair else layer_norm_json
    module = t5_json if config.decoder.relative else module
    sizes = config.decoder.head.sizes(config.decoder.width)
    if not sizes:
      return module.raw_from_model(config)
    plain = model_config.with_head(config, heads.Tokens())
    raw, layout = module.raw_from_model(plain)
    return {**raw, 'matryoshka_dimensions': list(sizes)}, layout
  reasons = []
  for family in (PAIRS if is_pair else families.FAMILIES).values():
    try:
      if is_pair:
        return _raw_from_pair(config, family), family.layout
      raw = _MAKERS[kind](config.decoder, family)
      if raw['model_type'] == ENCODER_TYPE:
        return raw, weights.ENCODER_T5GEMMA2
      return raw, families.layout_of(family, config.decoder)
    except errors.UserError as error:
      reasons.append(f'{family.model_type}: {error}')
  raise errors.UserError(
    'transformers has no class for this model. ' + ' '.join(reasons)
  )


def _raw_from_decoder(
  stack: model_config.StackConfig, family: families.Family
) -> dict[str, Any]:
  if stack.role != 'causal':
    raise errors.UserError(f'its attention is causal, and not {stack.role}.')
  raw = families.raw_from_stack(stack, family)
  return {**raw, 'architectures': [family.architecture]}


def _raw_from_reward_model(
  stack: model_config.StackConfig, family: families.Family
) -> dict[str, Any]:
  if not family.has_classifier:
    raise errors.UserError(
      'transformers has no class of its family for classification.'
    )
  plain = dataclasses.replace(stack, head=heads.Tokens(stack.head.tied))
  raw = _raw_from_decoder(plain, family)
  return {**raw, 'architectures': [family.classifier], **_ONE_LABEL}


def _raw_from_embedder(
  stack: model_config.StackConfig, family: families.Family
) -> dict[str, Any]:
  sizes = stack.head.sizes(stack.width)
  plain = dataclasses.replace(stack, head=heads.Tokens(), role='causal')
  pair = PAIRS['t5gemma2']
  # `AutoModel` fixes the `eoi_token` of this class.
  if (
    family is pair.family
    and stack.eoi_token == model_config.EOI_TOKEN
    and (stack.role, stack.window_rule) == ('bidirectional', 'centered')
  ):
    plain = dataclasses.replace(plain, eoi_token=None)
    part = families.raw_from_stack(plain, family)
    # A pair's config would set the rate; this class has no such field.
    part |= {'model_type': pair.part_types['encoder'], 'dropout_rate': 0.0}
    return {
      'model_type': ENCODER_TYPE,
      'architectures': ['T5Gemma2Encoder'],
      'text_config': part,
      'eoi_token_index': stack.eoi_token,
      'matryoshka_dimensions': list(sizes),
    }
  raw = _raw_from_decoder(plain, family)
  if stack.role != 'causal':
    # First distance outside the window; the class halves its field.
    window = stack.window + (stack.window_rule == 'inclusive')
    if stack.window_rule == 'centered':
      window = (stack.window + 1) / 2
    if family.model_type != 'gemma3_text' or window % 1:
      raise errors.UserError(
        f'it has no bidirectional attention with a {stack.window_rule} window'
        f' of {stack.window}.'
      )
    raw['sliding_window'] = 2 * (int(window) - 1)
    raw['use_bidirectional_attention'] = True
  raw['architectures'] = [f'{family.name}Model']
  return {**raw, 'matryoshka_dimensions': list(sizes)}


# By kind of head.
_MAKERS = {
  'tokens': _raw_from_decoder,
  'reward': _raw_from_reward_model,
  'embedding': _raw_from_embedder,
}


def native_from_model(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the config.json of our native layout, which supports all models."""
  section = model_section.section_from_model(config)
  code = {} if torch_export.problem(config) else torch_export.fields(config)
  if sizes := config.decoder.head.sizes(config.decoder.width):
    code = {**code, 'matryoshka_dimensions': list(sizes)}
  return {'model_type': NATIVE_TYPE, 'model': section, **code}


def pair_of(
  encoder: model_config.StackConfig,
  decoder: model_config.StackConfig,
  target: str = '',
  **options: Any,
) -> model_config.EncoderDecoderConfig:
  """Combines two decoder-only stacks into an encoder-decoder.

  Args:
    encoder: stack of the encoder.
    decoder: stack of the decoder.
    target: family of the result, one of `PAIRS`; '' for stacks of any family
      with separate cross-attention and tables.
    **options: passed to `model_config.encoder_decoder`, or to
      `model_config.t5gemma2` for a merged target.

  Raises:
    UserError: the family is unknown, or does not support the model.
  """
  if not target:
    return model_config.encoder_decoder(encoder, decoder, **options)
  if target not in PAIRS:
    raise errors.UserError(
      f'target is {target!r}; it must be one of {", ".join(PAIRS)}, or empty.'
    )
  pair = PAIRS[target]
  make = model_config.t5gemma2 if pair.merged else model_config.encoder_decoder
  try:
    for stack in (encoder, decoder):
      # Checked first, so that the error names a field of the source stack.
      families.raw_from_stack(stack, pair.family)
    model = make(encoder, decoder, **options)
    _raw_from_pair(model, pair)
  except errors.UserError as error:
    raise errors.UserError(
      f'this model cannot be a {target}, which is made of'
      f' {pair.family.model_type} stacks: {error}'
    ) from error
  return model


def _raw_from_pair(
  config: model_config.EncoderDecoderConfig, pair: Pair
) -> dict[str, Any]:
  raw: dict[str, Any] = {
    'model_type': pair.model_type,
    'architectures': [pair.architecture],
    'is_encoder_decoder': True,
    'tie_word_embeddings': config.decoder.head.tied,
    'vocab_size': config.decoder.vocab_size,
  }
  # The family's stacks are decoder-only. Fields added by a pair are written
  # below, and verified by the comparison at the end.
  plain = {
    'role': 'causal',
    'cross_width': None,
    'cross_merged': False,
    'eoi_token': None,
    'head': heads.Tokens(),
  }
  for name, stack in config.stacks.items():
    # Required by transformers' constructors, although head_dim is given.
    if stack.width % stack.heads:
      raise errors.UserError(
        f'the width of its {name}, {stack.width}, is not a multiple of its'
        f' {stack.heads} heads.'
      )
    part = families.raw_from_stack(
      dataclasses.replace(stack, **plain), pair.family
    )
    raw[name] = {**part, 'model_type': pair.part_types[name]}
  if pair.merged:
    raw['eoi_token_index'] = config.decoder.eoi_token
    raw['encoder'] = {
      'model_type': ENCODER_TYPE,
      'text_config': raw['encoder'],
      'eoi_token_index': config.decoder.eoi_token,
    }
  else:
    raw['encoder']['is_decoder'] = False
    raw['decoder']['is_decoder'] = True
    raw['decoder']['cross_attention_hidden_size'] = config.encoder.width
  rule = config.encoder.window_rule
  if rule == 'inclusive':
    raw[WINDOW] = rule
  # Reading back finds every unsupported field, including fields added to our
  # configs later.
  back, _ = model_from_raw(raw, 'the exported config')
  stacks = {
    name: families.comparable(back.stacks[name], stack)
    for name, stack in config.stacks.items()
  }
  # `comparable` ignores the window rule, which T5Gemma 2 fixes.
  is_same = dataclasses.replace(back, **stacks) == config
  if not is_same or (rule == 'centered') != pair.merged:
    raise errors.UserError(
      'the class has other roles, windows or cross-attention, or shares its'
      ' embedding tables differently.'
    )
  return raw


def _parts(
  raw: families.Raw, pair: Pair, file: str = 'config.json'
) -> dict[str, dict[str, Any]]:
  """Returns the objects of the stacks."""
  parts = {'encoder': raw, 'decoder': raw}
  for name, path in (('encoder', pair.encoder_path), ('decoder', ('decoder',))):
    for key in path:
      parts[name] = parts[name].get(key)
      if not isinstance(parts[name], Mapping):
        raise errors.UserError(
          f'{file} must have an object {".".join(path)!r}.'
        )
  return parts


def carried_fields(raw: families.Raw) -> dict[str, dict[str, Any]]:
  """Returns the fields to carry over to exports, such as token ids, by stack.

  Args:
    raw: parsed config.json of a supported model.
  """
  kind = raw.get('model_type')
  if kind == NATIVE_TYPE:
    return {k: dict(v) for k, v in raw.get('carried', {}).items()}
  if kind in (*t5_json.TYPES, *bart_json.TYPES):
    module = t5_json if kind in t5_json.TYPES else bart_json
    names = (*TOKEN_IDS, t5_json.START, *module.CARRIED)
    return {'decoder': {x: raw[x] for x in names if raw.get(x) is not None}}
  if kind in PAIRS:
    parts = {k: {**raw, **v} for k, v in _parts(raw, PAIRS[kind]).items()}
  else:
    parts = {'decoder': {**raw, **raw.get('text_config', {})}}
  return {
    name: {key: part[key] for key in CARRIED if part.get(key) is not None}
    for name, part in parts.items()
  }


def with_fields(
  raw: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  """Adds carried fields to a config.json.

  Args:
    raw: result of `raw_from_model` or `native_from_model`.
    fields: result of `carried_fields`.
  """
  kind = raw['model_type']
  if kind == NATIVE_TYPE:
    return {**raw, 'carried': {k: dict(v) for k, v in fields.items()}}
  decoder_fields = fields.get('decoder', {})
  if kind == ENCODER_TYPE:
    part = {**fields.get('encoder', decoder_fields), **raw['text_config']}
    return {**raw, 'text_config': part}
  if kind in t5_json.TYPES:
    raw = t5_json.with_fields(raw, decoder_fields)
  if raw.get('is_encoder_decoder') and kind not in PAIRS:
    raw = {**decoder_fields, **raw}
    if raw.get(t5_json.START) is None:
      # Padding, unless the vocabulary has a BOS.
      start = raw.get('bos_token_id', raw.get('pad_token_id', 0))
      raw[t5_json.START] = start
    return raw
  if kind not in PAIRS:
    fields = {**decoder_fields, **raw}
    ends = fields.get('eos_token_id')
    ends = ends if isinstance(ends, list) else [ends]
    if raw.keys() >= _ONE_LABEL.keys() and fields.get('pad_token_id') in ends:
      # The class scores the last token other than padding, which would precede
      # an EOS equal to padding. Without the id, rows have no padding.
      fields['pad_token_id'] = None
    return fields
  # transformers reads ids for generation from the top level.
  top = {k: decoder_fields[k] for k in TOKEN_IDS if k in decoder_fields}
  raw = {**top, **copy.deepcopy(raw)}
  for name, part in _parts(raw, PAIRS[kind]).items():
    part |= {**fields.get(name, decoder_fields), **part}
  return raw


def model_from_raw(
  raw: families.Raw, file: str = 'config.json'
) -> tuple[model_config.ModelConfig, weights.Layout]:
  """Returns the model of a config.json, and its tensor names.

  The window rule of T5Gemma's encoder is 'exclusive', as in its authors' code,
  unless the file has our field `WINDOW`.

  Args:
    raw: parsed file.
    file: name of the file, for error messages.

  Raises:
    UserError: the family is unsupported; or see `families.stack_from_raw`.
  """
  raw_fields.check(raw, file)
  kind = raw.get('model_type')
  if kind in _WITH_TEXT and 'text_config' in raw:
    # Multimodal files may tie at the top level only; the class default is true.
    tied = raw.get('tie_word_embeddings', True)
    raw = {'tie_word_embeddings': tied, **raw['text_config']}
    kind = f'{kind}_text'
  if kind == 'gemma4_unified_text':  # The 12B; written as gemma4_text.
    kind, raw = 'gemma4_text', {**class_defaults.GEMMA4_UNIFIED, **raw}
  if kind == NATIVE_TYPE:
    return _native_from_raw(raw, file), weights.NATIVE
  if kind in families.FAMILIES:
    family = families.FAMILIES[kind]
    stack = families.stack_from_raw(raw, family, file)
    model = model_config.DecoderOnlyConfig(stack)
    if raw.get('architectures') == [family.classifier] and (
      len(raw.get('id2label') or ()) == 1
    ):
      model = model_config.reward_model(model)
    return model, families.layout_of(family, stack)
  for module in (t5_json, layer_norm_json, bart_json):
    if kind in module.TYPES:
      return module.model_from_raw(raw, file)
  if kind not in PAIRS:
    reason = t5_json.UNSUPPORTED.get(kind, '')
    supported = [
      *families.FAMILIES,
      *_WITH_TEXT,
      *PAIRS,
      *t5_json.TYPES,
      *layer_norm_json.TYPES,
      *bart_json.TYPES,
    ]
    raise errors.UserError(
      f'{file} has model_type {kind!r}; supported are {", ".join(supported)}'
      f' and {NATIVE_TYPE}.{f" {reason}; give a T5." if reason else ""}'
    )
  return _pair_from_raw(raw, PAIRS[kind], file), PAIRS[kind].layout


def _native_from_raw(
  raw: Mapping[str, Any], file: str
) -> model_config.ModelConfig:
  """Returns the model of a config.json in our native layout.

  Raises:
    UserError: a key is unknown (from another version), or a value is invalid.
  """
  try:
    section = saved_keys.native_model(raw)
    section, _ = keys.complete(section, model_section.defaults(), 'model.')
    return model_section.model_from_section(section)
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise errors.UserError(
      f"{file} has no valid object 'model' ({type(error).__name__}: {error})."
      ' Export the model again, or download the file again.'
    ) from error


def _pair_from_raw(
  raw: families.Raw, pair: Pair, file: str
) -> model_config.EncoderDecoderConfig:
  parts = _parts(raw, pair, file)
  # transformers reads these at the top level and ignores them in the parts.
  shared = {'tie_word_embeddings': raw.get('tie_word_embeddings', True)}
  if pair.merged:
    # null, or absent in both objects, means the class default.
    eoi = raw.get('eoi_token_index', raw['encoder'].get('eoi_token_index'))
    shared['eoi_token_index'] = model_config.EOI_TOKEN if eoi is None else eoi
  stacks = {
    name: families.stack_from_raw(
      {**fields, **shared}, pair.family, f'{name} of {file}'
    )
    for name, fields in parts.items()
  }
  if pair.merged:
    try:
      return model_config.t5gemma2(
        **stacks, eoi_token=shared['eoi_token_index']
      )
    except errors.UserError as error:
      raise errors.UserError(f'{file}: {error}') from error
  rule, width = raw.get(WINDOW, 'exclusive'), stacks['encoder'].width
  cross_width = parts['decoder'].get('cross_attention_hidden_size')
  if rule not in ('exclusive', 'inclusive') or cross_width not in (None, width):
    raise errors.UserError(
      f'{file} has {WINDOW} = {rule!r} and, for its decoder,'
      f' cross_attention_hidden_size = {cross_width!r}; they must be exclusive'
      f" or inclusive, and the encoder's hidden_size, {width}."
    )
  stacks['encoder'] = dataclasses.replace(stacks['encoder'], window_rule=rule)
  return model_config.encoder_decoder(**stacks)
