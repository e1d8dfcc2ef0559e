"""Converts between config.json files of BART and mBART and our configs.

Their files are flat. Source of names and rules: transformers 5.24,
`configuration_bart.py`, `modeling_bart.py` and `modeling_mbart.py`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.huggingface import class_choice, layer_norm_json, weights
from encdec_adapt.models import heads, model_config
from encdec_adapt.ops import relative_bias

# `model_type` -> prefix of the names of its classes.
TYPES: Mapping[str, str] = {'bart': 'Bart', 'mbart': 'MBart'}
# Fields absent from our configs; an export carries them over from the source.
CARRIED = (
  *('dropout', 'attention_dropout', 'activation_dropout', 'classifier_dropout'),
  *('encoder_layerdrop', 'decoder_layerdrop', 'init_std'),
  *('forced_bos_token_id', 'forced_eos_token_id'),
)
# Fields of a stack, after its name.
_STACK = {
  'layers': 'layers',
  'ffn_dim': 'mlp_width',
  'attention_heads': 'heads',
}
_SUPPORTED = {
  'is_encoder_decoder': True,
  'is_decoder': False,
  'tie_word_embeddings': True,
}
DEFAULTS: Mapping[str, Any] = {
  'vocab_size': 50265,
  'max_position_embeddings': 1024,
  'd_model': 1024,
  'scale_embedding': False,
  'activation_function': 'gelu',
  **{
    f'{side}_{name}': value
    for side in ('encoder', 'decoder')
    for name, value in zip(_STACK, (12, 4096, 16), strict=True)
  },
  **_SUPPORTED,
}
_FIELDS = {
  'vocab_size': 'vocab_size',
  'd_model': 'width',
  'scale_embedding': 'scale_embeddings',
}
# mBART's reads labels at EOS, which a language may follow.
_CLASSIFIER = 'BartForSequenceClassification'
_OFFSET = 2  # Vectors before that of position 0.


def model_from_raw(
  raw: Mapping[str, Any], file: str
) -> tuple[model_config.ModelConfig, weights.Layout]:
  """Returns the model of a config.json, and its tensor names.

  Args:
    raw: parsed file with a `model_type` in `TYPES` and checked fields.
    file: name of the file, for error messages.

  Raises:
    UserError: a field has a value that our models do not support.
  """
  kind = raw['model_type']
  raw = {**DEFAULTS, **raw}
  layer_norm_json.check_supported(raw, file, _SUPPORTED, 'activation_function')
  # The first files name the class without a head, which is the table.
  names = [f'{TYPES[kind]}{x}' for x in ('ForConditionalGeneration', 'Model')]
  names += [_CLASSIFIER] * (kind == 'bart')
  head: heads.Head = heads.Tokens()
  is_classifier = layer_norm_json.class_of(raw, file, names) == _CLASSIFIER
  if is_classifier:
    labels = layer_norm_json.count_labels(raw, file, default=3)
    head = heads.Labels(labels, 'last', 'pooler')
  fields = {ours: raw[theirs] for theirs, ours in _FIELDS.items()}
  positions = relative_bias.Positions(
    'learned', rows=raw['max_position_embeddings'] + _OFFSET, offset=_OFFSET
  )
  stacks = {}
  for side in ('encoder', 'decoder'):
    sizes = {x: raw[f'{side}_{theirs}'] for theirs, x in _STACK.items()}
    sizes |= layer_norm_json.head_fields(raw['d_model'], sizes['heads'], file)
    try:
      stacks[side] = model_config.StackConfig(
        **layer_norm_json.BIASED | fields | sizes,
        norm_eps=1e-5,
        norms_after_sum=kind == 'bart',
        embedding_norm=True,
        positions=positions,
        activation=layer_norm_json.ACTIVATIONS[raw['activation_function']],
      )
    except errors.UserError as error:
      raise errors.UserError(f'{file}: {error}') from error
  model = model_config.encoder_decoder(**stacks, shared_table=True)
  layout = weights.BART_CLASSIFIER if is_classifier else weights.PAIR_BART
  return model_config.with_head(model, head), layout


def raw_from_model(
  config: model_config.ModelConfig,
) -> tuple[dict[str, Any], weights.Layout]:
  """Returns the config.json of an encoder-decoder with LayerNorm.

  Args:
    config: model config, written for the first class that supports it.

  Raises:
    UserError: no class does; lists the reasons.
  """
  head = config.decoder.head
  if head.fixed_bias:  # config.json has no field for it.
    head = dataclasses.replace(head, fixed_bias=False)
    config = model_config.with_head(config, head)
  return class_choice.choose(config, TYPES, _raw, model_from_raw)


def _raw(config: model_config.ModelConfig, kind: str) -> dict[str, Any]:
  stack = config.decoder
  architecture, labels = f'{TYPES[kind]}ForConditionalGeneration', {}
  if isinstance(stack.head, heads.Labels) and kind == 'bart':
    architecture = _CLASSIFIER
    labels = layer_norm_json.unnamed_labels(stack.head)
  return {
    'model_type': kind,
    'architectures': [architecture],
    **labels,
    **_SUPPORTED,
    **{theirs: getattr(stack, ours) for theirs, ours in _FIELDS.items()},
    **{
      f'{side}_{theirs}': getattr(part, ours)
      for side, part in config.stacks.items()
      for theirs, ours in _STACK.items()
    },
    'max_position_embeddings': stack.positions.rows - _OFFSET,
    'activation_function': layer_norm_json.activation_name(stack),
  }
