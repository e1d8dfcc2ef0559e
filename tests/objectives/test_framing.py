"""The framing table, as literal matrices, and the check that guards it."""

import numpy as np
import pytest

from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from tests import gemma_ids

EOS, BOS = gemma_ids.EOS, gemma_ids.BOS
LENGTHS = framing.Lengths(encoder=8, decoder=6)


def pair(inputs, targets):
  return framing.Pair(np.array(inputs, np.int32), np.array(targets, np.int32))


# The first document goes on after its targets, the second ends.
ROW = [pair([11, 12, 13], [14, 15, 16]), pair([21, 22], [23, EOS])]


def assert_row(row, expected):
  """Checks all fields of a row; weights are float32, others int32."""
  assert set(row) == set(expected)
  for name, values in expected.items():
    np.testing.assert_array_equal(row[name], values, err_msg=name)
    dtype = np.float32 if name == 'weights' else np.int32
    assert row[name].dtype == dtype, name


def make_batch():
  """A batch of the row above and a filler row."""
  return framing.stack_rows(
    [
      framing.frame_row(ROW, LENGTHS, gemma_ids.FRAMING, teacher=True),
      framing.frame_row([], LENGTHS, gemma_ids.FRAMING, teacher=True),
    ]
  )


def test_a_row_of_two_pairs_is_framed_as_the_table_says():
  row = framing.frame_row(ROW, LENGTHS, gemma_ids.FRAMING, teacher=True)
  expected = {
    'encoder_tokens': [BOS, 11, 12, 13, BOS, 21, 22, 0],
    'encoder_segments': [1, 1, 1, 1, 2, 2, 2, 0],
    'encoder_positions': [0, 1, 2, 3, 0, 1, 2, 0],
    'decoder_tokens': [BOS, 14, 15, BOS, 23, 0],
    'decoder_segments': [1, 1, 1, 2, 2, 0],
    'decoder_positions': [0, 1, 2, 0, 1, 0],
    'targets': [14, 15, 16, 23, EOS, 0],
    'weights': [1, 1, 1, 1, 1, 0],
    'teacher_tokens': [BOS, 11, 12, 13, 14, 15, 16]
    + [BOS, 21, 22, 23, EOS, 0, 0],
    'teacher_segments': [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0],
    'teacher_positions': [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 0, 0],
    # 14 is predicted at 13 (index 3); 23 at 22 (index 9).
    'teacher_index': [3, 4, 5, 9, 10, 0],
  }
  assert_row(row, expected)


def test_a_causal_row_has_no_encoder():
  row = framing.frame_row(
    [pair([], [11, 12]), pair([], [21, EOS])],
    framing.Lengths(0, 6),
    gemma_ids.FRAMING,
  )
  expected = {
    'decoder_tokens': [2, 11, 2, 21, 0, 0],
    'decoder_segments': [1, 1, 2, 2, 0, 0],
    'decoder_positions': [0, 1, 0, 1, 0, 0],
    'targets': [11, 12, 21, EOS, 0, 0],
    'weights': [1, 1, 1, 1, 0, 0],
  }
  assert_row(row, expected)


def test_decoder_inputs_and_weights_of_a_pair():
  masked = pair([11], [12, 13, 14])._replace(
    decoder_inputs=np.array([12, 4, 14], np.int32),
    weights=np.array([0, 1, 0.5], np.float32),
  )
  row = framing.frame_row([masked], LENGTHS, gemma_ids.FRAMING, teacher=True)
  np.testing.assert_array_equal(row['decoder_tokens'], [BOS, 12, 4, 0, 0, 0])
  np.testing.assert_array_equal(row['targets'], [12, 13, 14, 0, 0, 0])
  np.testing.assert_array_equal(row['weights'], [0, 1, 0.5, 0, 0, 0])
  np.testing.assert_array_equal(
    row['teacher_tokens'][:6], [BOS, 11, 12, 4, 14, 0]
  )
  rows = framing.stack_rows([row])
  framing.check_framing(rows, gemma_ids.FRAMING, mask=4)
  for other in (None, 5):
    with pytest.raises(ValueError, match='shifted right'):
      framing.check_framing(rows, gemma_ids.FRAMING, mask=other)


