"""Sampling on literal logits."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.inference import sampling

INF = np.inf


def _log(*probabilities):
  return jnp.log(jnp.asarray(probabilities, jnp.float32))


def _kept(logits):
  return np.flatnonzero(np.isfinite(np.asarray(logits))).tolist()


def _filter(logits, config):
  """Filters one row."""
  return sampling.filter_logits(logits[None], sampling.stack([config]))[0]


def test_top_k_keeps_exactly_k_and_lower_ids_win_ties():
  logits = jnp.array([1.0, 3.0, 2.0, 3.0, 2.0])
  assert _kept(sampling.keep_top_k(logits, 1)) == [1]
  assert _kept(sampling.keep_top_k(logits, 2)) == [1, 3]
  assert _kept(sampling.keep_top_k(logits, 3)) == [1, 2, 3]
  assert _kept(sampling.keep_top_k(logits, 9)) == [0, 1, 2, 3, 4]
  assert _kept(sampling.keep_top_k(jnp.array([-0.0, 0.0, 0.0]), 2)) == [0, 1]
  np.testing.assert_array_equal(
    sampling.keep_top_k(logits, 3), [-INF, 3.0, 2.0, 3.0, -INF]
  )


@pytest.mark.parametrize(
  'p, kept',
  [
    (0.01, [2]),  # never empty
    (0.50, [2]),  # reached exactly: nothing more
    (0.51, [1, 2]),
    (0.75, [1, 2]),
    (0.80, [0, 1, 2]),  # the tie of 0 and 3 goes to the lower id
    (0.90, [0, 1, 2, 3]),
    (1.00, [0, 1, 2, 3]),
  ],
)
def test_top_p_keeps_the_smallest_set(p, kept):
  logits = _log(0.125, 0.25, 0.5, 0.125)
  assert _kept(sampling.keep_top_p(logits, p)) == kept


def _sorted_top_p(logits, p):
  """Top-p of one row by a stable sort."""
  order = np.argsort(-logits, kind='stable')
  ordered = np.asarray(jax.nn.softmax(logits))[order]
  kept = np.searchsorted(np.cumsum(ordered)[:-1], p) + 1
  return sorted(order[:kept].tolist())


@pytest.mark.parametrize('p', [0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_equals_sorting(p):
  # Flat rows need more tokens than are looked at first; quarters give ties.
  scale = np.array([[0.1], [6.0]])
  logits = np.random.default_rng(0).normal(size=(2, 5000)) * scale
  logits = (np.round(logits * 4) / 4).astype(np.float32)
  kept = jax.jit(sampling.keep_top_p, static_argnums=1)(logits, p)
  counts = [len(_kept(row)) for row in kept]
  assert counts[0] > 1024 > counts[1]
  alone = sampling.keep_top_p(logits[1:], p)
  np.testing.assert_array_equal(alone[0], kept[1])
  for row, result in zip(logits, kept, strict=True):
    # Sums may round to the other side of p.
    assert abs(len(_sorted_top_p(row, p)) - len(_kept(result))) <= 1
    longer = np.argsort(-row, kind='stable')[: len(_kept(result))]
    assert _kept(result) == sorted(longer.tolist())


def test_min_p_compares_with_the_likeliest():
  logits = _log(0.2, 0.5, 0.26, 0.04)
  assert _kept(sampling.keep_min_p(logits, 0.5)) == [1, 2]
  assert _kept(sampling.keep_min_p(logits, 0.3)) == [0, 1, 2]
  assert _kept(sampling.keep_min_p(logits, 1.0)) == [1]
  config = sampling.SamplingConfig(temperature=0.5, min_p=0.3)
  # Squared, 0.26 has 0.27 of the probability of 0.5.
  assert _kept(_filter(logits, config)) == [1]


def test_top_p_leaves_out_what_is_out():
  logits = jnp.array([0.0, -INF, 0.0, -INF])
  assert _kept(sampling.keep_top_p(logits, 1.0)) == [0, 2]
  assert _kept(sampling.keep_top_p(logits, 0.5)) == [0]


def test_temperature_then_top_k_then_top_p():
  logits = _log(0.4, 0.3, 0.2, 0.1)
  # At temperature 1/2 probabilities are squared: 16 : 9 : 4 : 1. Top-k
  # leaves 16 : 9 : 4, of which 16 / 29 > 0.55; without the renormalisation
  # 16 / 30 would be below it.
  config = sampling.SamplingConfig(temperature=0.5, top_k=3, top_p=0.55)
  assert _kept(_filter(logits, config)) == [0]
  config = sampling.SamplingConfig(temperature=0.5, top_k=3, top_p=0.56)
  assert _kept(_filter(logits, config)) == [0, 1]
  plain = sampling.SamplingConfig(temperature=0.5, top_k=3)
  np.testing.assert_allclose(
    jax.nn.softmax(_filter(logits, plain)),
    [16 / 29, 9 / 29, 4 / 29, 0],
    rtol=1e-5,
  )


def test_greedy_is_argmax_lower_id_first():
  logits = jnp.array([[0.0, 2.0, 2.0], [5.0, 1.0, 2.0]])
  keys = jax.random.split(jax.random.key(0), 2)
  np.testing.assert_array_equal(sampling.choose_likeliest(logits), [1, 0])
  # Rows of a batch have options of their own.
  options = [sampling.SamplingConfig(), sampling.SamplingConfig(1.0, top_k=1)]
  drawn = sampling.draw(logits, keys, sampling.stack(options))
  np.testing.assert_array_equal(drawn, [1, 0])


def test_options_are_of_rows():
  logits = jnp.tile(_log(0.4, 0.3, 0.2, 0.1), (4, 1))
  options = sampling.stack(
    [
      sampling.SamplingConfig(1.0),
      sampling.SamplingConfig(1.0, top_k=2),
      sampling.SamplingConfig(1.0, top_p=0.8),
      sampling.SamplingConfig(1.0, min_p=0.3),
    ]
  )
  kept = [_kept(row) for row in sampling.filter_logits(logits, options)]
  assert kept == [[0, 1, 2, 3], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_penalty_lowers_what_was_seen():
  logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
  seen = jnp.array([[True, True, False, False]])
  np.testing.assert_array_equal(
    sampling.penalise(logits, seen, jnp.array([2.0])), [[1, -4, 2, -2]]
  )


def test_presence_and_frequency_penalties_count_generated_tokens():
  configs = [
    sampling.SamplingConfig(),
    sampling.SamplingConfig(presence_penalty=0.5),
    sampling.SamplingConfig(frequency_penalty=-0.25),
    sampling.SamplingConfig(presence_penalty=1.0, frequency_penalty=2.0),
  ]
  # The third token is of an earlier request, or not generated yet.
  tokens, counts = jnp.array([[1, 1, 2]] * 4), jnp.array([2, 2, 2, 3])
  lower = sampling.penalise_generated(
    jnp.zeros((4, 4)), tokens, counts, sampling.stack(configs)
  )
  np.testing.assert_array_equal(
    lower, [[0, 0, 0, 0], [0, -0.5, 0, 0], [0, 0.5, 0, 0], [0, -5, -3, 0]]
  )


def test_draws_follow_the_distribution_and_the_keys():
  logits = jnp.tile(_log(0.6, 0.3, 0.1), (4000, 1))
  keys = jax.random.split(jax.random.key(1), 4000)
  config = sampling.SamplingConfig(temperature=1.0, top_k=2)
  options = sampling.stack([config] * 4000)
  tokens = sampling.draw(logits, keys, options)
  counts = np.bincount(tokens, minlength=3) / 4000
  # Four standard deviations of a proportion of 4000 draws are 0.03.
  np.testing.assert_allclose(counts, [2 / 3, 1 / 3, 0], atol=0.03)
  again = sampling.draw(logits[:7], keys[:7], sampling.stack([config] * 7))
  np.testing.assert_array_equal(again, tokens[:7])


@pytest.mark.parametrize(
  'bad',
  [
    {'temperature': -1.0},
    {'temperature': float('nan')},
    {'temperature': 1.0, 'top_k': 0},
    {'temperature': 1.0, 'top_p': 0.0},
    {'temperature': 1.0, 'top_p': 1.5},
    {'temperature': 1.0, 'min_p': 0.0},
    {'temperature': 1.0, 'min_p': 1.5},
    {'repetition_penalty': 0.0},
    {'seed': -1},
    {'presence_penalty': 2.1},
    {'top_log_probs': 6},
    {'frequency_penalty': float('nan')},
    {'top_k': 5},
    {'top_p': 0.5},
    {'min_p': 0.5},
  ],
)
def test_bad_settings_are_named(bad):
  with pytest.raises(errors.UserError, match=list(bad)[-1]):
    sampling.SamplingConfig(**bad)
