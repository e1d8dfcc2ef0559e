"""Converts between config.json files of T5, mT5 and UMT5 and our configs.

Their files are flat: the stacks share all fields except the number of layers.
Source of names and rules: transformers 5.24, `configuration_t5.py`. Version 5
writes every head as tied, so `folder` decides by the tensors.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.huggingface import class_choice, class_defaults, weights
from encdec_adapt.models import heads, model_config
from encdec_adapt.ops import relative_bias

# `model_type` -> prefix of the names of its classes.
TYPES: Mapping[str, str] = {'t5': 'T5', 'mt5': 'MT5', 'umt5': 'UMT5'}
# Related classes with different attention or feed-forward.
UNSUPPORTED: Mapping[str, str] = {
  'longt5': 'LongT5 and mLongT5 attend in blocks',
  'switch_transformers': 'Switch transformers drop tokens by capacity',
}
START = 'decoder_start_token_id'
# Fields absent from our configs; an export carries them over from the source.
CARRIED = ('model_type', 'dropout_rate', 'initializer_factor')
_FIELDS = {
  'vocab_size': 'vocab_size',
  'd_model': 'width',
  'd_ff': 'mlp_width',
  'num_layers': 'layers',
  'num_heads': 'heads',
  'd_kv': 'head_dim',
  'layer_norm_epsilon': 'norm_eps',
}
_FIXED = {
  'pattern': ('global',),
  'query_scale': 1.0,
  'attention_softcap': None,
  'final_softcap': None,
  'norm_gain': 'direct',
  'post_norms': False,
  'scale_embeddings': False,
}
# `feed_forward_proj` -> our activation, and whether it is gated.
_FEED_FORWARDS = {
  'relu': ('relu', False),
  'silu': ('silu', False),
  'gelu_new': ('gelu_tanh', False),
  'gated-relu': ('relu', True),
  'gated-silu': ('silu', True),
  # The classes use the tanh approximation.
  'gated-gelu': ('gelu_tanh', True),
}


def model_from_raw(
  raw: Mapping[str, Any], file: str
) -> tuple[model_config.ModelConfig, weights.Layout]:
  """Returns the model of a config.json, and its tensor names.

  Args:
    raw: parsed file with a `model_type` in `TYPES` and checked fields.
    file: name of the file, for error messages.

  Raises:
    UserError: a size is missing, or the feed-forward is not supported.
  """
  kind = raw['model_type']
  raw = {**class_defaults.DEFAULTS[kind], **raw}
  for name in _FIELDS:
    if name not in raw:
      raise errors.UserError(f'{file} has no {name}. Download it again.')
  fields = {ours: raw[theirs] for theirs, ours in _FIELDS.items()} | _FIXED
  if raw['feed_forward_proj'] not in _FEED_FORWARDS:
    raise errors.UserError(
      f'{file} has feed_forward_proj = {raw["feed_forward_proj"]!r}; supported'
      f' are {", ".join(_FEED_FORWARDS)}.'
    )
  activation, gated = _FEED_FORWARDS[raw['feed_forward_proj']]
  fields |= {
    'norm_eps': float(raw['layer_norm_epsilon']),
    'kv_heads': raw['num_heads'],
    'activation': activation,
    'mlp_gated': gated,
  }
  try:
    fields['positions'] = relative_bias.Positions(
      'relative_each' if kind == 'umt5' else 'relative',
      raw['relative_attention_num_buckets'],
      raw['relative_attention_max_distance'],
    )
    if raw.get('architectures') == [f'{TYPES[kind]}EncoderModel']:
      stack = model_config.StackConfig(**fields, role='bidirectional')
      model = model_config.DecoderOnlyConfig(stack)
      return model, weights.t5_layout(gated=gated, pair=False)
    encoder = model_config.StackConfig(**fields)
    fields['layers'] = raw.get('num_decoder_layers') or encoder.layers
    tied = raw.get('tie_word_embeddings', True)
    # Absent in files of version 4, which scales tied heads. mT5's class never
    # scales, whatever its files say.
    scaled = kind != 'mt5' and raw.get('scale_decoder_outputs', tied)
    decoder = model_config.StackConfig(
      **fields, head=heads.Tokens(tied, scaled)
    )
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error
  model = model_config.encoder_decoder(encoder, decoder, shared_table=True)
  return model, weights.t5_layout(gated=gated, pair=True)


def raw_from_model(
  config: model_config.ModelConfig,
) -> tuple[dict[str, Any], weights.Layout]:
  """Returns the config.json of a model with relative positions.

  Args:
    config: model config, written for the first class that supports it.

  Raises:
    UserError: no class does; lists the reasons.
  """
  return class_choice.choose(config, TYPES, _raw, model_from_raw)


def _raw(config: model_config.ModelConfig, kind: str) -> dict[str, Any]:
  pair, decoder = config.architecture.encodes_prompt, config.decoder
  stack = config.encoder if pair else decoder
  feed_forwards = {ours: theirs for theirs, ours in _FEED_FORWARDS.items()}
  raw = {
    'model_type': kind,
    'is_encoder_decoder': pair,
    **{theirs: getattr(stack, ours) for theirs, ours in _FIELDS.items()},
    'feed_forward_proj': feed_forwards[stack.activation, stack.mlp_gated],
    'relative_attention_num_buckets': decoder.relative.buckets,
    'relative_attention_max_distance': decoder.relative.distance,
  }
  if not pair:
    return {**raw, 'architectures': [f'{TYPES[kind]}EncoderModel']}
  return {
    **raw,
    'architectures': [f'{TYPES[kind]}ForConditionalGeneration'],
    'num_decoder_layers': decoder.layers,
    'tie_word_embeddings': decoder.head.tied,
    'scale_decoder_outputs': decoder.head.scaled,
  }


def with_fields(
  raw: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a config.json with the fields of its source.

  Args:
    raw: result of `raw_from_model`.
    fields: carried fields of the source's decoder.
  """
  kind = fields.get('model_type')
  raw = {**fields, **raw}
  if kind in TYPES and kind != raw['model_type']:
    # Keeps the source's class if it computes the same model: mT5 and T5 1.1
    # differ only in name.
    name = raw['architectures'][0].removeprefix(TYPES[raw['model_type']])
    classes = [f'{TYPES[kind]}{name}']
    renamed = {**raw, 'model_type': kind, 'architectures': classes}
    if model_from_raw(renamed, '')[0] == model_from_raw(raw, '')[0]:
      raw = renamed
  return raw
