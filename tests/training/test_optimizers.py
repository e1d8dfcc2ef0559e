"""AdamW and Adafactor are their formulas, written out in NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.models import model_config, presets
from encdec_adapt.models import parameters as parameters_lib
from encdec_adapt.training import optimizers, schedules

RATE, DECAY = 0.5, 0.1
SCHEDULE = schedules.ScheduleConfig('constant', RATE, 2)
TABLE = 'decoder/embedder/table'
STACKED = 'decoder/blocks/layer_0/mlp/up'
STACKED_SCALE = 'decoder/blocks/layer_0/pre_mlp_norm/scale'
BIAS = 'decoder/tail/layer_0/attention/query_bias'
RELATIVE = 'decoder/relative_bias'
AXES = {
  TABLE: ('vocab', 'table_embed'),
  STACKED: ('layers', 'embed', 'mlp'),
  STACKED_SCALE: ('layers', 'embed'),
  BIAS: ('heads', 'head_dim'),
  RELATIVE: ('heads', 'buckets'),
}
KERNELS = {TABLE, STACKED}


def _draw(shapes, seed):
  rng = np.random.default_rng(seed)
  return {
    path: rng.normal(size=shape).astype(np.float32)
    for path, shape in shapes.items()
  }


def _run(kind, parameters, steps, **changes):
  """Returns the parameters after every step, and the last state."""
  optimizer = optimizers.Optimizer(
    optimizers.OptimizerConfig(kind, SCHEDULE, weight_decay=DECAY, **changes),
    {
      path: parameters_lib.ParamInfo(value.shape, value.dtype, AXES[path])
      for path, value in parameters.items()
    },
  )
  now = {path: jnp.asarray(value) for path, value in parameters.items()}
  state = optimizer.init(now)
  after = []
  schedule = schedules.make_schedule(SCHEDULE, 10)
  for step, gradients in enumerate(steps):
    gradients = {path: jnp.asarray(g) for path, g in gradients.items()}
    rate = schedule(jnp.int32(step), state.count)
    now, state = optimizer.update(gradients, state, now, rate)
    after.append({path: np.asarray(value) for path, value in now.items()})
  return after, state


def _assert_equal(found, wanted):
  assert found.keys() == wanted.keys()
  for path, value in wanted.items():
    np.testing.assert_allclose(found[path], value, rtol=2e-5, err_msg=path)


def _families():
  """A model of every family, shrunk to two layers and a small width."""
  small = dict(layers=2, width=32, mlp_width=16, heads=4, kv_heads=2)
  small |= dict(head_dim=8, vocab_size=32)
  sizes = ('2b', 'gemma3_1b', 'llama3.2_1b', 'qwen2.5_0.5b')
  for size in (*sizes, 'qwen3_0.6b'):
    stack = dataclasses.replace(presets.stack(size), **small)
    yield size, model_config.encoder_decoder(stack, stack)
  yield 't5', presets.t5('umt5_small', **{**small, 'kv_heads': 4})
  gemma = dataclasses.replace(presets.stack('gemma3_1b'), **small)
  biases = dict(attention_bias='qkvo', mlp_bias=True, eoi_token=3)
  experts = dict(experts=4, experts_per_token=2, expert_mlp_width=8)
  experts |= dict(shared_expert_width=8, shared_expert_gate=True)
  for name, changes in (('biases', biases), ('experts', experts)):
    stack = dataclasses.replace(gemma, **changes)
    yield name, model_config.DecoderOnlyConfig(stack)


@pytest.mark.parametrize(
  'model', [pytest.param(model, id=name) for name, model in _families()]
)
def test_kernels_and_tables_decay_and_nothing_else(model):
  vectors = ('scale', 'bias', 'norm', 'eoi')
  table = parameters_lib.parameter_table(model)
  kernels = {p for p, info in table.items() if optimizers.is_kernel(info.axes)}
  assert kernels < set(table)
  for path in table:
    name = path.rpartition('/')[2]
    assert (path not in kernels) == name.endswith(vectors), path


def test_adamw_is_the_formula():
  shapes = {TABLE: (3, 4), STACKED: (2, 4, 3), STACKED_SCALE: (2, 4)}
  shapes[BIAS] = (2, 2)
  now = _draw(shapes, 0)
  steps = [_draw(shapes, 1), _draw(shapes, 2)]
  after, state = _run('adamw', now, steps, b1=0.9, b2=0.95, eps=1e-3)
  assert int(state.count) == 2

  now = {path: value.astype(np.float64) for path, value in now.items()}
  first = second = dict.fromkeys(shapes, 0.0)
  for count, gradients in enumerate(steps, start=1):
    first = {p: 0.9 * first[p] + 0.1 * g for p, g in gradients.items()}
    second = {p: 0.95 * second[p] + 0.05 * g**2 for p, g in gradients.items()}
    for path, value in now.items():
      mean = first[path] / (1 - 0.9**count)
      root = np.sqrt(second[path] / (1 - 0.95**count))
      decay = DECAY * value if path in KERNELS else 0.0
      now[path] = value - RATE * count / 2 * (mean / (root + 1e-3) + decay)
    _assert_equal(after[count - 1], now)


@pytest.mark.parametrize(
  'changed, dtypes',
  [
    ({'moment_dtype': 'bfloat16'}, ('bfloat16', 'float32')),
    ({'second_moment_dtype': 'bfloat16'}, ('float32', 'bfloat16')),
  ],
)
def test_moments_in_bfloat16_change_updates_by_their_rounding(changed, dtypes):
  shapes = {TABLE: (64, 8), BIAS: (4, 2)}
  now = _draw(shapes, 0)
  steps = [_draw(shapes, seed) for seed in range(1, 5)]
  exact, _ = _run('adamw', now, steps)
  rounded, state = _run('adamw', now, steps, **changed)
  for moments, dtype in zip(
    (state.inner.mu, state.inner.nu), dtypes, strict=True
  ):
    assert {str(leaf.dtype) for leaf in moments.values()} == {dtype}
  _assert_equal(rounded[0], exact[0])  # Of zeros: nothing to round yet.
  for path, value in exact[-1].items():
    moved = np.abs(value - now[path]).max()
    apart = np.abs(rounded[-1][path] - value).max()
    # 8 bits, of a few moments that nearly cancel.
    assert 0 < apart < 2**-5 * moved, path


def _rms(x):
  return np.sqrt(np.mean(np.square(x)))


def _adafactor_move(path, direction, value):
  """Moves one layer's parameter, per unit of learning rate."""
  direction = direction / max(1.0, _rms(direction))
  if path not in KERNELS | {RELATIVE}:
    return direction
  decay = DECAY * value if path in KERNELS else 0.0
  return direction * max(1e-3, _rms(value)) + decay


