"""Updates of AdamW and Adafactor against the formulas, in numpy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.models import parameters as parameters_lib
from encdec_adapt.training import optimizers, schedules

RATE, DECAY = 0.1, 0.25
STACKED = 'decoder/blocks/layer_0/mlp/up'
STACKED_SCALE = 'decoder/blocks/layer_0/pre_mlp_norm/scale'
TABLE = 'decoder/embedder/table'
SCALE = 'decoder/final_norm/scale'
AXES = {
  TABLE: ('vocab', 'table_embed'),
  STACKED: ('layers', 'embed', 'mlp'),
  STACKED_SCALE: ('layers', 'embed'),
  SCALE: ('embed',),
}


def _draw(shapes, seed):
  rng = np.random.default_rng(seed)
  return {
    path: rng.normal(size=shape).astype(np.float32)
    for path, shape in shapes.items()
  }


def _run(kind, parameters, steps, **changes):
  """Parameters after every step, and the last state."""
  optimizer = optimizers.Optimizer(
    optimizers.OptimizerConfig(
      kind,
      # Of the first update, half the rate.
      schedules.ScheduleConfig('constant', RATE, 2, 10),
      weight_decay=DECAY,
      **changes,
    ),
    {
      path: parameters_lib.ParamInfo(value.shape, value.dtype, AXES[path])
      for path, value in parameters.items()
    },
  )
  now = {path: jnp.asarray(value) for path, value in parameters.items()}
  state = optimizer.init(now)
  after = []
  for step, gradients in enumerate(steps):
    gradients = {path: jnp.asarray(g) for path, g in gradients.items()}
    now, state = optimizer.update(gradients, state, now, jnp.int32(step))
    after.append({path: np.asarray(value) for path, value in now.items()})
  return after, state


def _assert_equal(found, wanted):
  assert found.keys() == wanted.keys()
  for path, value in wanted.items():
    np.testing.assert_allclose(found[path], value, rtol=2e-5, err_msg=path)


def test_adamw_is_the_formula_and_decays_all_but_norm_scales():
  shapes = {TABLE: (3, 4), STACKED: (2, 4, 3), STACKED_SCALE: (2, 4)}
  shapes[SCALE] = (4,)
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
      decay = 0.0 if path in (SCALE, STACKED_SCALE) else DECAY * value
      now[path] = value - RATE * count / 2 * (mean / (root + 1e-3) + decay)
    _assert_equal(after[count - 1], now)


@pytest.mark.parametrize(
  'changed, mu, nu',
  [
    ({'moment_dtype': 'bfloat16'}, 'bfloat16', 'float32'),
    ({'second_moment_dtype': 'bfloat16'}, 'float32', 'bfloat16'),
  ],
)
def test_moments_in_bfloat16_change_updates_by_their_rounding(changed, mu, nu):
  shapes = {TABLE: (64, 8), SCALE: (8,)}
  now = _draw(shapes, 0)
  steps = [_draw(shapes, seed) for seed in range(1, 5)]
  exact, _ = _run('adamw', now, steps)
  rounded, state = _run('adamw', now, steps, **changed)
  dtypes = {
    name: {str(leaf.dtype) for leaf in getattr(state.inner, name).values()}
    for name in ('mu', 'nu')
  }
  assert dtypes == {'mu': {mu}, 'nu': {nu}}
  _assert_equal(rounded[0], exact[0])  # Of zeros: nothing to round yet.
  for path, value in exact[-1].items():
    moved = np.abs(value - now[path]).max()
    apart = np.abs(rounded[-1][path] - value).max()
    # 8 bits, of a few moments that nearly cancel.
    assert 0 < apart < 2**-5 * moved, path


@pytest.mark.parametrize(
  'kind, dtype, words',
  [
    ('adamw', 'float16', "moment_dtype is 'float16'; .* float32, bfloat16"),
    ('adafactor', 'bfloat16', 'adafactor, which keeps no moments of AdamW'),
  ],
)
@pytest.mark.parametrize('name', ['moment_dtype', 'second_moment_dtype'])
def test_moments_that_cannot_be_kept_so_are_refused(kind, dtype, words, name):
  schedule = schedules.ScheduleConfig('constant', RATE, 2, 10)
  with pytest.raises(errors.UserError, match=words):
    optimizers.OptimizerConfig(kind, schedule, **{name: dtype})


def test_second_moments_that_would_not_decay_are_refused():
  """What bfloat16 rounds away is just what the bound says."""
  schedule = schedules.ScheduleConfig('constant', RATE, 2, 10)
  make = functools.partial(
    optimizers.OptimizerConfig,
    'adamw',
    schedule,
    second_moment_dtype='bfloat16',
  )
  make(b2=0.996)
  with pytest.raises(errors.UserError, match='with b2 0.999: a decay of less'):
    make(b2=0.999)
  values = jnp.linspace(1, 2, 129, dtype=jnp.bfloat16)
  decayed = [values.astype(jnp.float32) * b2 for b2 in (0.996, 0.999)]
  moved = [np.mean(x.astype(jnp.bfloat16) < values) for x in decayed]
  assert moved[0] == 1 and moved[1] < 0.1


def _rms(x):
  return np.sqrt(np.mean(np.square(x)))


def _adafactor_move(path, direction, value):
  """What one layer's parameter moves by, per unit of learning rate."""
  direction = direction / max(1.0, _rms(direction))
  if path.endswith('/scale'):
    return direction
  return direction * max(1e-3, _rms(value)) + DECAY * value


