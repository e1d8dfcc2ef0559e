"""Attention with sharded lengths equals that of one device."""

import contextlib
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from encdec_adapt.ops import attention, attention_splash, masks, partition
from encdec_adapt.sharding import rules
from tests.ops import attention_cases, tokamax_reference
from tests.ops.attention_cases import make_mesh, packed, spec_of

pytestmark = pytest.mark.sharded

RULES = rules.RULES['fsdp'].as_dict()
B, T, S, N, K, H = 4, 16, 24, 8, 4, 8
# Meshes of eight devices that divide rows and heads; some in the default run.
DEFAULT = [(1, 1, 8, 1), (1, 2, 4, 1), (2, 1, 2, 2), (2, 2, 1, 2)]
SHAPES = [
  pytest.param(shape, marks=[] if shape in DEFAULT else pytest.mark.slow)
  for shape in itertools.product((1, 2, 4, 8), repeat=4)
  if math.prod(shape) == 8 and shape[0] * shape[1] <= B and shape[3] <= K
]


def specs(length=T, source=S, window=3):
  """Every kind of mask, by name."""
  tokens, memory = packed(length, B), packed(source, B)[0]
  names = attention_cases.MASKS
  found = {n: spec_of(n, length, rows=B, window=window) for n in names}
  found['not by index'] = masks.causal(*tokens, window=window)
  found['cross'] = masks.cross(tokens[0], memory)
  found['merged'] = masks.with_memory(found['causal'], memory)
  return found


def qkv(queries, keys, heads=(N, K), head_dim=H):
  return attention_cases.qkv(
    queries, keys, rows=B, heads=heads, head_dim=head_dim
  )


def results(attend, shape, cases):
  """Outputs and gradients on a mesh, or on one device for None."""
  context = contextlib.nullcontext
  if shape is not None:
    context = functools.partial(partition.use, make_mesh(shape), RULES)
  return attention_cases.results(attend, cases, context=context)


def cases_of(found, **options):
  return {
    name: (
      qkv(spec.q_segments.shape[1], spec.kv_segments.shape[1], **options),
      spec,
    )
    for name, spec in found.items()
  }


@pytest.fixture(scope='module')
def on_one_device():
  attend = functools.partial(attention.attention, backend='reference')
  return results(attend, None, cases_of(specs()))


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_every_mask_on_every_mesh(shape, on_one_device):
  attend = functools.partial(attention.attention, backend='chunked', chunk=3)
  got = results(attend, shape, cases_of(specs()))
  attention_cases.assert_same(got, on_one_device, 2e-5)


def splash():
  return functools.partial(attention_splash.attend, interpret=True)


@pytest.mark.parametrize('make', [splash, tokamax_reference.attend])
def test_kernels_on_a_sharded_length(make):
  block = 128
  # A window that is less than the neighbours', and one that is not.
  found = specs(2 * block, 4 * block, window=17)
  found = {n: found[n] for n in ('causal', 'full centered window', 'cross')}
  wide = specs(2 * block, window=block + 40)['causal window']
  cases = cases_of(found | {'wide': wide}, heads=(4, 2), head_dim=64)
  reference = functools.partial(attention.attention, backend='reference')
  expected = results(reference, None, cases)
  got = results(make(), (2, 1, 2, 2), cases)
  attention_cases.assert_same(got, expected, 5e-5)


def collectives(spec, shape=(1, 1, 8, 1)):
  """Text of the compiled program of one attention."""
  arrays = qkv(spec.q_segments.shape[1], spec.kv_segments.shape[1])

  @jax.jit
  def run(q, k, v, spec):
    with partition.use(make_mesh(shape), RULES):
      return attention.attention(q, k, v, spec, scale=1.0)

  return run.lower(*arrays, spec).compile().as_text()


def test_windows_gather_their_neighbours_alone():
  found = specs(32)
  window = collectives(found['causal window'])
  assert 'collective-permute' in window and 'all-gather' not in window
  whole = collectives(found['causal'])
  assert 'all-gather' in whole and 'collective-permute' not in whole


@pytest.mark.parametrize(
  'shape, q_shape, k_shape, message',
  [
    ((1, 1, 2, 4), (4, 15, 8), (4, 24, 4), "queries .*'length' of size 15"),
    ((2, 1, 2, 2), (3, 16, 8), (3, 24, 4), "queries .*'batch' of size 3"),
    ((1, 1, 2, 4), (4, 16, 8), (4, 24, 2), "keys .*'act_heads' of size 2"),
  ],
)
def test_what_does_not_divide_is_refused(shape, q_shape, k_shape, message):
  q, k = jnp.zeros((*q_shape, H)), jnp.zeros((*k_shape, H))
  segments = [jnp.ones(x.shape[:2], jnp.int32) for x in (q, k)]
  with (
    partition.use(make_mesh(shape), RULES),
    pytest.raises(ValueError, match=message),
  ):
    attention.attention(q, k, k, masks.cross(*segments), scale=1.0)
