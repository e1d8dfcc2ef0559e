"""Attention of `ops.attention_tokamax` by tokamax's own XLA implementation."""

import functools

import pytest

from encdec_adapt.ops import attention_tokamax


def attend():
  """The backend without GPU kernels; skips the test without tokamax."""
  pytest.importorskip('tokamax', reason='tokamax needs Python 3.12')
  from tokamax._src.ops.attention import base

  op = base.DotProductAttention(vjp=base.DotProductAttentionVjp())
  return functools.partial(attention_tokamax.attend, op=op)
