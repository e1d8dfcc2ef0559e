"""Rows and prompts of vocabularies that frame as T5's: p EOS, PAD t EOS."""

import dataclasses
import types

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import held_out
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.objectives import framing, objective_names
from encdec_adapt.stored import prompt_framing
from encdec_adapt.tokenizers import special_ids, vocabulary_pair
from encdec_adapt.training.jobs import job_models
from encdec_adapt.training.recipes import recipe
from tests import gemma_ids, toy_models
from tests.objectives import objective_cases

PAD, EOS, A, B = 0, 1, 98, 97
T5 = special_ids.SideIds(PAD, EOS, PAD, (A, B), ends_with_eos=True)
FRAMING = special_ids.Framing(T5, T5)
OPENING = 2
CODE_T5 = dataclasses.replace(T5, opening=(OPENING,))
MBART = dataclasses.replace(CODE_T5, forced=3)
CC25 = dataclasses.replace(T5, bos=4, closing=(4,))
LENGTHS = framing.Lengths(8, 6)
BYT5 = vocabulary_pair.open_vocabulary('byt5')


def _pair(inputs, targets):
  return framing.Pair(np.array(inputs, np.int32), np.array(targets, np.int32))


def _row(pairs, lengths=LENGTHS, **options):
  row = framing.frame_row(pairs, lengths, FRAMING, **options)
  return framing.stack_rows([row])


def _lists(rows, *names):
  return [rows[name][0].tolist() for name in names]


def test_rows_end_inputs_with_eos_and_start_decoders_with_padding():
  pairs = [_pair([11, 12], [13, 14, EOS]), _pair([21], [22, EOS])]
  rows = _row(pairs, teacher=True)
  framing.check_framing(rows, FRAMING)
  assert _lists(rows, 'encoder_tokens', 'encoder_segments') == [
    [11, 12, EOS, 21, EOS, 0, 0, 0],
    [1, 1, 1, 2, 2, 0, 0, 0],
  ]
  assert _lists(rows, 'decoder_tokens', 'targets', 'teacher_tokens') == [
    [PAD, 13, 14, PAD, 22, 0],
    [13, 14, EOS, 22, EOS, 0],
    [PAD, 11, 12, 13, 14, EOS, PAD, 21, 22, EOS, 0, 0, 0, 0],
  ]
  for at, token in ((2, 5), (0, EOS)):  # No EOS, and another.
    broken = {**rows, 'encoder_tokens': rows['encoder_tokens'].copy()}
    broken['encoder_tokens'][0, at] = token
    with pytest.raises(ValueError, match='ends with its only EOS'):
      framing.check_framing(broken, FRAMING)
  # Each side has the framing of its vocabulary.
  mixed = special_ids.Framing(gemma_ids.SIDE, T5)
  row = framing.frame_row([_pair([11], [12, EOS])], LENGTHS, mixed)
  assert row['encoder_tokens'].tolist()[:3] == [gemma_ids.BOS, 11, 0]
  assert row['decoder_tokens'].tolist()[:3] == [PAD, 12, 0]


def test_an_encoder_only_model_predicts_where_it_reads():
  rows = _row(
    [_pair([9, 12], [11, 12]), _pair([13], [13])], framing.Lengths(8, 0)
  )
  assert _lists(rows, 'encoder_tokens', 'targets', 'weights') == [
    [9, 12, EOS, 13, EOS, 0, 0, 0],
    [11, 12, 0, 13, 0, 0, 0, 0],
    [1, 1, 0, 1, 0, 0, 0, 0],
  ]


def test_a_teacher_reads_bos_and_the_window():
  pairs = [_pair([11, A, 13, B], [A, 12, B, 14, EOS]), _pair([A], [A, 24, EOS])]
  rows = framing.with_windows(_row(pairs, framing.Lengths(8, 8)), T5)
  tokens, segments, index = _lists(
    rows, 'window_tokens', 'window_segments', 'window_index'
  )
  assert tokens == [PAD, 11, 12, 13, 14, EOS, PAD, 24, EOS] + 7 * [0]
  assert segments == 6 * [1] + 3 * [2] + 7 * [0]
  assert index == [-1, 1, -1, 3, 4, -1, 6, 7]


