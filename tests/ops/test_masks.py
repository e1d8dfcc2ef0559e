"""Literal masks: rows are queries, columns are keys, 1 is visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import masks

ONE_SEGMENT = jnp.ones((1, 5), jnp.int32)
POSITIONS = jnp.arange(5, dtype=jnp.int32)[None]
# Two pairs and a padded slot; positions restart.
PACKED = jnp.array([[1, 1, 2, 2, 0]], jnp.int32)
PACKED_POSITIONS = jnp.array([[0, 1, 0, 1, 0]], jnp.int32)


def assert_mask(spec, *rows):
  expected = [[int(c) for c in row.replace(' ', '')] for row in rows]
  np.testing.assert_array_equal(
    np.asarray(masks.dense_mask(spec)[0]).astype(int), expected
  )


def test_causal():
  assert_mask(
    masks.causal(ONE_SEGMENT, POSITIONS),
    '1 0 0 0 0',
    '1 1 0 0 0',
    '1 1 1 0 0',
    '1 1 1 1 0',
    '1 1 1 1 1',
  )


def test_causal_window_is_as_many_keys_as_its_width():
  assert_mask(
    masks.causal(ONE_SEGMENT, POSITIONS, window=2),
    '1 0 0 0 0',
    '1 1 0 0 0',
    '0 1 1 0 0',
    '0 0 1 1 0',
    '0 0 0 1 1',
  )


def test_causal_window_of_one_sees_itself():
  assert_mask(
    masks.causal(ONE_SEGMENT, POSITIONS, window=1),
    '1 0 0 0 0',
    '0 1 0 0 0',
    '0 0 1 0 0',
    '0 0 0 1 0',
    '0 0 0 0 1',
  )


def test_causal_ignores_the_window_rule():
  exclusive, *others = (
    masks.MaskSpec(
      kind='causal',
      window=2,
      window_rule=rule,
      q_segments=ONE_SEGMENT,
      kv_segments=ONE_SEGMENT,
      q_positions=POSITIONS,
      kv_positions=POSITIONS,
    )
    for rule in masks.WINDOW_RULES
  )
  for other in others:
    np.testing.assert_array_equal(
      masks.dense_mask(exclusive), masks.dense_mask(other)
    )


def test_bidirectional():
  assert_mask(masks.bidirectional(ONE_SEGMENT, POSITIONS), *['1 1 1 1 1'] * 5)


def test_bidirectional_exclusive_window():
  assert_mask(
    masks.bidirectional(ONE_SEGMENT, POSITIONS, window=2),
    '1 1 0 0 0',
    '1 1 1 0 0',
    '0 1 1 1 0',
    '0 0 1 1 1',
    '0 0 0 1 1',
  )


def test_bidirectional_inclusive_window():
  assert_mask(
    masks.bidirectional(
      ONE_SEGMENT, POSITIONS, window=2, window_rule='inclusive'
    ),
    '1 1 1 0 0',
    '1 1 1 1 0',
    '1 1 1 1 1',
    '0 1 1 1 1',
    '0 0 1 1 1',
  )


@pytest.mark.parametrize(
  'window, rows',
  [
    # Even: one key more after the query than before it.
    (2, ['1 1 0 0 0', '0 1 1 0 0', '0 0 1 1 0', '0 0 0 1 1', '0 0 0 0 1']),
    (3, ['1 1 0 0 0', '1 1 1 0 0', '0 1 1 1 0', '0 0 1 1 1', '0 0 0 1 1']),
  ],
)
def test_bidirectional_centered_window_is_as_many_keys_as_its_width(
  window, rows
):
  spec = masks.bidirectional(
    ONE_SEGMENT, POSITIONS, window=window, window_rule='centered'
  )
  assert_mask(spec, *rows)


def test_memory_is_seen_from_every_position_of_its_segment():
  own = masks.causal(PACKED, PACKED_POSITIONS, window=1)
  memory = jnp.array([[1, 2, 2, 0]], jnp.int32)
  assert_mask(
    masks.with_memory(own, memory),
    '1 0 0 0 0  1 0 0 0',
    '0 1 0 0 0  1 0 0 0',
    '0 0 1 0 0  0 1 1 0',
    '0 0 0 1 0  0 1 1 0',
    '0 0 0 0 0  0 0 0 0',
  )


def test_packed_causal():
  assert_mask(
    masks.causal(PACKED, PACKED_POSITIONS),
    '1 0 0 0 0',
    '1 1 0 0 0',
    '0 0 1 0 0',
    '0 0 1 1 0',
    '0 0 0 0 0',
  )


def test_packed_bidirectional():
  assert_mask(
    masks.bidirectional(PACKED, PACKED_POSITIONS),
    '1 1 0 0 0',
    '1 1 0 0 0',
    '0 0 1 1 0',
    '0 0 1 1 0',
    '0 0 0 0 0',
  )


def test_packed_window_counts_positions_not_indices():
  # One segment split by another: indices 0 and 3 are neighbours by position.
  segments = jnp.array([[1, 2, 2, 1]], jnp.int32)
  positions = jnp.array([[0, 0, 1, 1]], jnp.int32)
  assert_mask(
    masks.bidirectional(segments, positions, window=2),
    '1 0 0 1',
    '0 1 1 0',
    '0 1 1 0',
    '1 0 0 1',
  )


def test_cross_has_no_positions():
  assert_mask(
    masks.cross(PACKED, jnp.array([[1, 2, 2, 2, 3, 0]], jnp.int32)),
    '1 0 0 0 0 0',
    '1 0 0 0 0 0',
    '0 1 1 1 0 0',
    '0 1 1 1 0 0',
    '0 0 0 0 0 0',
  )


def test_one_query_on_a_cache_in_any_order():
  spec = masks.MaskSpec(
    kind='causal',
    window=3,
    q_segments=jnp.array([[1]]),
    kv_segments=jnp.array([[1, 1, 1, 1, 0]]),
    q_positions=jnp.array([[5]]),
    kv_positions=jnp.array([[4, 5, 2, 3, 4]]),
  )
  assert_mask(spec, '1 1 0 1 0')


def test_spec_is_a_pytree_with_static_rules():
  spec = masks.causal(PACKED, PACKED_POSITIONS, window=2)
  mapped = jax.tree.map(lambda x: x.shape, spec)
  assert mapped.window == 2 and mapped.q_segments == (1, 5)
  jitted = jax.jit(masks.dense_mask)(spec)
  np.testing.assert_array_equal(jitted, masks.dense_mask(spec))


@pytest.mark.parametrize(
  'change, message',
  [
    ({'kind': 'prefix'}, "'prefix'"),
    ({'window_rule': 'both'}, "'both'"),
    ({'window': 0}, 'window is 0'),
  ],
)
def test_impossible_specs_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    masks.causal(PACKED, PACKED_POSITIONS).replace(**change)


def test_missing_positions_are_refused():
  spec = masks.cross(PACKED, PACKED).replace(kind='causal')
  with pytest.raises(ValueError, match='needs q_positions'):
    masks.dense_mask(spec)


def test_shapes_that_do_not_agree_are_refused():
  spec = masks.causal(PACKED, PACKED_POSITIONS)
  spec = spec.replace(kv_positions=jnp.zeros((1, 4), jnp.int32))
  with pytest.raises(ValueError, match=r'kv_positions .*\(1, 4\).*\(1, 5\)'):
    masks.dense_mask(spec)
