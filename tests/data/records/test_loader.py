"""Loaders: a stream is a function of its position, and nothing is repeated."""

import itertools
import random

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import (
  loader,
  record_sets,
  row_order,
  row_rates,
)
from encdec_adapt.objectives import framing, shared_noise
from tests import gemma_ids
from tests.data.records import test_record_sets

LENGTHS = framing.Lengths(4, 3)
SHARDS = (3, 0, 4)  # rows per shard


def test_masks_of_a_step_are_those_of_the_published_code():
  random.seed(50 + 53 % 51)
  published = random.sample(range(0, 4095), 614)
  assert sorted(shared_noise.positions(53, 4096, 0.15)) == sorted(published)
  rows = {
    'decoder_tokens': np.arange(40).reshape(2, 20),
    'decoder_segments': np.repeat([[1], [0]], 20, axis=1),
  }
  masked = shared_noise.apply(rows, 7, 0.2, mask=-1)
  at = sorted(random.Random(57).sample(range(19), 4))
  assert np.flatnonzero(masked['decoder_tokens'][0] == -1).tolist() == at
  assert (masked['decoder_tokens'][1] == rows['decoder_tokens'][1]).all()


def make_pair(number):
  """A pair that tells its row number in inputs and targets."""
  return framing.Pair(
    np.array([100 + number, 50], np.int32), np.array([200 + number], np.int32)
  )


def write_set(folder, *, passes=2, pack=True, sources=('python',)):
  spec = record_sets.RecordSpec(
    source='python',
    split='train',
    objective='prefix_lm',
    encoder_length=LENGTHS.encoder,
    decoder_length=LENGTHS.decoder,
    passes=passes,
    shards=len(SHARDS),
    pack=pack,
  )
  parts = [record_sets.Part('prefix_lm', source) for source in sources]
  rows = ([make_pair(number)] for number in itertools.count())
  test_record_sets.write_rows(folder, spec, rows, SHARDS, parts)
  return record_sets.RecordSet.open(folder, spec)


@pytest.fixture(scope='module')
def record_set(tmp_path_factory):
  """14 rows in two passes."""
  return write_set(tmp_path_factory.mktemp('packed'))


@pytest.fixture(scope='module')
def single_set(tmp_path_factory):
  """7 rows of one pair."""
  return write_set(tmp_path_factory.mktemp('single'), passes=1, pack=False)


def rows_of(batches):
  """Row numbers, filler left out, checked against the content."""
  numbers = []
  for fields in batches:
    framing.check_framing(fields, gemma_ids.FRAMING)
    for i, number in enumerate(fields['row']):
      if number == row_order.FILLER:
        assert fields['weights'][i].sum() == 0
        continue
      assert fields['encoder_tokens'][i, 1] == 100 + number
      assert fields['targets'][i, 0] == 200 + number
      numbers.append(int(number))
  return numbers


def test_a_batch_holds_the_rows_of_the_order(record_set):
  order = row_order.Order(record_set, seed=5)
  expected = [order.row(position) for position in range(14)]
  stream = loader.Loader(record_set, 4, seed=5)
  first = next(stream)
  np.testing.assert_array_equal(first['row'], expected[:4])
  np.testing.assert_array_equal(
    first['encoder_tokens'][1], [gemma_ids.BOS, 100 + expected[1], 50, 0]
  )
  assert first['row'].dtype == np.int32
  assert rows_of(stream) == expected[4:]


def test_each_pass_is_a_permutation_and_passes_do_not_mix(record_set):
  rows = rows_of(loader.Loader(record_set, 4, seed=1))
  assert sorted(rows[:7]) == list(range(7))
  assert sorted(rows[7:]) == list(range(7, 14))
  assert rows[:7] != list(range(7))
  assert [row - 7 for row in rows[7:]] != rows[:7]
  assert rows == rows_of(loader.Loader(record_set, 4, seed=1))
  assert rows != rows_of(loader.Loader(record_set, 4, seed=2))


def test_the_stream_ends_after_the_last_pass(record_set):
  stream = loader.Loader(record_set, 4)
  assert stream.total == 14
  batches = list(stream)
  assert [fields['row'].size for fields in batches] == [4, 4, 4, 4]
  assert (batches[-1]['row'] == row_order.FILLER).tolist() == [0, 0, 1, 1]
  assert stream.position == 14
  with pytest.raises(StopIteration):
    next(stream)
  again = loader.Loader(record_set, 4, position=14)
  with pytest.raises(StopIteration):
    next(again)