def test_codet5_puts_its_opening_before_inputs_and_targets():
  pairs = [_pair([11, A], [OPENING, A, 13, EOS]), _pair([], [OPENING, 22, EOS])]
  ids = special_ids.Framing(CODE_T5, CODE_T5)
  row = framing.frame_row(pairs, framing.Lengths(8, 8, 2), ids)
  rows = framing.stack_rows([row])
  framing.check_framing(rows, ids)
  assert _lists(rows, 'encoder_tokens', 'decoder_tokens') == [
    [OPENING, 11, A, EOS, OPENING, EOS, 0, 0],
    [PAD, OPENING, A, 13, PAD, OPENING, 22, 0],
  ]
  assert pairs[0].positions(framing.Lengths(8, 8, 2)) == (4, 4)
  tokens, index = _lists(
    framing.with_windows(rows, CODE_T5), 'window_tokens', 'window_index'
  )
  assert tokens[:7] == [PAD, 11, 13, EOS, PAD, 22, EOS]
  assert index == [-1, -1, 1, 2, -1, 4, 5, -1]


def test_the_first_mbart_puts_a_language_behind_eos():
  pairs = [_pair([11], [13, EOS]), _pair([12], [22, EOS])]
  ids = special_ids.Framing(CC25, CC25)
  row = framing.frame_row(pairs, framing.Lengths(8, 6, CC25.frame_size), ids)
  rows = framing.stack_rows([row])
  framing.check_framing(rows, ids)
  assert _lists(rows, 'encoder_tokens', 'decoder_tokens') == [
    [11, EOS, 4, 12, EOS, 4, 0, 0],
    [4, 13, 4, 22, 0, 0],
  ]
  (tokens,) = _lists(framing.with_windows(rows, CC25), 'window_tokens')
  assert tokens[:9] == [4, 11, 13, EOS, 4, 12, 22, EOS, 0]
  rows['encoder_tokens'][0, 1:3] = 4, EOS
  with pytest.raises(ValueError, match='ends with its only EOS'):
    framing.check_framing(rows, ids)


@pytest.mark.parametrize(
  'ids', [T5, CODE_T5, MBART, CC25], ids=['t5', 'codet5', 'mbart', 'cc25']
)
@pytest.mark.parametrize(
  'name', ['span_corruption', 'prefix_lm', 'prefix_lm_uniform:concatenate']
)
def test_all_windows_end_their_targets(name, ids):
  lengths = framing.Lengths(24, 24, ids.frame_size)
  vocabulary = objective_cases.vocabulary(ids=ids, eos=EOS)
  maker = objective_names.parse_one(name).make(lengths, vocabulary)
  document = np.arange(500, 600, dtype=np.int32)
  pairs = list(
    maker.examples([('a', document)], lambda _: np.random.default_rng(0))
  )
  assert len(pairs) > 2
  sizes = [x.positions(lengths) for x in pairs]
  assert all(x.targets[-1] == EOS and EOS not in x.inputs for x in pairs)
  assert all((x.targets == EOS).sum() == 1 for x in pairs)
  opening = ids.target_opening
  assert all((*x.targets[: len(opening)],) == opening for x in pairs)
  assert np.max(sizes) <= 24
  if 'concatenate' in name:  # Two windows fill a row.
    targets = 24 - 2 * len(ids.closing)
    np.testing.assert_array_equal(np.add(*sizes[:2]), [24, targets])


@pytest.mark.parametrize('ids', [T5, CC25], ids=['t5', 'cc25'])
def test_texts_that_are_embedded_end_with_eos(ids):
  objective = objective_names.parse_one('embed')
  lengths = framing.Lengths(16, 0, ids.frame_size)
  maker = objective.make(lengths, BYT5)
  (texts,) = maker.examples([('a', '[["ab", "c"], null, null]')], None)
  sides = special_ids.Framing(ids, ids)
  row = objective.rows.frame([texts], lengths, sides)
  tokens = [*ids.frame([100, 101], 'encoder'), *ids.frame([102], 'encoder')]
  assert row['encoder_tokens'].tolist() == tokens + [0] * (16 - len(tokens))
  rows = framing.stack_rows([row])
  objective.rows.check(rows, sides)
  rows['encoder_tokens'][0, 2] = 5
  with pytest.raises(ValueError, match='does not end with EOS'):
    objective.rows.check(rows, sides)