def test_adafactor_clips_and_scales_layer_by_layer():
  shapes = {TABLE: (3, 4), STACKED: (3, 4, 3), STACKED_SCALE: (3, 4)}
  shapes |= {BIAS: (2, 2), RELATIVE: (2, 4)}
  now = _draw(shapes, 0)
  # Layers of unlike size, the last below the least scale of 1e-3.
  now[STACKED] *= np.array([5.0, 0.2, 1e-5], np.float32)[:, None, None]
  small, large = _draw(shapes, 1), _draw(shapes, 2)
  for path in (STACKED, STACKED_SCALE):
    # Gradients that grow are clipped, those that shrink are not.
    growth = np.array([10.0, 0.1, 1.0], np.float32)
    large[path] *= growth.reshape(-1, *[1] * (large[path].ndim - 1))
  after, _ = _run('adafactor', now, [small, large])

  now = {path: value.astype(np.float64) for path, value in now.items()}
  second = dict.fromkeys(shapes, 0.0)
  for count, gradients in enumerate([small, large], start=1):
    kept = 1 - count**-0.8
    for path, value in now.items():
      gradient = gradients[path].astype(np.float64)
      second[path] = kept * second[path] + (1 - kept) * gradient**2
      direction = gradient / np.sqrt(second[path])
      layers = [(direction, value)]
      if '/blocks/' in path:
        layers = list(zip(direction, value, strict=True))
      moves = [_adafactor_move(path, *layer) for layer in layers]
      move = np.stack(moves) if '/blocks/' in path else moves[0]
      now[path] = value - RATE * count / 2 * move
    _assert_equal(after[count - 1], now)


def test_adafactor_keeps_rows_and_columns_of_large_matrices():
  shapes = {STACKED: (2, 128, 130)}
  now, gradients = _draw(shapes, 0), _draw(shapes, 1)
  (after,), state = _run('adafactor', now, [gradients])
  inner = state.inner
  held = sum(
    leaf.size
    for part in (inner.v_row, inner.v_col, inner.v)
    for leaf in part.values()
  )
  assert held == 2 * (128 + 130) + 1  # And a placeholder.
  for found, gradient, value in zip(
    after[STACKED], gradients[STACKED], now[STACKED], strict=True
  ):
    squares = gradient.astype(np.float64) ** 2
    rows, columns = (squares.mean(axis, keepdims=True) for axis in (1, 0))
    direction = gradient / np.sqrt(rows * columns / squares.mean())
    wanted = value - RATE / 2 * _adafactor_move(STACKED, direction, value)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  'kind, fields, words',
  [
    ('adafactor', dict(moment_dtype='bfloat16'), 'keeps no moments'),
    ('adamw', dict(b2=0.999, second_moment_dtype='bfloat16'), 'b2 0.999'),
  ],
)
def test_dtypes_of_moments_that_cannot_be(kind, fields, words):
  with pytest.raises(errors.UserError, match=words):
    optimizers.OptimizerConfig(kind, SCHEDULE, **fields)
