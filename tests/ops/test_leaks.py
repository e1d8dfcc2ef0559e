"""Properties: what a query may not see cannot reach its output.

Not a bit of it, on any backend, traced or not, forward or backward.
"""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import (
  attention,
  attention_splash,
  attention_triton,
  masks,
)

# One shape for every example, so that little is compiled.
L, S, N, K, H = 10, 7, 2, 1, 16
CHUNK = 4
WINDOW = 3

INTERPRETED = {
  'splash': functools.partial(attention_splash.attend, interpret=True),
  'triton': functools.partial(attention_triton.attend, interpret=True),
}
every_backend = pytest.mark.parametrize('backend', sorted(attention.BACKENDS))
kinds = pytest.mark.parametrize(
  'kind, window, rule',
  [
    ('causal', None, 'exclusive'),
    ('causal', WINDOW, 'exclusive'),
    ('full', None, 'exclusive'),
    ('full', WINDOW, 'exclusive'),
    ('full', WINDOW, 'inclusive'),
    ('full', WINDOW, 'centered'),
  ],
)
quick = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 2**31)


def attend(q, k, v, spec, backend):
  if backend in INTERPRETED:
    return INTERPRETED[backend](q, k, v, spec, scale=0.5, softcap=4.0)
  return attention.attention(
    q, k, v, spec, scale=0.5, softcap=4.0, backend=backend, chunk=CHUNK
  )


jitted_attend = jax.jit(attend, static_argnums=4)


@st.composite
def rows(draw, length, minimum_segments=1):
  """Segments [1, length] of a packed row, padding at the end, positions."""
  sizes = draw(
    st.lists(st.integers(1, 5), min_size=minimum_segments, max_size=4)
  )
  segments, positions = [], []
  for number, size in enumerate(sizes, 1):
    segments += [number] * size
    positions += range(size)
  padding = [0] * max(0, length - len(segments))
  return (
    np.array([(segments + padding)[:length]], np.int32),
    np.array([(positions + padding)[:length]], np.int32),
  )


def content(seed, keys=L):
  rng = np.random.default_rng(seed)
  return tuple(
    rng.normal(size=shape).astype(np.float32)
    for shape in [(1, L, N, H), (1, keys, K, H), (1, keys, K, H)]
  )


def changed(arrays, where, seed):
  """`arrays` with other, partly huge, content at the tokens `where`."""
  rng = np.random.default_rng(seed)
  size = 10.0 ** rng.integers(0, 5)
  return tuple(
    np.where(
      where[None, :, None, None], size * rng.normal(size=x.shape), x
    ).astype(np.float32)
    for x in arrays
  )


def self_spec(kind, window, rule, segments, positions, aligned=True):
  return masks.MaskSpec(
    kind=kind,
    window=window,
    window_rule=rule,
    q_segments=jnp.asarray(segments),
    kv_segments=jnp.asarray(segments),
    q_positions=jnp.asarray(positions),
    kv_positions=jnp.asarray(positions),
    aligned=aligned,
  )


def outputs(before, after, spec, backend, run=jitted_attend):
  return tuple(
    np.asarray(run(*map(jnp.asarray, arrays), spec, backend))[0]
    for arrays in (before, after)
  )


def assert_same_bits(x, y, queries):
  np.testing.assert_array_equal(
    x[queries].view(np.uint32), y[queries].view(np.uint32)
  )


@every_backend
@kinds
def test_other_segments_do_not_leak(backend, kind, window, rule):
  @quick
  @given(rows(L, minimum_segments=2), seeds, st.data())
  def check(row, seed, data):
    segments, positions = row
    victim = data.draw(st.integers(1, int(segments.max())))
    inside = segments[0] == victim
    before = content(seed)
    after = changed(before, inside, seed + 1)
    spec = self_spec(kind, window, rule, segments, positions)
    x, y = outputs(before, after, spec, backend)
    assert_same_bits(x, y, ~inside)
    assert (x[inside] != y[inside]).any()  # the change was a change

  check()


@every_backend
@kinds
def test_padding_does_not_leak(backend, kind, window, rule):
  @quick
  @given(rows(L), seeds)
  def check(row, seed):
    segments, positions = row
    padding = segments[0] == 0
    before = content(seed)
    after = changed(before, padding, seed + 1)
    spec = self_spec(kind, window, rule, segments, positions)
    x, y = outputs(before, after, spec, backend)
    assert_same_bits(x, y, np.full(L, True))
    np.testing.assert_array_equal(y[padding], 0.0)

  check()


@every_backend
@pytest.mark.parametrize('window', [None, WINDOW])
def test_the_future_does_not_leak(backend, window):
  @quick
  @given(rows(L), seeds, st.integers(0, L - 1))
  def check(row, seed, first):
    segments, positions = row
    future = np.arange(L) >= first
    before = content(seed)
    after = changed(before, future, seed + 1)
    spec = self_spec('causal', window, 'exclusive', segments, positions)
    x, y = outputs(before, after, spec, backend)
    assert_same_bits(x, y, ~future)
    if (segments[0] != 0)[first]:
      assert (x[first] != y[first]).any()

  check()


