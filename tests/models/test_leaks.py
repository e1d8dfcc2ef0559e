"""What a token may not see does not change its logits by one bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, execution, model_config


def change(triple, where):
  """The same rows with other tokens where `where` [B, L] holds."""
  tokens, segments, positions = triple
  return jnp.where(where, tokens % 50 + 1, tokens), segments, positions


@pytest.fixture(scope='module', params=['chunked', 'reference'])
def pair(request, small_pair, redraw, run):
  """A function (encoder rows, decoder rows) -> logits."""
  model = build.build(
    small_pair,
    execution.ComputeConfig(attention=request.param, attention_chunk=4),
  )
  logits, params = run(model), redraw(model)
  return lambda *rows: np.asarray(logits(params, *rows))


def test_another_segment_is_not_seen(pair, pack):
  encoder, decoder = pack([[5, 4]], 12), pack([[3, 5]], 10, seed=1)
  before = pair(encoder, decoder)
  first = np.asarray(decoder[1]) == 1
  second = np.asarray(decoder[1]) == 2

  encoder_changed = pair(change(encoder, encoder[1] == 2), decoder)
  np.testing.assert_array_equal(encoder_changed[first], before[first])
  assert (encoder_changed[second] != before[second]).any(-1).all()

  both = pair(change(encoder, encoder[1] == 1), change(decoder, first))
  np.testing.assert_array_equal(both[second], before[second])
  assert (both[first] != before[first]).any(-1).all()


def test_padding_is_not_seen(pair, pack):
  encoder, decoder = pack([[5, 4]], 12), pack([[3, 5]], 10, seed=1)
  before = pair(encoder, decoder)
  after = pair(
    change(encoder, encoder[1] == 0), change(decoder, decoder[1] == 0)
  )
  real = np.asarray(decoder[1]) > 0
  np.testing.assert_array_equal(after[real], before[real])
  assert (after[~real] != before[~real]).any()
  assert np.isfinite(after).all()


def test_the_future_is_not_seen(pair, pack):
  encoder, decoder = pack([[12]], 12), pack([[10]], 10, seed=1)
  before = pair(encoder, decoder)
  late = np.arange(10)[None] >= 5
  after = pair(encoder, change(decoder, late))
  np.testing.assert_array_equal(after[:, :5], before[:, :5])
  assert (after[:, 5:] != before[:, 5:]).any(-1).all()


def test_the_encoder_sees_ahead_and_every_decoder_token_sees_it(pair, pack):
  encoder, decoder = pack([[12]], 12), pack([[10]], 10, seed=1)
  before = pair(encoder, decoder)
  last = np.arange(12)[None] == 11
  after = pair(change(encoder, last), decoder)
  assert (after != before).any(-1).all()


def test_beyond_the_window_is_not_seen(small_stack, redraw, run, pack):
  # Two local layers of window 3 reach 4 tokens back.
  stack = small_stack(layers=2, pattern=('local',))
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params, rows = redraw(model), pack([[12]], 12)
  before = np.asarray(run(model)(params, None, rows))
  changed = change(rows, np.arange(12)[None] == 3)
  after = np.asarray(run(model)(params, None, changed))
  same = (after == before).all(-1)[0]
  assert same.tolist() == [True] * 3 + [False] * 5 + [True] * 4


def test_packed_equals_unpacked(pair, pack):
  encoder, decoder = pack([[5, 4]], 12), pack([[3, 5]], 10, seed=1)
  packed = pair(encoder, decoder)
  # The second pair alone, at the start of the row.
  alone = pair(_keep(encoder, 5, 4), _keep(decoder, 3, 5))
  np.testing.assert_allclose(packed[:, 3:8], alone[:, :5], atol=2e-5)


def _keep(triple, start, size):
  """The rows' tokens from `start` on, the rest padding."""
  kept = [jnp.roll(x, -start, axis=1) for x in triple]
  inside = jnp.arange(kept[0].shape[1]) < size
  return tuple(jnp.where(inside, x, 0) for x in kept)
