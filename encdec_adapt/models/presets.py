"""Shapes of released models, and toy ones.

Gemma 2 (Gemma Team 2024) and T5Gemma (Zhang et al. 2025); sizes as in
google-deepmind/gemma. Window, soft-caps, theta and epsilon are `StackConfig`'s
defaults, which are theirs.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any

from encdec_adapt.models import config as configs
from encdec_adapt.runtime import errors

GEMMA2_VOCABULARY = 256000


def _shape(layers, width, mlp_width, heads, kv_heads, head_dim, **fields):
  return configs.StackConfig(
    layers=layers,
    width=width,
    mlp_width=mlp_width,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    **{
      'vocab_size': GEMMA2_VOCABULARY,
      'query_scale': float(head_dim),
      **fields,
    },
  )


def _toy(layers, width, heads, **fields):
  toy = {'kv_heads': heads // 2, 'head_dim': 32, 'vocab_size': 4096}
  return _shape(
    layers, width, 4 * width, heads, **{**toy, 'window': 64, **fields}
  )


# 9B scales queries by its head_dim, 256 (its first exports said 224); 27B by
# width / heads, 144.
STACKS: Mapping[str, configs.StackConfig] = types.MappingProxyType(
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


def stack(size: str, **changes: Any) -> configs.StackConfig:
  """The causal stack of that size, with these fields changed.

  Raises:
    UserError: no such size.
  """
  if size not in STACKS:
    raise errors.UserError(
      f'there is no model size {size!r}; sizes: {", ".join(STACKS)}.'
    )
  return dataclasses.replace(STACKS[size], **changes)


def decoder_only(size: str, **changes: Any) -> configs.DecoderOnlyConfig:
  """A decoder of that size; `changes` are made to its stack."""
  return configs.DecoderOnlyConfig(stack(size, **changes))


def t5gemma(pair: str, **changes: Any) -> configs.EncoderDecoderConfig:
  """An encoder-decoder of two sizes, such as '9b_2b' (encoder first).

  Args:
    pair: names of two sizes joined by '_'.
    **changes: fields changed in both stacks.

  Raises:
    UserError: not a pair of sizes.
  """
  for encoder in STACKS:
    decoder = pair.removeprefix(f'{encoder}_')
    if decoder != pair and decoder in STACKS:
      return configs.encoder_decoder(
        stack(encoder, **changes), stack(decoder, **changes)
      )
  raise errors.UserError(
    f'{pair!r} is not a pair of model sizes; write two of'
    f' {", ".join(STACKS)} joined by "_", the encoder first.'
  )
