"""Defaults of transformers classes for fields absent from config.json.

Published files omit fields equal to the default, and parts of composite files
even sizes: the text config of Gemma 3 4B has five fields. Hence Gemma 2 to 4
have default sizes; other families must state theirs. Source: transformers 5.24,
`configuration_<family>.py`; a test in tests/parity compares every entry with
the installed version. Fields unused by our models are omitted.
"""

from collections.abc import Mapping
from typing import Any

_GEMMA = {
  'vocab_size': 256000,
  'head_dim': 256,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': True,
  'rope_theta': 10000.0,
  'attention_bias': False,
}
# Gemma 2 2B; the classes of Gemma 3 and 4 have the same sizes.
_SIZES = {
  **_GEMMA,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'sliding_window': 4096,
  'hidden_activation': 'gelu_pytorch_tanh',
}
_GEMMA2 = {**_SIZES, 'query_pre_attn_scalar': 256}
# No sizes: a file of these families without sizes is damaged.
_PLAIN = {
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': False,
  'hidden_act': 'silu',
  'rope_theta': 10000.0,
}
_BIAS = {'attention_bias': False}
# Files have a window even if it is unused (`use_sliding_window`).
_SLIDING = {**_PLAIN, 'use_sliding_window': False, 'sliding_window': 4096}
_QWEN = {**_SLIDING, 'max_window_layers': 28}
_QWEN_MOE = {
  **_SLIDING,
  'norm_topk_prob': False,
  'mlp_only_layers': None,
  'decoder_sparse_step': 1,
}
_T5 = {
  'relative_attention_num_buckets': 32,
  'relative_attention_max_distance': 128,
  'layer_norm_epsilon': 1e-6,
  'feed_forward_proj': 'relu',
}
_MT5 = {**_T5, 'feed_forward_proj': 'gated-gelu'}

GEMMA4_ROPE: Mapping[str, Any] = {
  'full_attention': {
    'rope_type': 'proportional',
    'partial_rotary_factor': 0.25,
  },
  'sliding_attention': {},
}
# Of gemma4_unified_text, where they differ from those of gemma4_text.
GEMMA4_UNIFIED: Mapping[str, Any] = {
  'sliding_window': 1024,
  'hidden_size_per_layer_input': 0,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  'gemma': {**_GEMMA, 'hidden_act': 'gelu_pytorch_tanh'},
  'gemma2': {
    **_GEMMA2,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
  },
  'gemma3_text': {
    **_GEMMA2,
    'vocab_size': 262208,
    'rope_theta': 1e6,
    'rope_local_base_freq': 10000.0,
    'final_logit_softcapping': None,
  },
  'gemma4_text': {
    **_SIZES,
    'vocab_size': 262144,
    'num_hidden_layers': 30,
    'sliding_window': 512,
    'final_logit_softcapping': None,
    'attention_k_eq_v': False,
    'hidden_size_per_layer_input': 256,
    'num_kv_shared_layers': 0,
    'use_double_wide_mlp': False,
    'enable_moe_block': False,
    'num_experts': None,
    'top_k_experts': None,
    'moe_intermediate_size': None,
    'rope_theta': 1e6,
    'rope_local_base_freq': 10000.0,
    'rope_parameters': GEMMA4_ROPE,
  },
  'llama': {**_PLAIN, **_BIAS, 'mlp_bias': False},
  'mistral': {**_PLAIN, 'sliding_window': 4096},
  'qwen2': _QWEN,
  'qwen3': {**_QWEN, **_BIAS, 'head_dim': 128},
  'mixtral': {**_PLAIN, 'rms_norm_eps': 1e-5, 'rope_theta': 1e6},
  'qwen2_moe': {**_QWEN_MOE, 'qkv_bias': True},
  'qwen3_moe': {**_QWEN_MOE, **_BIAS},
  't5': _T5,
  'mt5': _MT5,
  'umt5': _MT5,
}
