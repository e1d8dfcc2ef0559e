"""Shapes of released models and toy models.

Gemma 2 (Gemma Team 2024), T5Gemma (Zhang et al. 2025), Gemma 3 and T5Gemma 2
(arXiv 2512.14856): sizes as in google-deepmind/gemma; Llama 3 and Qwen: as in
google/tunix and AI-Hypercomputer/maxtext; T5 and its variants: as in
google-research/t5x. The defaults of `StackConfig` are Gemma 2's window,
soft-caps, theta and epsilon.

Shapes only: `huggingface`, which this module does not import, has names and
files of checkpoints.
"""

from collections.abc import Mapping
import dataclasses
import operator
import types
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.models import heads
from encdec_adapt.models import model_config as configs
from encdec_adapt.ops import relative_bias, rope

GEMMA2_VOCABULARY = 256000
UNTIED = heads.Tokens(tied=False)


# `sizes` in this module: layers, width, mlp width, heads, key/value heads, head
# dim.
def _shape(*sizes, **fields):
  *_, head_dim = sizes
  common = dict(vocab_size=GEMMA2_VOCABULARY, query_scale=float(head_dim))
  return configs.StackConfig(*sizes, **{**common, **fields})


def _toy(layers, width, heads):
  sizes = layers, width, 4 * width, heads, heads // 2, 32
  return _shape(*sizes, vocab_size=4096, window=64)


def _gemma3(*sizes, **fields):
  gemma3 = dict(
    vocab_size=262144,
    pattern=('local',) * 5 + ('global',),
    window=512,
    # Norms of queries and keys replaced the soft-caps.
    attention_softcap=None,
    final_softcap=None,
    qk_norm=True,
    rope_theta=1e6,
    local_rope_theta=1e4,
  )
  # All sizes have a head dimension of 256.
  return _shape(*sizes, 256, **{**gemma3, **fields})


def _gemma4(*sizes, **fields):
  gemma4 = dict(
    query_scale=1.0,
    window=1024,
    final_softcap=30.0,
    norm_gain='direct_fp32',
    value_norm=True,
    global_head_dim=512,
    values_are_keys=True,
    layer_scalar=True,
    rope_scaling=rope.Scaling('proportional'),
  )
  return _gemma3(*sizes, **{**gemma4, **fields})


def _gemma4_small(*sizes, local, **fields):
  return _gemma4(
    *sizes,
    pattern=('local',) * local + ('global',),
    window=512,
    values_are_keys=False,
    layer_input_width=256,
    **fields,
  )


def _plain(*sizes, **fields):
  """Returns a pre-norm stack without Gemma's additions."""
  plain = dict(
    pattern=('global',),
    attention_softcap=None,
    final_softcap=None,
    norm_gain='direct',
    post_norms=False,
    activation='silu',
    scale_embeddings=False,
  )
  return _shape(*sizes, **{**plain, **fields})


def _llama2(*sizes):
  return _plain(*sizes, vocab_size=32000, norm_eps=1e-5, head=UNTIED)


def _llama3(*sizes, factor, **fields):
  return _plain(
    *sizes,
    vocab_size=128256,
    norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=rope.Scaling('llama3', float(factor)),
    **fields,
  )


def _qwen25(*sizes, **fields):
  qwen = dict(vocab_size=151936, rope_theta=1e6, attention_bias='qkv')
  return _plain(*sizes, **{**qwen, **fields})


def _qwen3(*sizes, **fields):
  qwen = dict(vocab_size=151936, rope_theta=1e6, qk_norm=True)
  return _plain(*sizes, **{**qwen, **fields})


