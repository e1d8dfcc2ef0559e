"""Splash kernels, interpreted, against the reference: forward and backward."""

import functools

import jax.numpy as jnp
import pytest

from encdec_adapt.ops import attention_splash
from tests.ops import attention_cases
from tests.ops.attention_cases import assert_like_reference, spec_of

interpreted = functools.partial(attention_splash.attend, interpret=True)
qkv = functools.partial(attention_cases.qkv, head_dim=64)


@pytest.mark.long
@pytest.mark.parametrize('name', attention_cases.MASKS)
def test_equals_the_reference(name):
  # 150 tokens are padded to two vectors of lanes.
  assert_like_reference(interpreted, *qkv(150, 150), spec_of(name, 150))


def test_several_blocks_without_a_cap():
  spec = spec_of('causal window', 600)
  assert_like_reference(interpreted, *qkv(600, 600), spec, softcap=None)


@pytest.mark.parametrize('name', ['full', 'full inclusive window', 'causal'])
def test_backward_is_one_kernel_where_all_see_all(name, monkeypatch):
  monkeypatch.setattr(attention_splash, '_BLOCK', 128)
  used = []
  sizes = attention_splash.kernels.BlockSizes

  def record(**given):
    used.append(given)
    return sizes(**given)

  monkeypatch.setattr(attention_splash.kernels, 'BlockSizes', record)
  # A window that reaches every key leaves none out.
  spec = spec_of(name, 500, window=511)
  assert_like_reference(interpreted, *qkv(500, 500), spec)
  fused = name != 'causal'
  assert used[-1]['use_fused_bwd_kernel'] == fused
  assert used[-1]['block_kv_dkv'] == (512 if fused else 128)


def test_cross_attention_of_other_lengths_and_rows_that_see_nothing():
  spec = attention_cases.blind_cross()
  assert_like_reference(interpreted, *qkv(100, 200), spec)


def test_bfloat16():
  arrays = qkv(130, 130, dtype=jnp.bfloat16)
  spec = spec_of('causal', 130)
  assert_like_reference(interpreted, *arrays, spec, tolerance=0.03)
