"""Floating-point operations of a model, against XLA's own count."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import masks
from encdec_adapt.telemetry import flops


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('rule', ['exclusive', 'inclusive', 'centered'])
@pytest.mark.parametrize('window', [None, 1, 2, 5, 6, 7, 20])
def test_visible_pairs_are_those_of_the_mask(causal, rule, window):
  length = 6
  ones, positions = jnp.ones((1, length), int), jnp.arange(length)[None]
  if causal:
    spec = masks.causal(ones, positions, window=window)
  else:
    spec = masks.bidirectional(ones, positions, window=window, window_rule=rule)
  assert np.sum(masks.dense_mask(spec)) == flops.visible_pairs(
    length, causal=causal, window=window, window_rule=rule
  )


def _stack(**changes):
  values = dict(
    width=16,
    mlp=32,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    windows=(None,),
    causal=False,
  )
  return flops.StackShape(**(values | changes))


def test_one_layer_equals_what_xla_counts():
  stack, length, source = _stack(cross_width=24), 10, 6

  def layer(x, y):
    d, f, n, k, h, e = 16, 32, 4, 2, 8, 24
    ones = jnp.ones
    for memory, width in ((x, d), (y, e)):
      q = (x @ ones((d, n * h))).reshape(-1, k, n // k, h)
      key = (memory @ ones((width, k * h))).reshape(-1, k, h)
      value = (memory @ ones((width, k * h))).reshape(-1, k, h)
      scores = jnp.einsum('tkgh,skh->kgts', q, key)
      out = jnp.einsum('kgts,skh->tkgh', scores, value)
      x = out.reshape(-1, n * h) @ ones((n * h, d))
    return (x @ ones((d, f)), x @ ones((d, f))), ones((length, f)) @ ones(
      (f, d)
    )

  x, y = jnp.ones((length, 16)), jnp.ones((source, 24))
  products = 0
  for equation in jax.make_jaxpr(layer)(x, y).eqns:
    if equation.primitive.name == 'dot_general':
      contracted = equation.params['dimension_numbers'][0][0]
      left = equation.invars[0].aval.shape
      products += (
        2
        * equation.outvars[0].aval.size
        * int(np.prod([left[axis] for axis in contracted]))
      )
  assert flops.forward(stack, length, source_length=source) == products


def test_layers_add_up_and_windows_limit():
  one = flops.forward(_stack(causal=True), 64)
  local = flops.forward(_stack(causal=True, windows=(8,)), 64)
  both = flops.forward(_stack(causal=True, windows=(8, None)), 64)
  assert both == one + local
  assert one - local == 4 * 4 * 8 * (64 * 65 // 2 - (8 * 64 - 28))


def test_experts_count_where_a_token_takes_them():
  layers = dict(windows=(None,) * 3)
  dense = flops.forward(_stack(**layers), 10)
  # Two experts of 24, a shared one of 8 and a router to 5, in two layers.
  sparse = flops.forward(
    _stack(**layers, sparse_layers=2, sparse_mlp=56, router_outputs=5), 10
  )
  assert sparse - dense == 2 * 10 * 2 * 16 * (3 * (56 - 32) + 5)


def test_cross_attention_of_some_layers_and_merged():
  def total(**cross):
    shape = _stack(causal=True, windows=(None, None), **cross)
    return flops.forward(shape, 8, source_length=6)

  alone = total()
  both = total(cross_width=12) - alone
  assert total(cross_width=12, cross_layers=1) - alone == both // 2
  # Query and output projections of its own are all that is saved.
  shape = _stack(causal=True)
  heads = shape.query_heads * shape.head_dim
  saved = 2 * (2 * shape.width * 2 * heads) * 8
  assert total(cross_width=12, cross_merged=True) - alone == both - saved


def test_vocabulary_and_estimate():
  assert flops.vocabulary(16, 100, 3) == 2 * 16 * 100 * 3


@pytest.mark.parametrize(
  'kind, tera',
  [
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5e', 197),
    ('TPU v5', 459),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 NVL', 835),
    ('NVIDIA H200', 989),
    ('NVIDIA GH200 480GB', 989),
    ('NVIDIA A100-SXM4-80GB', 312),
  ],
)
def test_peak_of_known_devices(kind, tera):
  device = types.SimpleNamespace(platform='some', device_kind=kind)
  assert flops.peak([device] * 4) == 4 * tera * 1e12


def test_peak_of_an_unknown_device_is_not_guessed():
  device = types.SimpleNamespace(platform='some', device_kind='TPU v9')
  assert flops.peak([device]) is None


def test_cpu_peak_is_measured_once_for_all_fake_devices(monkeypatch):
  assert 1e8 < flops.measured_peak(size=256, repeats=2) < 1e15
  monkeypatch.setattr(flops, 'measured_peak', lambda: 5.0)
  assert flops.peak(jax.devices()) == 5.0


@pytest.mark.parametrize('source', [0, 7])
def test_decoding_token_by_token_is_one_forward_pass(source):
  stack = flops.StackShape(
    width=16,
    mlp=24,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    windows=(None, 3),
    causal=True,
    cross_width=12 if source else None,
  )
  steps = sum(
    flops.decoding(stack, keys, source_length=source) for keys in range(1, 11)
  )
  # Keys and values of the source are made once, before.
  before = 2 * 2 * 12 * 2 * (2 * 8) * source
  assert steps + before == flops.forward(stack, 10, source_length=source)