def test_adafactor_clips_and_scales_layer_by_layer():
  shapes = {TABLE: (3, 4), STACKED: (3, 4, 3), STACKED_SCALE: (3, 4)}
  shapes[SCALE] = (4,)
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
  clipped = set()
  for count, gradients in enumerate([small, large], start=1):
    kept = 1 - count**-0.8
    for path, value in now.items():
      gradient = gradients[path].astype(np.float64)
      second[path] = kept * second[path] + (1 - kept) * gradient**2
      direction = gradient / np.sqrt(second[path])
      if '/blocks/' in path:
        clipped |= {_rms(layer) > 1.1 for layer in direction}
        move = np.stack(
          [
            _adafactor_move(path, *layer)
            for layer in zip(direction, value, strict=True)
          ]
        )
      else:
        move = _adafactor_move(path, direction, value)
      now[path] = value - RATE * count / 2 * move
    _assert_equal(after[count - 1], now)
  assert clipped == {True, False}


@pytest.mark.parametrize('path', [TABLE, STACKED])
def test_adafactor_keeps_rows_and_columns_of_large_matrices(path):
  layers = (2,) if path == STACKED else ()
  shapes = {path: (*layers, 128, 130)}
  now, gradients = _draw(shapes, 0), _draw(shapes, 1)
  (after,), state = _run('adafactor', now, [gradients])
  held = sum(leaf.size for leaf in state.inner.v_row.values())
  held += sum(leaf.size for leaf in state.inner.v_col.values())
  held += sum(leaf.size for leaf in state.inner.v.values())
  assert held == (2 if layers else 1) * (128 + 130) + 1  # And a placeholder.

  def layer(gradient, value):
    squares = gradient.astype(np.float64) ** 2
    rows = squares.mean(1, keepdims=True)
    columns = squares.mean(0, keepdims=True)
    direction = gradient / np.sqrt(rows * columns / squares.mean())
    return value - RATE / 2 * _adafactor_move(path, direction, value)

  values = gradients[path], now[path]
  wanted = layer(*values)
  if layers:
    wanted = np.stack([layer(*pair) for pair in zip(*values, strict=True)])
  np.testing.assert_allclose(after[path], wanted, rtol=1e-4, atol=1e-6)