def test_repeating_draws_another_order_of_the_same_rows(record_set):
  stream = loader.Loader(record_set, 7, repeat=True)
  assert stream.total is None
  rows = [rows_of([fields]) for fields in itertools.islice(stream, 4)]
  assert stream.position == 28
  assert sorted(rows[2]) == sorted(rows[0]) == list(range(7))
  assert sorted(rows[3]) == sorted(rows[1])
  assert rows[2] != rows[0]


@pytest.mark.parametrize('prefetch', [0, 3])
def test_a_saved_position_goes_on_with_another_batch_size(record_set, prefetch):
  def open_at(position, batch_size):
    return loader.Loader(
      record_set,
      batch_size,
      position=position,
      seed=5,
      prefetch=prefetch,
    )

  whole = rows_of(open_at(0, 4))
  for first_size, then_size in ((2, 4), (3, 14)):
    stream = open_at(0, first_size)
    parts = rows_of(itertools.islice(stream, 2))
    assert stream.position == 2 * first_size  # not what was read ahead
    parts += rows_of(open_at(stream.position, then_size))
    assert parts == whole
    stream.close()


@pytest.mark.parametrize('hosts', [1, 2, 4])
def test_a_mixture_resumes_on_any_number_of_hosts(tmp_path, hosts):
  mixed = write_set(tmp_path, sources=('a', 'b'))

  def open_at(position, consumed, step, text, local=None):
    return loader.Loader(
      mixed,
      4,
      position=position,
      consumed=consumed,
      first_step=step,
      rates=row_rates.parse(text),
      seed=5,
      local=local,
    )

  switch = 'rows:3,1; 2=rows:0,1; 4=rows:1,1'
  whole = [fields['row'].tolist() for fields in open_at(0, None, 0, switch)]
  first = open_at(0, None, 0, 'rows:3,1; 2=rows:0,1')
  rows = [next(first)['row'].tolist() for _ in range(3)]
  saved = first.position, first.order.consumed(first.position).tolist()
  # The phase from step 4 on is new; every host holds some places of a batch.
  parts = [
    open_at(*saved, 3, switch, local=range(host, 4, hosts))
    for host in range(hosts)
  ]
  for batches in zip(*parts, strict=True):
    row = np.zeros(4, int)
    for host, fields in enumerate(batches):
      row[host::hosts] = fields['row']
    rows.append(row.tolist())
  assert rows == whole and len(whole) >= 5


@pytest.mark.parametrize('local', [[0, 3], [2]])
def test_a_process_makes_the_places_it_holds(record_set, local):
  """Any of them, in the order of the batch: others may make them too."""
  whole = loader.Loader(record_set, 4, seed=5)
  mine = loader.Loader(record_set, 4, seed=5, local=local)
  for fields, part in zip(whole, mine, strict=True):
    for name, value in fields.items():
      np.testing.assert_array_equal(part[name], value[local], err_msg=name)
    assert mine.position == whole.position
  evaluation = loader.evaluation_batches(record_set, 4, local=local)
  rows = [numbers[0] for fields in evaluation for numbers in fields['row']]
  numbers = [4 * step + slot for step in range(4) for slot in local]
  assert rows == [n if n < 14 else row_order.FILLER for n in numbers]


@pytest.mark.parametrize('batch_size', [3, 7, 20])
def test_evaluation_sees_every_row_once(single_set, batch_size):
  batches = list(loader.evaluation_batches(single_set, batch_size))
  assert all(fields['row'].size == batch_size for fields in batches)
  assert rows_of(batches) == list(range(7))
  assert sum(fields['weights'].sum() for fields in batches) == 7


def test_prefixes_of_other_examples(single_set):
  (fields,) = loader.evaluation_batches(
    single_set, 8, teacher=True, prefix_offset=3
  )
  framing.check_framing(fields, gemma_ids.FRAMING)
  rows = np.arange(7)
  np.testing.assert_array_equal(fields['row'][:7], rows)
  np.testing.assert_array_equal(fields['targets'][:7, 0], 200 + rows)
  prefixes = 100 + (rows + 3) % 7
  np.testing.assert_array_equal(fields['encoder_tokens'][:7, 1], prefixes)
  np.testing.assert_array_equal(fields['teacher_tokens'][:7, 1], prefixes)
  assert fields['weights'].sum() == 7


def test_wrong_settings_are_refused(record_set, single_set):
  # Rows of several pairs have no prefix to exchange; 14 is twice the rows.
  for rows, offset in ((record_set, 3), (single_set, 14)):
    with pytest.raises(errors.UserError, match=f'prefix_offset={offset}'):
      loader.evaluation_batches(rows, 4, prefix_offset=offset)
  with pytest.raises(errors.UserError, match='position 15.*14 rows'):
    loader.Loader(record_set, 4, position=15)