# query_scale is head_dim, 256, in 9B (224 in its first exports), and width /
# heads, 144, in 27B.
_GEMMA2: Mapping[str, configs.StackConfig] = types.MappingProxyType(
  {
    's': _shape(8, 512, 1024, 8, 8, 64),
    'b': _shape(12, 768, 2048, 12, 12, 64),
    'l': _shape(24, 1024, 2816, 16, 16, 64),
    'ml': _shape(26, 1152, 6912, 4, 4, 256),
    'xl': _shape(24, 2048, 5120, 32, 32, 64),
    '2b': _shape(26, 2304, 9216, 8, 4, 256),
    '9b': _shape(42, 3584, 14336, 16, 8, 256),
    '27b': _shape(46, 4608, 36864, 32, 16, 128, query_scale=144.0),
    'toy_small': _toy(2, 64, 2),
    'toy': _toy(4, 128, 4),
    'toy_large': _toy(6, 256, 8),
  }
)
# In transformers the larger models have 64 unused rows.
_LARGE_GEMMA3 = dict(
  vocab_size=262208, window=1024, rope_scaling=rope.Scaling('linear')
)
_GEMMA3: Mapping[str, configs.StackConfig] = types.MappingProxyType(
  {
    '270m': _gemma3(18, 640, 2048, 4, 1),
    '1b': _gemma3(26, 1152, 6912, 4, 1),
    '4b': _gemma3(34, 2560, 10240, 8, 4, **_LARGE_GEMMA3),
    '12b': _gemma3(48, 3840, 15360, 16, 8, **_LARGE_GEMMA3),
  }
)
# Llama 3.1 and 3.2 differ only in their scaling factor and in 3.2's tied head.
# The larger Qwen 2.5 models have more table rows for the same tokens.
STACKS: Mapping[str, configs.StackConfig] = types.MappingProxyType(
  {
    **_GEMMA2,
    **{f'gemma3_{size}': shape for size, shape in _GEMMA3.items()},
    'gemma4_e2b': _gemma4_small(
      *(35, 1536, 6144, 8, 1),
      local=4,
      sharing_layers=20,
      sharing_mlp_width=12288,
    ),
    'gemma4_e4b': _gemma4_small(
      *(42, 2560, 10240, 8, 2), local=5, sharing_layers=18
    ),
    'gemma4_31b': _gemma4(60, 5376, 21504, 32, 16, global_kv_heads=4),
    'gemma4_26b_a4b': _gemma4(
      *(30, 2816, 2112, 16, 8),
      global_kv_heads=2,
      experts=128,
      experts_per_token=8,
      expert_mlp_width=704,
      norm_topk=True,
      experts_beside_mlp=True,
    ),
    'llama2_7b': _llama2(32, 4096, 11008, 32, 32, 128),
    'llama2_70b': _llama2(80, 8192, 28672, 64, 8, 128),
    'llama3.2_1b': _llama3(16, 2048, 8192, 32, 8, 64, factor=32),
    'llama3.2_3b': _llama3(28, 3072, 8192, 24, 8, 128, factor=32),
    'llama3.1_8b': _llama3(32, 4096, 14336, 32, 8, 128, factor=8, head=UNTIED),
    'qwen2.5_0.5b': _qwen25(24, 896, 4864, 14, 2, 64),
    'qwen2.5_1.5b': _qwen25(28, 1536, 8960, 12, 2, 128),
    'qwen2.5_3b': _qwen25(36, 2048, 11008, 16, 2, 128),
    'qwen2.5_7b': _qwen25(
      28, 3584, 18944, 28, 4, 128, vocab_size=152064, head=UNTIED
    ),
    'qwen3_0.6b': _qwen3(28, 1024, 3072, 16, 8, 128),
    'qwen3_1.7b': _qwen3(28, 2048, 6144, 16, 8, 128),
    'qwen3_4b': _qwen3(36, 2560, 9728, 32, 8, 128),
    'qwen3_8b': _qwen3(36, 4096, 12288, 32, 8, 128, head=UNTIED),
  }
)


def _t5(
  layers, width, mlp_width, heads, *, head_dim=64, decoder_layers=0, **fields
):
  """Returns a T5 1.1; `decoder_layers` 0 means `layers` in both stacks."""
  sizes = width, mlp_width, heads, heads, head_dim
  t5 = dict(
    vocab_size=32128,
    query_scale=1.0,
    positions=relative_bias.Positions('relative'),
    head=UNTIED,
    activation='gelu_tanh',
  )
  encoder, decoder = (
    _plain(n, *sizes, **{**t5, **fields})
    for n in (layers, decoder_layers or layers)
  )
  return configs.encoder_decoder(encoder, decoder, shared_table=True)


