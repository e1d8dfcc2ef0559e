"""Literal masks: rows are queries, columns are keys, 1 is visible."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import masks

ONE = jnp.ones((1, 5), jnp.int32), jnp.arange(5, dtype=jnp.int32)[None]
# Two pairs and a padded slot; positions restart.
PACKED = jnp.array([[1, 1, 2, 2, 0]]), jnp.array([[0, 1, 0, 1, 0]])
# One segment split by another: indices 0 and 3 are neighbours by position.
SPLIT = jnp.array([[1, 2, 2, 1]]), jnp.array([[0, 0, 1, 1]])
bidirectional = masks.bidirectional
inclusive = functools.partial(bidirectional, window_rule='inclusive')
centered = functools.partial(bidirectional, window_rule='centered')


def prefixed(*tokens, window):
  """A prefix mask: the first two of every segment are its prefix."""
  return masks.prefix(*tokens, jnp.int32(tokens[1] < 2), window=window)


def rule_of_no_effect(*tokens, window):
  """A causal mask with another window rule, which it ignores."""
  return masks.causal(*tokens, window=window).replace(window_rule='inclusive')


def assert_mask(spec, rows):
  expected = [[int(c) for c in row] for row in rows.split()]
  np.testing.assert_array_equal(
    np.asarray(masks.dense_mask(spec)[0]).astype(int), expected
  )


@pytest.mark.parametrize(
  'make, tokens, window, rows',
  [
    (masks.causal, ONE, None, '10000 11000 11100 11110 11111'),
    # As many keys as it is wide, the query's own included.
    (masks.causal, ONE, 2, '10000 11000 01100 00110 00011'),
    (masks.causal, ONE, 1, '10000 01000 00100 00010 00001'),
    (prefixed, ONE, None, '11000 11000 11100 11110 11111'),
    (prefixed, ONE, 2, '11000 11000 01100 00110 00011'),
    (prefixed, ONE, 1, '10000 01000 00100 00010 00001'),
    (prefixed, PACKED, None, '11000 11000 00110 00110 00000'),
    (rule_of_no_effect, ONE, 2, '10000 11000 01100 00110 00011'),
    (bidirectional, ONE, None, '11111 11111 11111 11111 11111'),
    (bidirectional, ONE, 2, '11000 11100 01110 00111 00011'),
    (inclusive, ONE, 2, '11100 11110 11111 01111 00111'),
    # Even: one key more after the query than before it.
    (centered, ONE, 2, '11000 01100 00110 00011 00001'),
    (centered, ONE, 3, '11000 11100 01110 00111 00011'),
    (masks.causal, PACKED, None, '10000 11000 00100 00110 00000'),
    (bidirectional, PACKED, None, '11000 11000 00110 00110 00000'),
    (bidirectional, SPLIT, 2, '1001 0110 0110 1001'),
  ],
)
def test_self_attention(make, tokens, window, rows):
  assert_mask(make(*tokens, window=window), rows)


def test_memory_is_seen_from_every_position_of_its_segment():
  own = masks.causal(*PACKED, window=1)
  assert_mask(
    masks.with_memory(own, jnp.array([[1, 2, 2, 0]])),
    '100001000 010001000 001000110 000100110 000000000',
  )


def test_cross_has_no_positions():
  assert_mask(
    masks.cross(PACKED[0], jnp.array([[1, 2, 2, 2, 3, 0]])),
    '100000 100000 011100 011100 000000',
  )


def test_one_query_on_a_cache_in_any_order():
  spec = masks.causal(
    jnp.array([[1]]),
    jnp.array([[5]]),
    window=3,
    keys=(jnp.array([[1, 1, 1, 1, 0]]), jnp.array([[4, 5, 2, 3, 4]])),
  )
  assert_mask(spec, '11010')


def test_spec_is_a_pytree_with_static_rules():
  spec = masks.causal(*PACKED, window=2)
  mapped = jax.tree.map(lambda x: x.shape, spec)
  assert mapped.window == 2 and mapped.q_segments == (1, 5)
  jitted = jax.jit(masks.dense_mask)(spec)
  np.testing.assert_array_equal(jitted, masks.dense_mask(spec))
