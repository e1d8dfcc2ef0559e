"""Types and ranges of what a config.json says, before anything is made of it.

A file comes from anywhere: a width that is a text, or layers without end, is
refused by its name.
"""

from collections.abc import Mapping
import math
from typing import Any

from encdec_adapt.cli import errors

_LARGEST = 2**31 - 1  # Of any size; what array libraries count with.
_MOST_LAYERS = 10_000
_INTEGERS = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'num_key_value_heads',
  'head_dim',
  'sliding_window',
  'sliding_window_pattern',
  'max_window_layers',
  'num_local_experts',
  'num_experts',
  'num_experts_per_tok',
  'moe_intermediate_size',
  'shared_expert_intermediate_size',
  'eoi_token_index',
  'original_max_position_embeddings',
)
# Qwen 2 MoE writes a window of 0 for none.
_FROM_ZERO = ('sliding_window', 'max_window_layers', 'eoi_token_index')
_NUMBERS = (
  'rms_norm_eps',
  'query_pre_attn_scalar',
  'final_logit_softcapping',
  'attn_logit_softcapping',
  'rope_theta',
  'rope_local_base_freq',
  'factor',
  'low_freq_factor',
  'high_freq_factor',
)
_SWITCHES = (
  'tie_word_embeddings',
  'attention_bias',
  'qkv_bias',
  'norm_topk_prob',
  'mlp_bias',
  'use_sliding_window',
  'use_bidirectional_attention',
)
_TEXTS = ('model_type', 'hidden_act', 'hidden_activation', 'rope_type', 'type')
_OBJECTS = ('rope_parameters', 'rope_scaling')
_KINDS = ('full_attention', 'sliding_attention')
# Null is a value of its own: off, or for the class to decide.
_MAY_BE_NULL = (
  'num_key_value_heads',
  'head_dim',
  'sliding_window',
  'sliding_window_pattern',
  'eoi_token_index',
  'final_logit_softcapping',
  'attn_logit_softcapping',
  'use_bidirectional_attention',
  'layer_types',
  *_OBJECTS,
)


def check(raw: Mapping[str, Any], file: str) -> None:
  """Refuses values that no model has; fields of other meaning are let be.

  Args:
    raw: a parsed config.json, or the part of one that describes a stack.
    file: what errors call it.

  Raises:
    UserError: names the field, its value and what it should be.
  """
  if raw.get('quantization_config'):
    raise errors.UserError(
      f'{file} has a quantization_config: its weights are quantised, and none'
      ' of ours are. Give the folder of the model as it was before, or save'
      ' it dequantised with transformers.'
    )
  _check_fields(raw, file)
  for field in _OBJECTS:
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
    wanted = _wanted(field, value)
    if wanted is not None:
      raise errors.UserError(
        f'{file} has {field} = {value!r}; it must be {wanted}.'
      )


def _wanted(field: str, value: Any) -> str | None:
  """What a field's value should be; None where it is that."""
  if value is None:
    known = (*_INTEGERS, *_NUMBERS, *_SWITCHES, *_TEXTS, 'layer_types')
    is_fine = field in _MAY_BE_NULL or field not in known
    return None if is_fine else 'given, or left out'
  if field in _INTEGERS:
    low = 0 if field in _FROM_ZERO else 1
    most = _MOST_LAYERS if field == 'num_hidden_layers' else _LARGEST
    fits = type(value) is int and low <= value <= most
    return None if fits else f'an integer from {low} to {most}'
  if field in _NUMBERS:
    fits = type(value) in (int, float) and 0 < value < math.inf
    return None if fits else 'a number above 0'
  if field in _SWITCHES:
    return None if isinstance(value, bool) else 'true or false'
  if field in _TEXTS:
    return None if isinstance(value, str) else 'a text'
  if field in _OBJECTS:
    return None if isinstance(value, Mapping) else 'an object'
  if field == 'layer_types':
    is_list = isinstance(value, list) and all(type(x) is str for x in value)
    return None if is_list else 'a list of texts'
  return None
