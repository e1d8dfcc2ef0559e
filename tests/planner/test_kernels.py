"""Blocks that attention kernels visit, against the dense masks."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import model_config, presets
from encdec_adapt.objectives import framing
from encdec_adapt.ops import attention_splash, masks
from encdec_adapt.planner import hlo, kernels

CASES = [('causal', window) for window in (None, 1, 512, 700)]
CASES += [(rule, w) for rule in masks.WINDOW_RULES for w in (513, 5000)]


@pytest.mark.parametrize('shards', [1, 2, 4])
@pytest.mark.parametrize('kind, window', CASES)
@pytest.mark.parametrize('length', [1024, 4096])
def test_blocks_equal_the_kernels(kind, window, shards, length):
  segments = jnp.ones((1, length), jnp.int32)
  positions = jnp.arange(length, dtype=jnp.int32)[None]
  make = masks.causal
  if kind != 'causal':
    make = functools.partial(masks.bidirectional, window_rule=kind)
  spec = make(segments, positions, window=window, aligned=True)
  block = attention_splash.block(length // shards)
  states = jnp.zeros((1, length, 1, 128), jnp.bfloat16)
  kernel, _ = attention_splash._kernel(
    spec, states, states, (block, block), None, (1, shards), True
  )
  found = kernels.Attention(length, length, *spec.reach).on_shard(shards)
  rows = found.visited().shape[0]
  mask = kernel.fwd_mask_info.block_mask
  if mask is None:  # All blocks.
    assert found.visited().all()
    return
  assert mask.shape[-1] == found.blocks[1]
  counts = (np.asarray(mask[0]) > 0).sum(axis=1).reshape(-1, rows).sum(axis=1)
  assert counts.max() == found.blocks[0]
  assert found.pairs() == found.blocks[0] * block**2


def call(name, queries, keys, grid, rows=2, times=3, results=4):
  operands = (grid, grid, (rows, 4, queries, 64), (rows, 2, keys, 64))
  name = f'splash_mha_{name}_segmented'
  return hlo.Kernel(name, operands, results, times, 'e')


CAUSAL, LOCAL = (kernels.Attention(2048, 2048, left, 0) for left in (None, 100))


@pytest.mark.parametrize(
  'name, grid, results, products, blocks',
  [
    ('fwd', (1, 4, 4), 4, 2, 10),
    ('fwd', (1, 4, 2), 4, 2, 7),
    ('dq', (1, 4, 2), 4, 3, 7),
    # Of gradients of keys, the grid is short in its queries.
    ('dkv', (1, 2, 4), 4, 4, 7),
    ('dkv', (1, 4, 4), 4, 4, 10),
    # One kernel for all gradients.
    ('dkv', (1, 4, 4), 6, 5, 10),
  ],
)
def test_flops_of_calls(name, grid, results, products, blocks):
  assert CAUSAL.blocks == (10, 4) and LOCAL.blocks == (7, 2)
  kernel = call(name, 2048, 2048, grid, results=results)
  # Of all heads, rows and runs.
  pairs = 512 * 512 * blocks * 4 * 2 * 3
  assert kernels.flops([kernel], [CAUSAL, LOCAL]) == products * 2 * 64 * pairs


@pytest.mark.parametrize(
  'kernel, message',
  [
    (call('fwd', 1024, 1024, (1, 2, 2)), '1024 queries'),
    (call('other', 2048, 2048, (1, 4, 4)), 'other'),
  ],
)
def test_a_kernel_that_the_model_does_not_have_is_refused(kernel, message):
  with pytest.raises(hlo.UnknownProgramError, match=message):
    kernels.flops([kernel], [CAUSAL])


def test_attentions_of_a_pair_and_its_teacher():
  pair = presets.t5gemma('2b_2b')
  models = pair, model_config.without_cross_attention(pair.decoder)
  found = kernels.attentions(models, framing.Lengths(512, 1024))
  assert set(found) == {
    kernels.Attention(512, 512, None, None),
    kernels.Attention(512, 512, 4095, 4095),
    kernels.Attention(1024, 1024, None, 0),
    kernels.Attention(1024, 1024, 4095, 0),
    kernels.Attention(1536, 1536, None, 0),
    kernels.Attention(1536, 1536, 4095, 0),
    kernels.Attention(1024, 512, None, None),
  }
