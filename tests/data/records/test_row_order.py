"""Mixtures of the parts of a record set: rates, phases, positions."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import row_order, row_rates


class Rows:
  """Parts as a record set states them: rows a pass, examples, tokens."""

  def __init__(self, rows, passes=2, rates=None):
    self.parts = [
      {
        'objective': f'o{i}',
        'source': 's',
        'rate': rates[i] if rates else None,
        'rows': passes * count,
        'pairs': passes * count * (i + 1),
        'target_tokens': passes * count * 10 * (i + 1),
      }
      for i, count in enumerate(rows)
    ]
    ends = list(itertools.accumulate(rows * passes, initial=0))
    bounds = list(itertools.pairwise(ends))
    self.ranges = [
      bounds[i : i + len(rows)] for i in range(0, len(bounds), len(rows))
    ]

  def part_of(self, row):
    (part,) = (
      part
      for ranges in self.ranges
      for part, (start, stop) in enumerate(ranges)
      if start <= row < stop
    )
    return part


def _order(rows, text, **options):
  return row_order.Order(rows, rates=row_rates.parse(text), **options)


def test_shares_of_rows_examples_and_tokens():
  rows = Rows([1000, 1000])
  for text, first in (
    ('rows:1,3', 1 / 4),
    # A row of the second part has two examples, and twice the tokens.
    ('examples:1,1', 2 / 3),
    ('tokens:3,2', 3 / 4),
    ('rows:sizes', 1 / 2),
    ('tokens:sizes', 1 / 2),
    ('examples:sizes,cap=2000', 2 / 3),
    ('rows:4,1,temperature=2', 2 / 3),
  ):
    order = _order(rows, text, repeat=True)
    assert order.consumed(9_000)[0] == pytest.approx(9_000 * first, abs=2)
    drawn = [rows.part_of(order.row(i)) for i in range(300)]
    assert drawn.count(0) == pytest.approx(300 * first, abs=2)


def test_parts_take_turns_evenly():
  order = _order(Rows([100, 100]), 'rows:1,2')
  rows = Rows([100, 100])
  assert [rows.part_of(order.row(i)) for i in range(6)] == [1, 0, 1, 1, 0, 1]


def test_the_order_ends_before_a_part_starts_over():
  rows = Rows([10, 40], passes=1)
  order = _order(rows, 'rows:1,1')
  read = [order.row(i) for i in range(order.total)]
  assert sorted(row for row in read if row < 10) == list(range(10))
  assert len(set(read)) == len(read) and 20 <= len(read) <= 21
  assert order.row(order.total) == row_order.FILLER
  assert _order(rows, 'rows:1,1', repeat=True).total is None


@pytest.mark.parametrize(
  'rows', [[1_000_000, 5], [30_000, 7_000, 3], [1_000_000, 300_001, 7, 1]]
)
def test_rates_by_size_read_every_part_to_its_end(rows):
  order = _order(Rows(rows, passes=1), 'rows:sizes')
  assert sum(rows) - len(rows) < order.total <= sum(rows)
  left = np.array(rows) - order.consumed(order.total)
  assert (left >= 0).all() and (left <= 1).all()


def test_positions_are_a_partition_of_the_turns():
  """Across blocks too, with shares that floats cannot hold."""
  shares = np.array([1 / 3, 0.1, 0, 17 / 30])
  turns = row_order.Interleaving(shares)
  seen = np.zeros(4, int)
  for position in range(9_000):
    assert position % 997 or (turns.counts(position) == seen).all()
    stream, turn = turns.turn(position)
    assert turn == seen[stream]
    assert turns.position(stream, turn) == position
    seen[stream] += 1
  np.testing.assert_allclose(seen, 9_000 * shares, atol=1)


def test_a_switch_reads_one_part_and_then_the_other():
  rows = Rows([100, 100])
  order = _order(rows, 'tokens:1,0; 5=tokens:0,1', batch_size=8)
  parts = [rows.part_of(order.row(i)) for i in range(80)]
  assert parts == [0] * 40 + [1] * 40
  back = _order(rows, 'rows:0,1; 2=rows:1,0; 3=rows:0,1', batch_size=2)
  parts = [rows.part_of(back.row(i)) for i in range(8)]
  assert parts == [1, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
  data=st.data(),
  sizes=st.lists(st.integers(20, 60), min_size=2, max_size=3),
)
def test_a_saved_position_continues_the_same_order(data, sizes):
  """Also with another batch size after it, and with rates that come later."""
  rate = st.sampled_from([0, 1, 2, 5])
  phase = st.tuples(*[rate] * len(sizes)).filter(any)
  first, second = data.draw(phase), data.draw(phase)
  switch, at = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
  text, later = (','.join(map(str, one)) for one in (first, second))
  whole = f'rows:{text}; {switch}=rows:{later}'
  rows, batch = Rows(sizes), 4
  order = _order(rows, whole, batch_size=batch)
  position = min(at * batch, order.total)
  # Until the switch has come, the saved job need not have known it.
  known = whole if at > switch else f'rows:{text}'
  before = _order(rows, known, batch_size=batch)
  consumed = before.consumed(position)
  assert consumed.sum() == position
  size = data.draw(st.sampled_from([batch, 2])) if at >= switch else batch
  resumed = _order(
    rows,
    whole,
    position=position,
    consumed=consumed,
    step=at,
    batch_size=size,
  )
  assert resumed.total == order.total
  wanted = [order.row(i) for i in range(position, order.total)]
  assert [resumed.row(i) for i in range(position, order.total)] == wanted
  read = [order.row(i) for i in range(order.total)]
  assert len(set(read)) == len(read)


def test_rates_of_a_seqio_mixture_hold_by_example():
  order = row_order.Order(Rows([500, 500], rates=[9.0, 1.0]), repeat=True)
  # 18 rows of one example to 1 row of two.
  np.testing.assert_allclose(order.consumed(1900), [1800, 100], atol=2)
  assert _order(Rows([5, 5]), '').total == 20
  with pytest.raises(errors.UserError, match='state rates for all'):
    row_order.Order(Rows([5, 5], rates=[None, 1.0]))


@pytest.mark.parametrize(
  'text, words',
  [
    ('1,2', "'1,2' at column 1 must be UNIT:RATE"),
    ('words:1,2', 'must be UNIT:RATE'),
    ('rows:0,0', 'a rate above 0'),
    ('rows:1,-1', 'at least 0'),
    ('rows:1,x', "'x' at column 8 must be a rate"),
    ('rows:1,2,cap=0', "'0' at column 14 must be above 0"),
    ('rows:1,2; rows:2,1', 'column 11 must be STEP= with a step above 0'),
    ('rows:1,2; 5=rows:2,1; 5=rows:1,1', "'5' at column 23 must be .* above 5"),
    ('rows:1,2,3', '3 rates for the 2 parts .*o0 of s; o1 of s'),
  ],
)
def test_rates_that_do_not_suit_are_refused(text, words):
  with pytest.raises(errors.UserError, match=words):
    _order(Rows([5, 5]), text)


def test_a_part_without_rows_or_another_number_of_parts_is_refused():
  with pytest.raises(errors.UserError, match='a part without tokens'):
    _order(Rows([5, 0]), 'tokens:1,1')
  with pytest.raises(errors.UserError, match='positions of 1 parts.*2'):
    _order(Rows([5, 5]), 'rows:1,1', consumed=[3], position=3)


def test_batches_of_a_single_part_resume_anywhere():
  rows = Rows([40, 20])
  order = _order(rows, 'batches:2,1', batch_size=8)
  drawn = [order.row(i) for i in range(order.total)]
  parts = [
    [*map(rows.part_of, drawn[i : i + 8])] for i in range(0, len(drawn), 8)
  ]
  assert all(len(set(batch)) == 1 and len(batch) == 8 for batch in parts)
  assert [batch[0] for batch in parts[:6]] == [0, 1, 0, 0, 1, 0]
  # 80 and 40 rows in two passes: ten and five batches, none of them incomplete.
  assert len(parts) == 15 and len(set(drawn)) == 120
  saved = dict(position=32, consumed=order.consumed(32), step=4)
  later = _order(rows, 'batches:2,1', batch_size=8, **saved)
  assert [later.row(i) for i in range(32, later.total)] == drawn[32:]
  # Another batch size goes on behind the same rows, in batches of one part.
  wider = _order(rows, 'batches:2,1', batch_size=12, **saved)
  more = [wider.row(i) for i in range(32, wider.total)]
  assert not {*more} & {*drawn[:32]} and len(set(more)) == len(more)
  for i in range(0, len(more), 12):
    assert len({*map(rows.part_of, more[i : i + 12])}) == 1
