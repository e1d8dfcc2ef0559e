"""Validates types and ranges of the fields of a config.json.

Files are untrusted: a width that is a string, or a million layers, is an error
that names the field, raised before a model is built.
"""

from collections.abc import Mapping
import math
from typing import Any

from encdec_adapt.cli import errors

_LARGEST = 2**31 - 1  # Limit of every size: array libraries use 32-bit sizes.
_MOST_LAYERS = 10_000
_INTEGERS = frozenset(
  'vocab_size hidden_size intermediate_size num_hidden_layers'
  ' num_attention_heads num_key_value_heads head_dim sliding_window'
  ' sliding_window_pattern max_window_layers num_local_experts num_experts'
  ' num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size'
  ' eoi_token_index original_max_position_embeddings num_channels image_size'
  ' patch_size'.split()
)
# Qwen 2 MoE writes a window of 0 for none.
_FROM_ZERO = ('sliding_window', 'max_window_layers', 'eoi_token_index')
_NUMBERS = frozenset(
  'rms_norm_eps query_pre_attn_scalar final_logit_softcapping'
  ' attn_logit_softcapping rope_theta rope_local_base_freq factor'
  ' low_freq_factor high_freq_factor'.split()
)
_SWITCHES = frozenset(
  'tie_word_embeddings attention_bias qkv_bias norm_topk_prob mlp_bias'
  ' use_sliding_window use_bidirectional_attention vision_use_head'.split()
)
_TEXTS = frozenset(
  'model_type hidden_act hidden_activation rope_type type'.split()
)
_OBJECTS = frozenset(('rope_parameters', 'rope_scaling'))
# null means off, or the default of the class.
_NULLABLE = _OBJECTS | frozenset(
  'num_key_value_heads head_dim sliding_window sliding_window_pattern'
  ' eoi_token_index final_logit_softcapping attn_logit_softcapping'
  ' use_bidirectional_attention layer_types'.split()
)
_KINDS = ('full_attention', 'sliding_attention')


def check(raw: Mapping[str, Any], file: str) -> None:
  """Raises an error for an invalid value; ignores unknown fields.

  Args:
    raw: parsed config.json, or the part of one that describes a stack.
    file: name of the file, for error messages.

  Raises:
    UserError: names the field, its value and what it must be.
  """
  if raw.get('quantization_config'):
    raise errors.UserError(
      f'{file} has a quantization_config, and quantised weights are not'
      ' supported. Give the folder of the original model, or dequantise it with'
      ' transformers.'
    )
  _check_fields(raw, file)
  for field in sorted(_OBJECTS):
    rope, where = raw.get(field) or {}, f'{field} of {file}'
    _check_fields(rope, where)
    by_kind = any(isinstance(value, Mapping) for value in rope.values())
    for kind in _KINDS:
      part = rope.get(kind)
      if part is None and not (by_kind and kind == 'full_attention'):
        continue
      if not isinstance(part, Mapping):
        raise errors.UserError(
          f'{where} has {kind} = {part!r}; it must be an object.'
        )
      _check_fields(part, f'{kind} in {where}')


def _check_fields(raw: Mapping[str, Any], file: str) -> None:
  for field, value in raw.items():
    if value is None and field in _NULLABLE:
      continue
    fits, wanted = _rule(field, value)
    if not fits:
      raise errors.UserError(
        f'{file} has {field} = {value!r}; it must be {wanted}.'
      )


def _rule(field: str, value: Any) -> tuple[bool, str]:
  """Returns whether a value is valid, and a description of valid ones."""
  if field in _INTEGERS:
    low = 0 if field in _FROM_ZERO else 1
    most = _MOST_LAYERS if field == 'num_hidden_layers' else _LARGEST
    fits = type(value) is int and low <= value <= most
    return fits, f'an integer from {low} to {most}'
  if field in _NUMBERS:
    fits = type(value) in (int, float) and 0 < value < math.inf
    return fits, 'a number above 0'
  if field in _SWITCHES:
    return isinstance(value, bool), 'true or false'
  if field in _TEXTS:
    return isinstance(value, str), 'a string'
  if field in _OBJECTS:
    return isinstance(value, Mapping), 'an object'
  if field == 'layer_types':
    fits = isinstance(value, list) and all(type(x) is str for x in value)
    return fits, 'a list of strings'
  return True, ''
