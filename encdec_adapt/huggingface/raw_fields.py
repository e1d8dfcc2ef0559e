"""Validates types and ranges of the fields of a config.json.

Files are untrusted: a string as a width, or a million layers, is an error that
names the field, raised before a model is built.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any

from encdec_adapt.base import errors

# Predicate, and a description of valid values.
_Rule = tuple[Callable[[Any], bool], str]
_LARGEST = 2**31 - 1  # Limit of every size: array libraries use 32-bit sizes.


def _integer(low: int, high: int = _LARGEST) -> _Rule:
  return (
    # Not isinstance: true and false are integers in Python.
    lambda value: type(value) is int and low <= value <= high,
    f'an integer from {low} to {high}',
  )


def _instance(kind: type, description: str) -> _Rule:
  return (lambda value: isinstance(value, kind), description)


def _list_of(kind: type, name: str) -> _Rule:
  return (
    lambda value: isinstance(value, list) and {*map(type, value)} <= {kind},
    f'a list of {name}',
  )


def _is_above_0(value: Any) -> bool:
  return type(value) in (int, float) and 0 < value < math.inf


_ROPE = 'rope_parameters rope_scaling'
_KINDS = ('full_attention', 'sliding_attention')
_FIELDS = (
  (
    _integer(1),
    """vocab_size hidden_size intermediate_size num_attention_heads
    num_key_value_heads head_dim sliding_window_pattern num_local_experts
    num_experts num_experts_per_tok moe_intermediate_size
    shared_expert_intermediate_size original_max_position_embeddings d_model
    d_kv d_ff num_heads relative_attention_num_buckets
    relative_attention_max_distance global_head_dim
    num_global_key_value_heads top_k_experts n_positions n_embd n_head
    n_inner max_position_embeddings local_attention num_labels
    global_attn_every_n_layers encoder_ffn_dim decoder_ffn_dim
    encoder_attention_heads decoder_attention_heads type_vocab_size""",
  ),
  # Each layer costs host memory and compile time before any array exists.
  (
    _integer(1, 10_000),
    """num_hidden_layers num_layers num_decoder_layers n_layer encoder_layers
    decoder_layers""",
  ),
  # Qwen 2 MoE writes a window of 0 for none.
  (
    _integer(0),
    'sliding_window max_window_layers eoi_token_index',
  ),
  (
    (_is_above_0, 'a number above 0'),
    """rms_norm_eps layer_norm_epsilon layer_norm_eps norm_eps global_rope_theta
    local_rope_theta query_pre_attn_scalar
    final_logit_softcapping attn_logit_softcapping rope_theta
    rope_local_base_freq factor low_freq_factor high_freq_factor
    partial_rotary_factor""",
  ),
  (
    _instance(bool, 'true or false'),
    """attention_bias tie_word_embeddings qkv_bias norm_topk_prob mlp_bias
    use_sliding_window scale_decoder_outputs attention_k_eq_v
    enable_moe_block scale_attn_weights scale_attn_by_inverse_layer_idx
    reorder_and_upcast_attn add_cross_attention is_decoder norm_bias
    decoder_bias classifier_bias scale_embedding""",
  ),
  (
    (
      lambda value: value in (True, False, 'vision', 'all'),
      "true, false, 'vision' or 'all'",
    ),
    'use_bidirectional_attention',
  ),
  (
    _instance(str, 'a string'),
    'model_type hidden_act hidden_activation rope_type type feed_forward_proj'
    ' activation_function position_embedding_type problem_type'
    ' classifier_pooling',
  ),
  (
    _instance(Mapping, 'an object'),
    f'{_ROPE} {" ".join(_KINDS)} per_layer_config id2label',
  ),
  (_list_of(str, 'strings'), 'layer_types architectures'),
  (_list_of(int, 'integers'), 'mlp_only_layers'),
)
_RULES: Mapping[str, _Rule] = {
  field: rule for rule, fields in _FIELDS for field in fields.split()
}
# null means off, or the default of the class.
_NULLABLE = frozenset(
  f"""{_ROPE} num_decoder_layers num_key_value_heads head_dim sliding_window
  sliding_window_pattern eoi_token_index num_experts moe_intermediate_size
  num_global_key_value_heads top_k_experts n_inner
  per_layer_config final_logit_softcapping
  attn_logit_softcapping use_bidirectional_attention layer_types
  mlp_only_layers sliding_attention hidden_activation architectures
  id2label problem_type
  """.split()
)


def check(raw: Mapping[str, Any], file: str) -> None:
  """Raises an error for an invalid value; ignores unknown fields.

  Args:
    raw: parsed config.json, or its object for a stack.
    file: name of the file, for error messages.

  Raises:
    UserError: names the field, its value and the valid values.
  """
  # First, as the other fields equal the original model's and would all pass.
  if raw.get('quantization_config'):
    raise errors.UserError(
      f'{file} has a quantization_config, and quantised weights are not'
      ' supported. Give the folder of the original model, or dequantise it with'
      ' transformers.'
    )
  _check_fields(raw, file)
  for field in _ROPE.split():
    rope, name = raw.get(field) or {}, f'{field} of {file}'
    by_kind = any(isinstance(value, Mapping) for value in rope.values())
    # Fields by kind of layer must include full attention: its default here,
    # null, is invalid.
    _check_fields({'full_attention': None, **rope} if by_kind else rope, name)
    for kind in _KINDS:
      _check_fields(rope.get(kind) or {}, f'{kind} in {name}')


def _check_fields(raw: Mapping[str, Any], file: str) -> None:
  for field, value in raw.items():
    if field not in _RULES or (value is None and field in _NULLABLE):
      continue
    fits, description = _RULES[field]
    if not fits(value):
      raise errors.UserError(
        f'{file} has {field} = {value!r}; it must be {description}.'
      )
