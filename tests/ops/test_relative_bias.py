"""Relative position bias: buckets, and attention against the dense formula."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.ops import attention, masks, partition, relative_bias
from encdec_adapt.sharding import rules
from tests.ops import attention_cases

BUCKETS, DISTANCE, HEADS, KV_HEADS = 8, 10, 4, 2
LENGTH = 24
# Names of masks, each once by indices and once by positions.
NAMES = ('causal', 'full', 'causal window', 'full exclusive window')


def test_buckets():
  ahead = jnp.arange(-9, 10)
  bucket = functools.partial(
    relative_bias.bucket, buckets=BUCKETS, distance=DISTANCE
  )
  np.testing.assert_array_equal(
    bucket(ahead, bidirectional=True),
    [3] * 5 + [2, 2, 2, 1, 0, 5, 6, 6, 6] + [7] * 5,
  )
  np.testing.assert_array_equal(
    bucket(ahead, bidirectional=False),
    [7, 7, 6, 5, 4, 4, 3, 2, 1] + [0] * 10,
  )


def dense(q, k, v, table, spec, scale, softcap):
  """The definition: a table that is indexed by every pair of positions."""
  ahead = spec.kv_positions[:, None] - spec.q_positions[..., None]
  numbers = relative_bias.bucket(
    ahead, BUCKETS, DISTANCE, bidirectional=spec.kind == 'full'
  )
  k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
  scores = scale * jnp.einsum('BTNH,BSNH->BNTS', q, k, precision='highest')
  scores += jnp.moveaxis(table[:, numbers], 0, 1)
  visible = masks.dense_mask(spec)[:, None]
  weights = jnp.exp(jnp.where(visible, scores, -1e9))
  weights = jnp.where(visible, weights, 0)
  total = weights.sum(-1, keepdims=True)
  weights = weights / jnp.where(total == 0, 1, total)
  return jnp.einsum('BNTS,BSNH->BTNH', weights, v, precision='highest')


def by(backend):
  def attend(q, k, v, table, spec, scale=0.3, softcap=None):
    bias = relative_bias.RelativeBias(table, DISTANCE)
    options = dict(scale=scale, softcap=softcap, bias=bias, chunk=5)
    return attention.attention(q, k, v, spec, backend=backend, **options)

  return attend


def results(attend, context=contextlib.nullcontext):
  """Outputs and gradients of every mask, those of the table too."""
  heads = dict(rows=4, heads=(HEADS, KV_HEADS), head_dim=8)
  arrays = attention_cases.qkv(LENGTH, LENGTH, **heads)
  rng = np.random.default_rng(1)
  table = jnp.asarray(rng.normal(size=(HEADS, BUCKETS)), jnp.float32)
  options = dict(rows=4, window=4)
  cases = {
    f'{name} {aligned}': (
      (*arrays, table),
      attention_cases.spec_of(name, LENGTH, aligned=aligned, **options),
    )
    for name in NAMES
    for aligned in (True, False)
  }
  return attention_cases.results(attend, cases, None, context)


@pytest.fixture(scope='module')
def expected():
  return results(dense)


@pytest.mark.parametrize('backend', ['reference', 'chunked'])
def test_attention_is_that_of_the_definition(backend, expected):
  attention_cases.assert_same(results(by(backend)), expected, 2e-5)


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'shape', [(1, 1, 8, 1), (2, 1, 2, 2), (2, 2, 1, 2)], ids=str
)
def test_sharded_attention_equals_that_of_one_device(shape, expected):
  context = functools.partial(
    partition.use,
    attention_cases.make_mesh(shape),
    rules.RULES['fsdp'].as_dict(),
  )
  got = results(by('chunked'), context)
  attention_cases.assert_same(got, expected, 2e-5)


def test_no_array_of_all_pairs():
  """By indices there are no rows, and by chunks few pairs at a time."""
  spec = attention_cases.spec_of('full', 64)
  table = jnp.zeros((HEADS, BUCKETS))
  arrays = attention_cases.qkv(64, 64, heads=(HEADS, KV_HEADS))
  jaxpr = jax.make_jaxpr(by('chunked'))(*arrays, table, spec)
  assert f'f32[1,{HEADS},5,5]' in str(jaxpr)
  assert not re.search(r'f32\[[\d,]*(5|64),64\]', str(jaxpr))


@pytest.mark.parametrize('backend', ['splash', 'tokamax'])
def test_kernels_refuse_it(backend):
  spec = attention_cases.spec_of('full', 64)
  with pytest.raises(errors.UserError, match='a relative position bias'):
    attention.check(backend, spec, 'bfloat16', 64, jax.devices()[0], bias=True)