def test_prompts_are_framed_as_records_are():
  opened = vocabulary_pair.Opened(BYT5, BYT5)
  stored = types.SimpleNamespace(
    require_vocabularies=lambda: opened,
    model=toy_models.pair_and_decoder(toy_models.stack())['encoder_decoder'],
    prompt_side='encoder',
    framing_side='encoder',
    framing=prompt_framing.PromptFraming(),
    objectives=(),
    path='x',
  )
  prompts = prompt_encoding.PromptEncoder(stored, prefix='b', sentinels=True)
  a, b = BYT5.encode('ab').tolist()
  assert prompts.encode('aa').tolist() == [b, a, a, EOS]
  # A cut keeps the prefix, the last tokens and EOS.
  assert prompts.encode('aab', 3).tolist() == [b, b, EOS]
  assert prompts.encode('<extra_id_0>a').tolist() == [b, 258, a, EOS]
  # One that is a byte of text, too.
  assert prompts.encode('<extra_id_20>').tolist() == [b, 238, EOS]
  assert prompts.answer_text(np.array([258, a, EOS])) == '<extra_id_0>a'
  for ids in ([a, EOS], [a]):  # Of clients that frame, or do not.
    assert prompts.frame(prompts.unframed(ids)).tolist() == [a, EOS]
  stored.prompt_side = 'decoder'
  prompts = prompt_encoding.PromptEncoder(stored)  # An encoder alone.
  assert prompts.encode('a').tolist() == [a, EOS]
  stored.framing_side = 'decoder'
  prompts = prompt_encoding.PromptEncoder(stored, prefix='')
  assert prompts.encode('a').tolist() == [PAD, a]
  assert prompts.unframed([PAD, a]) == [a]
  ids = dataclasses.replace(BYT5.ids, opening=(OPENING,))
  reader = types.SimpleNamespace(ids=ids, encode=BYT5.encode)
  opened = types.SimpleNamespace(sides={'decoder': reader}, decoder=reader)
  stored.framing_side = 'encoder'
  prompts = prompt_encoding.PromptEncoder(stored)
  assert prompts.encode('a').tolist() == [OPENING, a, EOS]
  assert prompts.unframed([OPENING, a, EOS]) == [a]


def test_bad_vocabularies_are_refused():
  with pytest.raises(errors.UserError, match='T5 has <extra_id_0> ..'):
    objective_cases.make('span_corruption', 24, 24, sentinels=0)
  ours = vocabulary_pair.open_vocabulary('bytes')
  records = types.SimpleNamespace(
    folder='records',
    manifest={
      'vocabularies': vocabulary_pair.Opened(BYT5, BYT5).describe(),
    },
    spec=types.SimpleNamespace(
      objectives=objective_names.parse('pairs'),
      vocabulary=ours.fingerprint,
      encoder_vocabulary=ours.fingerprint,
    ),
  )
  stack = toy_models.stack()
  stored = types.SimpleNamespace(
    model=toy_models.pair_and_decoder(stack)['encoder_decoder'],
    require_vocabularies=lambda: vocabulary_pair.Opened(ours, ours),
  )
  evaluation = held_out.HeldOutEvaluation(records)
  with pytest.raises(errors.UserError, match='frame inputs as `p EOS`, and'):
    evaluation.check(stored)
  declared = recipe.FrozenModel('teacher', (), stored.model, reads_windows=True)
  with pytest.raises(errors.UserError, match='vocabulary byt5 are bytes'):
    job_models.open_frozen_model(
      declared,
      stored.model,
      vocabulary_pair.Choice('byt5'),
      LENGTHS,
    )
