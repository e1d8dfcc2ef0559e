"""What a token may not see does not change its logits by one bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, execution, model_config
from encdec_adapt.ops import relative_bias
from tests import toy_models


def change(triple, mask):
  """The same rows with other tokens where the mask [B, L] holds."""
  tokens, segments, positions = triple
  return jnp.where(mask, tokens % 50 + 1, tokens), segments, positions


@pytest.fixture(scope='module')
def pair(small_pair, redraw, run):
  """A function (encoder rows, decoder rows) -> logits."""
  compute = execution.ComputeConfig('float32', 'none', attention_chunk=4)
  model = build.build(small_pair, compute)
  logits, params = run(model), redraw(model)
  return lambda *rows: np.asarray(logits(params, *rows))


PACKED, WHOLE = ([5, 4], [3, 5]), ([12], [10])
NOWHERE = lambda segment, index: index < 0  # noqa: E731


# Segment lengths of an encoder row and a decoder row; the tokens of each that
# change, by segment and index; and the logits of the decoder that stay.
@pytest.mark.parametrize(
  'lengths, encoder, decoder, stays',
  [
    (PACKED, lambda s, i: s == 2, NOWHERE, lambda s, i: s == 1),
    (PACKED, lambda s, i: s == 1, lambda s, i: s == 1, lambda s, i: s == 2),
    (PACKED, lambda s, i: s == 0, lambda s, i: s == 0, lambda s, i: s > 0),
    (WHOLE, NOWHERE, lambda s, i: i >= 5, lambda s, i: i < 5),
    (WHOLE, lambda s, i: i == 11, NOWHERE, NOWHERE),
  ],
  ids=['segment', 'other segment', 'padding', 'future', 'encoder sees ahead'],
)
def test_what_is_not_visible_is_not_seen(
  lengths, encoder, decoder, stays, pair, pack
):
  rows = pack([lengths[0]], 12), pack([lengths[1]], 10, seed=1)
  changed = pair(
    *(
      change(row, mask(row[1], np.arange(row[1].shape[1])[None]))
      for row, mask in zip(rows, (encoder, decoder), strict=True)
    )
  )
  logits, segments = pair(*rows), np.asarray(rows[1][1])
  same = stays(segments, np.arange(10)[None])
  np.testing.assert_array_equal(changed[same], logits[same])
  real = ~same & (segments > 0)
  assert (changed[real] != logits[real]).any(-1).all()
  assert np.isfinite(changed).all()


def test_beyond_the_window_is_not_seen(small_stack, redraw, run, pack):
  # Two local layers of window 3 reach 4 tokens back.
  stack = small_stack(layers=2, pattern=('local',))
  model = build.build(model_config.DecoderOnlyConfig(stack))
  params, rows = redraw(model), pack([[12]], 12)
  logits = np.asarray(run(model)(params, None, rows))
  rows = change(rows, np.arange(12)[None] == 3)
  changed = np.asarray(run(model)(params, None, rows))
  same = (changed == logits).all(-1)[0]
  assert same.tolist() == [True] * 3 + [False] * 5 + [True] * 4


def test_packed_equals_unpacked(pair, pack):
  encoder, decoder = pack([[5, 4]], 12), pack([[3, 5]], 10, seed=1)
  packed = pair(encoder, decoder)
  # The second pair alone, at the start of the row.
  unpacked = pair(_keep(encoder, 5, 4), _keep(decoder, 3, 5))
  np.testing.assert_allclose(packed[:, 3:8], unpacked[:, :5], atol=2e-5)


@pytest.mark.parametrize('kind', ['relative', 'relative_each', 'learned'])
def test_packed_equals_unpacked_with_other_positions(
  kind, small_stack, redraw, run, pack
):
  positions = relative_bias.Positions('learned', rows=28)
  if kind != 'learned':
    positions = toy_models.positions(kind)
  stack = small_stack(**{**toy_models.T5, 'positions': positions})
  config = model_config.encoder_decoder(stack, stack, shared_table=True)
  # Several chunks of queries, and segments that reach all buckets.
  compute = execution.ComputeConfig('float32', 'none', attention_chunk=8)
  model = build.build(config, compute)
  logits, params = run(model), redraw(model)
  encoder, decoder = pack([[13, 14]], 28), pack([[12, 15]], 28, seed=1)
  packed = logits(params, encoder, decoder)
  for (start, size), (first, count) in (
    ((0, 13), (0, 12)),
    ((13, 14), (12, 15)),
  ):
    alone = logits(
      params, _keep(encoder, start, size), _keep(decoder, first, count)
    )
    found = packed[:, first : first + count]
    np.testing.assert_allclose(found, alone[:, :count], rtol=0, atol=1e-5)


@pytest.mark.parametrize('token_types', [0, 1], ids=['bart', 'roberta'])
@pytest.mark.parametrize('is_pair', [True, False])
def test_only_roberta_counts_positions_without_padding(token_types, is_pair):
  positions = relative_bias.Positions('learned', rows=32, offset=2)
  fields = dict(token_types=token_types, positions=positions)
  stack = toy_models.stack(**toy_models.BERT | fields)
  config = model_config.DecoderOnlyConfig(stack)
  if is_pair:
    config = model_config.encoder_decoder(stack, toy_models.stack())
  loaded = toy_models.load(config)

  def states(tokens, mask):
    if is_pair:
      return np.asarray(loaded.encode(tokens, mask))
    return np.asarray(loaded.logits(tokens, decoder_mask=mask))

  tokens, mask = np.array([[0, 0, 5, 6, 7]]), np.array([[0, 0, 1, 1, 1]])
  padded = states(tokens, mask)[:, 2:]
  plain = states(tokens[:, 2:], mask[:, 2:])
  assert np.allclose(padded, plain, atol=1e-4) == bool(token_types)


def _keep(triple, start, size):
  """The rows' tokens from `start` on, the rest padding."""
  rows = [jnp.roll(x, -start, axis=1) for x in triple]
  mask = jnp.arange(rows[0].shape[1]) < size
  return tuple(jnp.where(mask, x, 0) for x in rows)
