"""Validates types and ranges of the fields of a config.json.

Files are untrusted: a width that is a string, or a million layers, is an error
that names the field, raised before a model is built.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

from encdec_adapt.cli import errors

# Test of a value, and a description of valid ones.
_Rule = tuple[Callable[[Any], bool], str]
_LARGEST = 2**31 - 1  # Limit of every size: array libraries use 32-bit sizes.


def _integer(low: int, most: int = _LARGEST) -> _Rule:
  """Returns the rule of integers in a range."""
  return (
    lambda value: type(value) is int and low <= value <= most,
    f'an integer from {low} to {most}',
  )


def _list_of(kind: type, name: str) -> _Rule:
  """Returns the rule of lists whose items all have one type."""
  return (
    lambda value: isinstance(value, list) and {*map(type, value)} <= {kind},
    f'a list of {name}',
  )


def _is_number(value: Any) -> bool:
  return type(value) in (int, float) and 0 < value < math.inf


_OBJECTS = ('rope_parameters', 'rope_scaling')
_RULES: Mapping[str, _Rule] = {
  field: rule
  for rule, fields in {
    _integer(1): 'vocab_size hidden_size intermediate_size num_attention_heads'
    ' num_key_value_heads head_dim sliding_window_pattern num_local_experts'
    ' num_experts num_experts_per_tok moe_intermediate_size'
    ' shared_expert_intermediate_size original_max_position_embeddings'
    ' num_channels image_size patch_size',
    _integer(1, 10_000): 'num_hidden_layers',
    # Qwen 2 MoE writes a window of 0 for none.
    _integer(0): 'sliding_window max_window_layers eoi_token_index',
    (_is_number, 'a number above 0'): 'rms_norm_eps query_pre_attn_scalar'
    ' final_logit_softcapping attn_logit_softcapping rope_theta'
    ' rope_local_base_freq factor low_freq_factor high_freq_factor',
    (lambda value: isinstance(value, bool), 'true or false'): 'attention_bias'
    ' tie_word_embeddings qkv_bias norm_topk_prob mlp_bias vision_use_head'
    ' use_sliding_window use_bidirectional_attention',
    (lambda value: isinstance(value, str), 'a string'): 'model_type hidden_act'
    ' hidden_activation rope_type type',
    (lambda value: isinstance(value, Mapping), 'an object'): ' '.join(_OBJECTS),
    _list_of(str, 'strings'): 'layer_types',
    _list_of(int, 'integers'): 'mlp_only_layers',
  }.items()
  for field in fields.split()
}
# null means off, or the default of the class.
_NULLABLE = frozenset(
  'num_key_value_heads head_dim sliding_window sliding_window_pattern'
  ' eoi_token_index final_logit_softcapping attn_logit_softcapping'
  ' use_bidirectional_attention layer_types mlp_only_layers'.split()
) | {*_OBJECTS}
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
    if field not in _RULES or (value is None and field in _NULLABLE):
      continue
    fits, wanted = _RULES[field]
    if not fits(value):
      raise errors.UserError(
        f'{file} has {field} = {value!r}; it must be {wanted}.'
      )
