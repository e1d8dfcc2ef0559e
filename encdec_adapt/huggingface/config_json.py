"""Whole models: what a config.json says, as our model configs, and back."""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import families, own_config, raw_fields, weights
from encdec_adapt.models import model_config


@dataclasses.dataclass(frozen=True)
class Pair:
  """An encoder-decoder family, of two stacks of a decoder-only one.

  Attributes:
    model_type: of its config.json.
    architecture: class that transformers loads it with.
    family: what its stacks are.
    layout: names of its tensors.
    encoder_path: where the encoder's fields are in its config.json.
    part_types: model_type of the fields of each stack.
    merged: one attention in the decoder and one table for both stacks.
  """

  model_type: str
  architecture: str
  family: families.Family
  layout: weights.Layout
  encoder_path: tuple[str, ...]
  part_types: Mapping[str, str]
  merged: bool = False


PAIRS: Mapping[str, Pair] = types.MappingProxyType(
  {
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
)

# A field of ours in the config.json of a T5Gemma whose encoder has another
# rule than its authors'. Transformers ignores it.
WINDOW = 'encoder_window'
TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
# What export carries from the config.json that a model came with.
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
  """The config.json of a model that transformers has a class for.

  Args:
    config: the model. Its family is the first that can express it.

  Returns:
    The object, in the spelling of transformers 5, and the names of the
    model's tensors.

  Raises:
    UserError: no class of transformers can express the model; says why for
      every family.
  """
  if isinstance(config, model_config.DecoderOnlyConfig):
    return _raw_from_decoder(config.decoder)
  reasons = []
  for pair in PAIRS.values():
    try:
      return _raw_from_pair(config, pair), pair.layout
    except errors.UserError as error:
      reasons.append(f'{pair.model_type}: {error}')
  raise errors.UserError(
    'transformers has no class for this model. ' + ' '.join(reasons)
  )


def pair_of(
  encoder: model_config.StackConfig,
  decoder: model_config.StackConfig,
  target: str = '',
  **options: Any,
) -> model_config.EncoderDecoderConfig:
  """The encoder-decoder of two stacks, of a family where one is asked for.

  Args:
    encoder: of a decoder-only model; becomes the encoder.
    decoder: the same of the decoder.
    target: model_type of the family, one of `PAIRS`; '' for cross-attention
      and a table for each stack, of stacks of any family.
    **options: of `models.model_config.encoder_decoder`, or of `t5gemma2` there.

  Raises:
    UserError: no such family, or the model is none of it; says why.
  """
  if not target:
    return model_config.encoder_decoder(encoder, decoder, **options)
  if target not in PAIRS:
    raise errors.UserError(
      f'target is {target!r}; it is one of {", ".join(PAIRS)}, or empty.'
    )
  pair = PAIRS[target]
  make = model_config.t5gemma2 if pair.merged else model_config.encoder_decoder
  try:
    for stack in (encoder, decoder):
      families.raw_from_stack(stack, pair.family)
    model = make(encoder, decoder, **options)
    _raw_from_pair(model, pair)
  except errors.UserError as error:
    raise errors.UserError(
      f'this model is no {target}, which is made of'
      f' {pair.family.model_type} stacks: {error}'
    ) from error
  return model


def _raw_from_decoder(
  stack: model_config.StackConfig,
) -> tuple[dict[str, Any], weights.Layout]:
  reasons = []
  for family in families.FAMILIES.values():
    try:
      raw = families.raw_from_stack(stack, family)
    except errors.UserError as error:
      reasons.append(f'{family.model_type}: {error}')
    else:
      return {**raw, 'architectures': [family.architecture]}, family.layout
  raise errors.UserError(
    'transformers has no class for this model. ' + ' '.join(reasons)
  )


def _raw_from_pair(
  config: model_config.EncoderDecoderConfig, pair: Pair
) -> dict[str, Any]:
  found = (config.shared_table, config.decoder.cross_merged)
  if found != (pair.merged,) * 2:
    raise errors.UserError(
      f'its models have {_sharing(pair.merged, pair.merged)}; this one has'
      f' {_sharing(*found)}.'
    )
  raw: dict[str, Any] = {
    'model_type': pair.model_type,
    'architectures': [pair.architecture],
    'is_encoder_decoder': True,
    'tie_word_embeddings': config.decoder.tied_head,
    'vocab_size': config.decoder.vocab_size,
  }
  plain = {
    'role': 'causal',
    'cross_width': None,
    'cross_merged': False,
    'eoi_token': None,
    'tied_head': True,
  }
  for name, stack in config.stacks.items():
    if stack.width % stack.heads:
      raise errors.UserError(
        f'the width of its {name}, {stack.width}, is no multiple of its'
        f' {stack.heads} heads.'
      )
    part = families.raw_from_stack(
      dataclasses.replace(stack, **plain), pair.family
    )
    raw[name] = {**part, 'model_type': pair.part_types[name]}
  if pair.merged:
    raw['eoi_token_index'] = config.decoder.eoi_token
    raw['encoder'] = {
      'model_type': 't5gemma2_encoder',
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
  back, _ = model_from_raw(raw, 'the exported config')
  same = dataclasses.replace(
    back,
    encoder=_comparable(back.encoder, config.encoder),
    decoder=_comparable(back.decoder, config.decoder),
  )
  if same != config or (rule == 'centered') != pair.merged:
    raise errors.UserError(
      'its roles, windows or cross-attention are not those of the class.'
    )
  return raw


def _sharing(shared_table: bool, merged: bool) -> str:
  """Words for what a pair's stacks have together."""
  tables = 'one table' if shared_table else 'two tables'
  return f'{tables} and {"merged " if merged else "separate cross-"}attention'


def _paths(pair: Pair) -> dict[str, tuple[str, ...]]:
  """Where the fields of each stack are in a config.json."""
  return {'encoder': pair.encoder_path, 'decoder': ('decoder',)}


def _part(
  raw: families.Raw, path: tuple[str, ...], file: str
) -> dict[str, Any]:
  for key in path:
    raw = raw.get(key)
    if not isinstance(raw, Mapping):
      raise errors.UserError(
        f'{file} needs an object {".".join(path)!r}, and has none.'
      )
  return dict(raw)


def carried_fields(raw: families.Raw) -> dict[str, dict[str, Any]]:
  """Fields of a config.json that are no part of our model but of its use.

  Args:
    raw: the parsed file, of a model that we read.

  Returns:
    Token ids, `max_position_embeddings` and the like, by stack.
  """
  kind = raw.get('model_type')
  if kind == own_config.MODEL_TYPE:
    return {k: dict(v) for k, v in raw.get('carried', {}).items()}
  if kind in PAIRS:
    parts = {
      name: {**raw, **_part(raw, path, 'config.json')}
      for name, path in _paths(PAIRS[kind]).items()
    }
  else:
    parts = {'decoder': {**raw, **raw.get('text_config', {})}}
  return {
    name: {key: part[key] for key in CARRIED if part.get(key) is not None}
    for name, part in parts.items()
  }


def with_fields(
  raw: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  """A config.json with carried fields in their places.

  Args:
    raw: from `raw_from_model`, or of our own layout.
    fields: as `carried_fields` gives them.
  """
  kind = raw['model_type']
  if kind == own_config.MODEL_TYPE:
    return {**raw, 'carried': {k: dict(v) for k, v in fields.items()}}
  own = dict(fields.get('decoder', {}))
  if kind not in PAIRS:
    return {**own, **raw}
  top = {key: own[key] for key in TOKEN_IDS if key in own}
  raw = {**top, **raw}
  for name, path in _paths(PAIRS[kind]).items():
    raw = _with_part(raw, path, fields.get(name, own))
  return raw


def _with_part(
  raw: Mapping[str, Any], path: tuple[str, ...], fields: Mapping[str, Any]
) -> dict[str, Any]:
  if not path:
    return {**fields, **raw}
  return {**raw, path[0]: _with_part(raw[path[0]], path[1:], fields)}


def _comparable(
  stack: model_config.StackConfig, ours: model_config.StackConfig
) -> model_config.StackConfig:
  """The stack with what a config.json does not say as in ours."""
  return dataclasses.replace(
    stack,
    vocab_multiple=ours.vocab_multiple,
    pattern=ours.pattern,
    window=stack.window if 'local' in stack.pattern else ours.window,
    window_rule=ours.window_rule,
  )


def model_from_raw(
  raw: families.Raw, file: str = 'config.json'
) -> tuple[model_config.ModelConfig, weights.Layout]:
  """The model that a config.json describes, and the names of its tensors.

  The window of T5Gemma's encoder is 'exclusive', as its authors', unless the
  file has our field `WINDOW`.

  Args:
    raw: the parsed file.
    file: what errors call it.

  Raises:
    UserError: a family that is not supported, or as `families.stack_from_raw`.
  """
  raw_fields.check(raw, file)
  kind = raw.get('model_type')
  if kind == 'gemma3' and 'text_config' in raw:
    tied = raw.get('tie_word_embeddings', True)
    raw = {'tie_word_embeddings': tied, **raw['text_config']}
    kind = 'gemma3_text'
  if kind == own_config.MODEL_TYPE:
    return own_config.model_from_raw(raw, file), weights.OWN
  if kind in families.FAMILIES:
    family = families.FAMILIES[kind]
    stack = families.stack_from_raw(raw, family, file)
    return model_config.DecoderOnlyConfig(stack), family.layout
  if kind not in PAIRS:
    raise errors.UserError(
      f'{file} has model_type {kind!r}; supported are'
      f' {", ".join([*families.FAMILIES, "gemma3", *PAIRS])} and'
      f' {own_config.MODEL_TYPE}.'
    )
  pair = PAIRS[kind]
  parts = {name: _part(raw, path, file) for name, path in _paths(pair).items()}
  shared = {'tie_word_embeddings': raw.get('tie_word_embeddings', True)}
  if pair.merged:
    eoi = raw.get('eoi_token_index', raw['encoder'].get('eoi_token_index'))
    shared['eoi_token_index'] = model_config.EOI_TOKEN if eoi is None else eoi
  stacks = {}
  for name, fields in parts.items():
    where = f'{name} of {file}'
    stacks[name] = families.stack_from_raw(
      {**fields, **shared}, pair.family, where
    )
  if pair.merged:
    eoi_token = shared['eoi_token_index']
    _check_merged(**stacks, eoi_token=eoi_token, kind=kind, file=file)
    return model_config.t5gemma2(**stacks, eoi_token=eoi_token), pair.layout
  stacks['encoder'] = dataclasses.replace(
    stacks['encoder'], window_rule=_window(raw, file)
  )
  width = parts['decoder'].get('cross_attention_hidden_size')
  if width is not None and width != stacks['encoder'].width:
    raise errors.UserError(
      f'decoder of {file} has cross_attention_hidden_size = {width!r}; the'
      f' hidden_size of its encoder is {stacks["encoder"].width}.'
    )
  return model_config.encoder_decoder(**stacks), pair.layout


def _check_merged(
  encoder: model_config.StackConfig,
  decoder: model_config.StackConfig,
  *,
  eoi_token: int,
  kind: str,
  file: str,
) -> None:
  """Refuses stacks that cannot have one table and one attention."""
  for theirs, ours in {
    'hidden_size': 'width',
    'vocab_size': 'vocab_size',
  }.items():
    found = [getattr(stack, ours) for stack in (encoder, decoder)]
    if found[0] != found[1]:
      raise errors.UserError(
        f'{file} has {theirs} = {found[0]} for its encoder and {found[1]} for'
        f' its decoder; those of a {kind} are equal, for both read one'
        ' embedding table. Correct the file, or fetch it again.'
      )
  if eoi_token >= decoder.vocab_size:
    raise errors.UserError(
      f'{file}: eoi_token_index is {eoi_token} (where the file is silent, that'
      ' of the class); it must be an id below vocab_size,'
      f' {decoder.vocab_size}. Correct the file, or fetch it again.'
    )


def _window(raw: families.Raw, file: str) -> str:
  """The `window_rule` of a T5Gemma's encoder."""
  rule = raw.get(WINDOW, 'exclusive')
  if rule not in ('exclusive', 'inclusive'):
    raise errors.UserError(
      f'{file} has {WINDOW} = {rule!r}; it must be exclusive or inclusive.'
    )
  return rule