_SIZES = {
  'small': (8, 512, 1024, 6),
  'base': (12, 768, 2048, 12),
  'large': (24, 1024, 2816, 16),
  'xl': (24, 2048, 5120, 32),
  'xxl': (24, 4096, 10240, 64),
}
_FIRST = dict(
  activation='relu', mlp_gated=False, head=heads.Tokens(scaled=True)
)
_BIG = dict(head_dim=128, **_FIRST)
_LIKE_1_1 = {
  't5_1.1': {},
  'flan_t5': {},
  'mt5': dict(vocab_size=250112),
  'umt5': dict(
    vocab_size=256384, positions=relative_bias.Positions('relative_each')
  ),
}
_UL2 = _t5(32, 4096, 16384, 16, head_dim=256, activation='silu')
# T5 (arXiv:1910.10683) and its release 1.1, flan-T5 (2210.11416), mT5
# (2010.11934), UMT5 (2304.09151), ByT5 (2105.13626, with an encoder three times
# as deep as the decoder) and UL2 (2205.05131).
T5: Mapping[str, configs.EncoderDecoderConfig] = types.MappingProxyType(
  {
    't5_small': _t5(6, 512, 2048, 8, **_FIRST),
    't5_base': _t5(12, 768, 3072, 12, **_FIRST),
    't5_large': _t5(24, 1024, 4096, 16, **_FIRST),
    't5_3b': _t5(24, 1024, 16384, 32, **_BIG),
    't5_11b': _t5(24, 1024, 65536, 128, **_BIG),
    **{
      f'{name}_{size}': _t5(*sizes, **fields)
      for name, fields in _LIKE_1_1.items()
      for size, sizes in _SIZES.items()
      if (name, size) != ('umt5', 'large')  # Not released.
    },
    **{
      f'byt5_{size}': _t5(*sizes, decoder_layers=sizes[0] // 3, vocab_size=384)
      for size, sizes in {
        'small': (12, 1472, 3584, 6),
        'base': (18, 1536, 3968, 12),
        'large': (36, 1536, 3840, 16),
        'xl': (36, 2560, 6720, 32),
        'xxl': (36, 4672, 12352, 64),
      }.items()
    },
    'ul2': _UL2,
    'flan_ul2': _UL2,
  }
)


def t5(size: str, **changes: Any) -> configs.EncoderDecoderConfig:
  """Returns a T5 or a variant by size, such as mt5_base.

  Args:
    size: a key of `T5`.
    **changes: fields changed in both stacks.

  Raises:
    UserError: no such size.
  """
  if size not in T5:
    raise errors.UserError(f'T5 has no size {size!r}; sizes: {", ".join(T5)}.')
  encoder, decoder = (
    dataclasses.replace(stack, **changes)
    for stack in (T5[size].encoder, T5[size].decoder)
  )
  return configs.encoder_decoder(encoder, decoder, shared_table=True)


def stack(size: str, **changes: Any) -> configs.StackConfig:
  """Returns the causal stack of a size, with changed fields.

  Raises:
    UserError: no such size.
  """
  if size not in STACKS:
    raise errors.UserError(
      f'there is no model size {size!r}; sizes: {", ".join(STACKS)}.'
    )
  return dataclasses.replace(STACKS[size], **changes)


def decoder_only(size: str, **changes: Any) -> configs.DecoderOnlyConfig:
  """Returns the decoder-only model of a size, with changed stack fields."""
  return configs.DecoderOnlyConfig(stack(size, **changes))


def t5gemma(pair: str, **changes: Any) -> configs.EncoderDecoderConfig:
  """Returns the T5Gemma of two Gemma 2 sizes, such as '9b_2b'.

  Args:
    pair: encoder and decoder size joined by '_'.
    **changes: fields changed in both stacks.

  Raises:
    UserError: not a pair of sizes.
  """
  return configs.encoder_decoder(*_pair(pair, _GEMMA2, changes))


def with_paper_widths(model: configs.ModelConfig) -> configs.ModelConfig:
  """Returns the model with the widths used for counts in the T5Gemma paper.

  For S to XL the paper's d_ffn is the sum of both branches of the gated
  feed-forward; in the released models each branch has this width. Other stacks
  are unchanged.
  """
  shape = operator.attrgetter('layers', 'width', 'mlp_width', 'heads')
  sizes = {shape(STACKS[size]) for size in ('s', 'b', 'l', 'xl')}
  changes = {
    name: dataclasses.replace(stack, mlp_width=stack.mlp_width // 2)
    for name, stack in model.stacks.items()
    if shape(stack) in sizes
  }
  return dataclasses.replace(model, **changes)


def t5gemma2(pair: str, **changes: Any) -> configs.EncoderDecoderConfig:
  """Returns the T5Gemma 2 of two Gemma 3 sizes ('1b_1b'), text only.

  Args:
    pair: encoder and decoder size joined by '_'.
    **changes: fields changed in both stacks.

  Raises:
    UserError: not a pair of sizes, or unequal widths.
  """
  # T5Gemma 2 does not have the 64 unused rows of the larger Gemma 3.
  changes = {'vocab_size': 262144, **changes}
  return configs.t5gemma2(*_pair(pair, _GEMMA3, changes))


def _pair(
  pair: str, sizes: Mapping[str, configs.StackConfig], changes: dict[str, Any]
) -> list[configs.StackConfig]:
  # Not split at '_', which names such as 'toy_small' contain.
  for encoder in sizes:
    decoder = pair.removeprefix(f'{encoder}_')
    if decoder != pair and decoder in sizes:
      return [
        dataclasses.replace(sizes[size], **changes)
        for size in (encoder, decoder)
      ]
  raise errors.UserError(
    f'{pair!r} is not a pair of model sizes; write two of'
    f' {", ".join(sizes)} joined by "_", the encoder first.'
  )