def test_an_encoder_only_row_predicts_tokens_where_it_reads_them():
  pairs = [
    framing.Pair(
      np.array(read, np.int32),
      np.array(targets, np.int32),
      weights=np.array(weights, np.float32),
    )
    for read, targets, weights in (
      ([4, 12, 13], [11, 12, 13], [1, 0, 0]),
      ([21, 4], [21, 22], [0, 1]),
    )
  ]
  row = framing.frame_row(pairs, framing.Lengths(8, 0), gemma_ids.FRAMING)
  expected = {
    'encoder_tokens': [BOS, 4, 12, 13, BOS, 21, 4, 0],
    'encoder_segments': [1, 1, 1, 1, 2, 2, 2, 0],
    'encoder_positions': [0, 1, 2, 3, 0, 1, 2, 0],
    'targets': [0, 11, 12, 13, 0, 21, 22, 0],
    'weights': [0, 1, 0, 0, 0, 0, 1, 0],
  }
  assert_row(row, expected)
  framing.check_framing(framing.stack_rows([row]), gemma_ids.FRAMING)


def test_a_decoder_only_model_may_predict_the_inputs_too():
  row = framing.frame_row(
    [ROW[0]._replace(weights=np.array([1, 0, 2], np.float32)), ROW[1]],
    LENGTHS,
    gemma_ids.FRAMING,
    teacher=True,
  )
  rows = framing.on_all_tokens(framing.stack_rows([row]), gemma_ids.PAD)
  # teacher_tokens: BOS 11 12 13 14 15 16 | BOS 21 22 23 EOS | padding
  np.testing.assert_array_equal(
    rows['targets'], [[11, 12, 13, 14, 15, 16, 0, 21, 22, 23, EOS, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    rows['weights'], [[1, 1, 1, 1, 0, 2, 0, 1, 1, 1, 1, 0, 0, 0]]
  )
  np.testing.assert_array_equal(rows['teacher_index'], [np.arange(14)])


def test_a_teacher_reads_the_text_without_sentinels():
  A, B, R, S = 30, 31, 32, 33
  ids = special_ids.SideIds(gemma_ids.PAD, EOS, BOS, (A, B), (R, S))
  # Of the texts 11 .. 16, which end, and 21 .. 23, of which no span is hidden.
  pairs = [
    pair([R, 11, 12, A, 14, B], [A, 13, B, 15, 16, EOS]),
    pair([S, 21, 22], [23]),
    pair([A], [A, 24]),
  ]
  lengths = framing.Lengths(14, 10)
  row = framing.frame_row(pairs, lengths, gemma_ids.FRAMING)
  padding = framing.frame_row([], lengths, gemma_ids.FRAMING)
  rows = framing.stack_rows([row, padding])
  framed = framing.with_windows(rows, ids)
  expected = {
    'window_tokens': [BOS, 11, 12, 13, 14, 15, 16, EOS, BOS, 21, 22, 23]
    + [BOS, 24]
    + [0] * 10,
    'window_segments': [1] * 8 + [2] * 4 + [3] * 2 + [0] * 10,
    'window_positions': [*range(8), *range(4), *range(2)] + [0] * 10,
    # 13 is predicted at 12 (index 2), 15 at 14, 23 at 22, and 24 at BOS.
    'window_index': [-1, 2, -1, 4, 5, 6, 10, -1, 12, -1],
  }
  assert_row({name: framed[name][0] for name in expected}, expected)
  assert not framed['window_segments'][1].any()
  assert (framed['window_index'][1] == -1).all()
  assert {name: framed[name] is rows[name] for name in rows} == dict.fromkeys(
    rows, True
  )


@pytest.mark.parametrize(
  'pairs, message',
  [
    ([pair(range(10, 18), [1])], 'encoder position 9 of 8'),
    ([pair([3], range(10, 17))], 'decoder position 7 of 6'),
    ([pair([3], [4]), pair([5], [])], 'pair 2 of the row has no targets'),
  ],
)
def test_pairs_that_do_not_fit_are_refused(pairs, message):
  with pytest.raises(ValueError, match=message):
    framing.frame_row(pairs, LENGTHS, gemma_ids.FRAMING)


@pytest.mark.parametrize(
  'field, index, value, rule',
  [
    ('decoder_tokens', (0, 0), 14, 'a decoder segment starts with BOS'),
    ('decoder_tokens', (0, 2), 99, 'targets shifted right'),
    ('targets', (0, 1), 99, 'targets shifted right'),
    ('weights', (1, 3), 1.0, 'padding has weight 0'),
    ('targets', (0, 2), gemma_ids.PAD, 'padding is never a target'),
    ('encoder_tokens', (0, 0), 11, 'starts with its only BOS'),
    ('encoder_tokens', (0, 2), BOS, 'starts with its only BOS'),
    ('encoder_tokens', (0, 3), EOS, 'the encoder reads no EOS'),
    ('teacher_index', (0, 0), 4, 'the teacher predicts the targets'),
    ('teacher_tokens', (0, 4), 99, 'the teacher predicts the targets'),
    ('teacher_segments', (0, 3), 2, 'the teacher predicts the targets'),
  ],
)
def test_each_broken_rule_is_found_and_named(field, index, value, rule):
  fields = make_batch()
  framing.check_framing(fields, gemma_ids.FRAMING)
  assert fields[field][index] != value
  fields[field][index] = value
  with pytest.raises(ValueError, match=f'{rule}.*row {index[0]}, position'):
    framing.check_framing(fields, gemma_ids.FRAMING)


# A Llama encoder, and a Qwen decoder: its padding, EOS and BOS are one, and it
# reads inputs without BOS.
MIXED = special_ids.Framing(
  encoder=special_ids.SideIds(pad=94, eos=91, bos=90),
  decoder=special_ids.SideIds(pad=80, eos=80, bos=80, omits_bos=True),
)
SPLIT = [
  framing.Pair(
    np.array([11, 12], np.int32),
    np.array([14, 15], np.int32),
    np.array([21, 22, 23], np.int32),
  ),
  framing.Pair(
    np.array([13], np.int32),
    np.array([16, 80], np.int32),
    np.array([], np.int32),
  ),
]


def test_each_side_is_framed_with_its_own_ids():
  row = framing.frame_row(SPLIT, LENGTHS, MIXED, teacher=True)
  expected = {
    'encoder_tokens': [90, 11, 12, 90, 13, 94, 94, 94],
    'encoder_segments': [1, 1, 1, 2, 2, 0, 0, 0],
    'decoder_tokens': [80, 14, 80, 16, 80, 80],
    'decoder_segments': [1, 1, 2, 2, 0, 0],
    'targets': [14, 15, 16, 80, 80, 80],
    'weights': [1, 1, 1, 1, 0, 0],
    # The teacher reads the prefix in the decoder's vocabulary, or BOS.
    'teacher_tokens': [21, 22, 23, 14, 15]
    + [80, 16, 80, 80, 80, 80, 80, 80, 80],
    'teacher_segments': [1] * 5 + [2] * 3 + [0] * 6,
    'teacher_index': [2, 3, 5, 6, 0, 0],
  }
  for name, values in expected.items():
    np.testing.assert_array_equal(row[name], values, err_msg=name)
  framing.check_framing(framing.stack_rows([row]), MIXED)
  with pytest.raises(ValueError, match='starts with BOS'):
    framing.check_framing(framing.stack_rows([row]), gemma_ids.FRAMING)


def test_documents_inside_inputs_may_end_with_the_token_that_begins_them():
  """Concatenated windows of Qwen, whose padding, EOS and BOS are one."""
  side = special_ids.SideIds(pad=80, eos=80, bos=80)
  ids = special_ids.Framing(side, side)
  pair = SPLIT[0]._replace(inputs=np.array([11, 80, 12], np.int32))
  rows = framing.stack_rows([framing.frame_row([pair], LENGTHS, ids)])
  framing.check_framing(rows, ids, eos_inside=True)
  with pytest.raises(ValueError, match='starts with its only BOS'):
    framing.check_framing(rows, ids)


def test_a_pair_costs_what_the_longer_prefix_takes():
  assert [pair.positions(LENGTHS) for pair in SPLIT] == [(4, 2), (2, 2)]
  assert ROW[0].positions(LENGTHS) == (4, 3)
  assert ROW[0].positions(framing.Lengths(0, 6)) == (0, 3)
  assert ROW[0].positions(framing.Lengths(8, 0)) == (4, 0)
