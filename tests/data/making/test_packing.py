"""The pair packer: literal rows, properties, and how full rows get."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from encdec_adapt.data.making import packing
from encdec_adapt.objectives import framing
from tests.objectives import objective_cases


def make_pair(m, n, start=10):
  """A pair of m inputs and n targets, told apart by `start`."""
  tokens = np.arange(start, start + m + n, dtype=np.int32)
  return framing.Pair(tokens[:m], tokens[m:])


def pack(costs, lengths, **kwargs):
  """Packs pairs given by (m, n); returns rows of indices into `costs`."""
  pairs = [make_pair(m, n, 1000 * (i + 1)) for i, (m, n) in enumerate(costs)]
  number = {id(pair.targets): i for i, pair in enumerate(pairs)}
  rows = packing.pack_pairs(pairs, lengths, **kwargs)
  return [[number[id(pair.targets)] for pair in row] for row in rows]


def count_in_order(costs, lengths):
  """Returns the rows of packing pairs in the order they come."""
  rows, free = 0, (-1, -1)
  for m, n in costs:
    taken = (m + 1 if lengths.encoder else 0, n)
    if taken[0] > free[0] or taken[1] > free[1]:
      rows, free = rows + 1, (lengths.encoder, lengths.decoder)
    free = (free[0] - taken[0], free[1] - taken[1])
  return rows


@pytest.mark.parametrize(
  'costs, lengths, rows',
  [
    # Costs (m + 1, n): (6, 2) with (2, 6), (5, 3) with (3, 5).
    ([(5, 2), (4, 3), (1, 6), (2, 5)], (8, 8), [[0, 2], [1, 3]]),
    # Encoder costs 5 + 5 > 8 keep these apart though the targets would fit.
    ([(4, 1), (4, 1)], (8, 8), [[0], [1]]),
    # And here the targets do.
    ([(1, 5), (1, 5)], (8, 8), [[0], [1]]),
    # The encoder-only side; the decoder-only side.
    ([(3, 4), (2, 3), (2, 3)], (7, 0), [[0, 1], [2]]),
    ([(0, 6), (0, 3), (0, 2), (0, 2)], (0, 10), [[0, 1], [2, 3]]),
  ],
)
def test_literal_rows(costs, lengths, rows):
  assert pack(costs, framing.Lengths(*lengths)) == rows


def test_no_packing_keeps_order_and_one_pair_per_row():
  pairs = [make_pair(1, 2), make_pair(0, 1), make_pair(3, 3)]
  rows = list(packing.single_pairs(pairs, framing.Lengths(4, 3)))
  assert [len(row) for row in rows] == [1, 1, 1]
  assert [row[0] for row in rows] == pairs


@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(
  costs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=60),
  rows_at_once=st.integers(1, 9),
  causal=st.booleans(),
)
def test_rows_hold_every_pair_and_are_never_more_than_in_order(
  costs, rows_at_once, causal
):
  lengths = framing.Lengths(0 if causal else 10, 8)
  rows = pack(costs, lengths, rows_at_once=rows_at_once)
  assert sorted(i for row in rows for i in row) == list(range(len(costs)))
  for row in rows:
    assert row == sorted(row)
    assert sum(costs[i][1] for i in row) <= 8
    if not causal:
      assert sum(costs[i][0] + 1 for i in row) <= 10
  assert len(rows) <= count_in_order(costs, lengths)


def test_pairs_are_read_only_as_rows_are_needed():
  seen = []

  def stream():
    for i in range(100):
      seen.append(i)
      yield make_pair(1, 4)

  rows = packing.pack_pairs(stream(), framing.Lengths(8, 4), rows_at_once=10)
  next(rows)
  assert len(seen) == 10


@pytest.mark.parametrize('size', [256, 1024])
@pytest.mark.parametrize('name', ['prefix_lm', 'prefix_lm_uniform', 'ul2'])
def test_every_objective_fills_the_side_that_binds(name, size):
  """On documents with lengths that spread over two orders of magnitude."""
  lengths = framing.Lengths(size, size)
  objective = objective_cases.make(name, size, size, sentinel_policy='recycle')
  draws = np.random.default_rng(0).lognormal(np.log(300), 1.0, 3000)
  pairs = [
    pair
    for seed, length in enumerate(draws.astype(int) + 1)
    for pair in objective_cases.pairs(objective, np.full(length, 600), seed)
  ]
  rows = list(packing.pack_pairs(pairs, lengths))
  costs = np.sum([packing.pair_cost(pair, lengths) for pair in pairs], axis=0)
  fill = costs / (size * len(rows))
  assert max(fill) >= 0.97
  if name != 'ul2':
    # By chance the targets of 3000 documents may be some longer or shorter.
    assert min(fill) >= 0.97 * min(costs) / max(costs)


@pytest.mark.parametrize(
  'm, n, message',
  [(8, 1, '9 encoder'), (1, 5, '5 decoder'), (3, 0, 'no targets')],
)
def test_pairs_that_cannot_be_framed_are_refused(m, n, message):
  lengths = framing.Lengths(8, 4)
  with pytest.raises(ValueError, match=message):
    list(packing.pack_pairs([make_pair(m, n)], lengths))
  with pytest.raises(ValueError, match=message):
    list(packing.single_pairs([make_pair(m, n)], lengths))