@every_backend
@pytest.mark.parametrize(
  'kind, rule, reach_back, reach_ahead',
  [
    ('causal', 'exclusive', WINDOW - 1, 0),
    ('full', 'exclusive', WINDOW - 1, WINDOW - 1),
    ('full', 'inclusive', WINDOW, WINDOW),
    ('full', 'centered', (WINDOW + 1) // 2 - 1, WINDOW // 2),
  ],
)
def test_beyond_the_window_does_not_leak(
  backend, kind, rule, reach_back, reach_ahead
):
  @quick
  @given(seeds, st.integers(0, L - 1), st.booleans())
  def check(seed, token, reverse):
    # One segment: its order in the row means nothing, positions do, but to
    # kernels that take tokens as they stand.
    positions = np.arange(L, dtype=np.int32)[None]
    reverse &= backend != 'splash'
    positions = positions[:, ::-1].copy() if reverse else positions
    segments = np.ones((1, L), np.int32)
    before = content(seed)
    where = positions[0] == token
    after = changed(before, where, seed + 1)
    after = (
      np.where(where[None, :, None, None], before[0], after[0]),
    ) + after[1:]
    spec = self_spec(kind, WINDOW, rule, segments, positions, not reverse)
    x, y = outputs(before, after, spec, backend)
    ahead_of_token = positions[0] - token
    sees = (ahead_of_token <= reach_back) & (-ahead_of_token <= reach_ahead)
    assert_same_bits(x, y, ~sees)
    assert (x[sees] != y[sees]).any(axis=(1, 2)).all()

  check()


@every_backend
def test_cross_attention_does_not_leak(backend):
  @quick
  @given(rows(L, minimum_segments=2), rows(S), seeds, st.integers(0, 4))
  def check(decoder, encoder, seed, victim):
    q_segments, kv_segments = decoder[0], encoder[0]
    spec = masks.cross(jnp.asarray(q_segments), jnp.asarray(kv_segments))
    before = content(seed, keys=S)
    where = kv_segments[0] == victim  # 0: the encoder's padding
    after = before[:1] + changed(before[1:], where, seed + 1)
    x, y = outputs(before, after, spec, backend)
    sees = (q_segments[0] == victim) & (victim != 0) & where.any()
    assert_same_bits(x, y, ~sees)
    assert (x[sees] != y[sees]).any(axis=(1, 2)).all()
    blind = ~np.isin(q_segments[0], kv_segments[kv_segments != 0])
    np.testing.assert_array_equal(y[blind], 0.0)

  check()


@pytest.mark.parametrize(
  'backend',
  sorted(
    name
    for name, backend in attention.BACKENDS.items()
    if backend.capabilities.memory
  ),
)
def test_other_segments_of_a_memory_do_not_leak(backend):
  @quick
  @given(rows(L, minimum_segments=2), rows(S), seeds, st.integers(0, 4))
  def check(decoder, encoder, seed, victim):
    segments, positions = decoder
    memory = encoder[0]
    own = masks.causal(
      jnp.asarray(segments), jnp.asarray(positions), window=WINDOW
    )
    spec = masks.with_memory(own, jnp.asarray(memory))
    before = content(seed, keys=L + S)
    where = np.concatenate([np.full(L, False), memory[0] == victim])
    after = before[:1] + changed(before[1:], where, seed + 1)
    x, y = outputs(before, after, spec, backend)
    sees = (segments[0] == victim) & (victim != 0) & where.any()
    assert_same_bits(x, y, ~sees)
    assert (x[sees] != y[sees]).any(axis=(1, 2)).all()

  check()


@pytest.mark.parametrize(
  'backend', sorted(set(attention.BACKENDS) - set(INTERPRETED))
)
@kinds
def test_nothing_leaks_untraced(backend, kind, window, rule):
  # Few examples: outside jit, each call compiles its loops anew.
  @settings(max_examples=2, deadline=None)
  @given(rows(L, minimum_segments=2), seeds)
  def check(row, seed):
    segments, positions = row
    inside = segments[0] == 1
    before = content(seed)
    after = changed(before, inside, seed + 1)
    spec = self_spec(kind, window, rule, segments, positions)
    x, y = outputs(before, after, spec, backend, run=attend)
    assert_same_bits(x, y, ~inside)
    assert (x[inside] != y[inside]).any()

  check()


@functools.partial(jax.jit, static_argnums=5)
def gradients(q, k, v, spec, weight, backend):
  def loss(q, k, v):
    return jnp.sum(attend(q, k, v, spec, backend) * weight)

  return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@every_backend
@kinds
def test_gradients_do_not_leak(backend, kind, window, rule):
  @quick
  @given(rows(L, minimum_segments=2), seeds)
  def check(row, seed):
    # The loss is of the first segment only.
    segments, positions = row
    first = segments[0] == 1
    weight = jnp.asarray(first, jnp.float32)[None, :, None, None]
    spec = self_spec(kind, window, rule, segments, positions)
    arrays = map(jnp.asarray, content(seed))
    for gradient in gradients(*arrays, spec, weight, backend):
      np.testing.assert_array_equal(np.asarray(gradient)[0, ~first], 0.0)
    # The gradient of the values: the sum of the weights that read them.
    assert (np.asarray(gradient)[0, first] != 0).any()

  check()
