"""Preferences: literal ids, framing, what is dropped, and bad documents."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.records import row_codec
from encdec_adapt.objectives import framing, objective_names, preferences
from encdec_adapt.tokenizers import vocabulary_pair
from tests import gemma_ids, tiny_tokenizers
from tests.objectives import objective_cases

LENGTHS = framing.Lengths(8, 5)  # BOS and four targets.
BYTES = vocabulary_pair.open_vocabulary(vocabulary_pair.BYTES)
EOS = BYTES.eos


def _make(name, *documents, lengths=LENGTHS, vocabulary=BYTES):
  """Returns the maker, and the examples of [chosen, rejected, prompt, ..]."""
  maker = objective_names.parse_one(name).make(lengths, vocabulary)
  return maker, objective_cases.examples(maker, *documents)


def _ids(text, end=True):
  return [*BYTES.encode(text).tolist(), *[EOS] * end]


def test_texts_end_with_eos_and_keep_their_margin():
  _, (first, second) = _make(
    'preferences', ['yes', 'no', 'why', 1.5], ['a', 'b', 'c', None]
  )
  assert first.inputs.tolist() == _ids('why', end=False)
  assert first.targets.tolist() == _ids('yes')
  assert first.rejected.tolist() == _ids('no')
  assert first.margin.tolist() == [1.5] and second.margin is None
  # BOS and the longer answer with its end; the tokens of both.
  assert first.positions(LENGTHS) == (4, 5) and first.target_tokens == 4 + 3
  for example in (first, second):
    record = row_codec.encode_row([example], preferences.ROWS)
    (same,) = row_codec.decode_row(record, preferences.ROWS)
    assert str(same) == str(example)


@pytest.mark.parametrize('margin', [70000, -(10**400), float('nan')])
def test_margins_that_cannot_be_stored_are_refused(margin):
  with pytest.raises(errors.UserError, match='margin is .* at most 65504'):
    _make('preferences', ['yes', 'no', 'why', margin])


def test_a_separator_is_in_the_rows_of_decoders_alone():
  _, (example,) = _make('preferences:separator="|"', ['yes', 'no', 'why', None])
  assert example.inputs.tolist() == _ids('why', end=False)
  assert example.prefix.tolist() == _ids('why|', end=False)


@pytest.mark.parametrize('family', ['gemma', 'qwen'])
def test_turns_end_with_the_token_of_their_end_once(family, tmp_path):
  tiny_tokenizers.save(tmp_path, family, tiny_tokenizers.TEXTS, 400)
  vocabulary = vocabulary_pair.open_vocabulary(str(tmp_path))
  messages = [
    {'role': 'user', 'content': 'the cat'},
    {'role': 'assistant', 'content': 'a mat'},
    {'role': 'user', 'content': 'the dog'},
  ]
  end = {'gemma': '<end_of_turn>', 'qwen': '<|im_end|>'}[family]
  end = vocabulary.specials[end]
  documents = ['sat', 'the mat', messages, None], ['sat', 'mat', 'dog', None]
  _, (example, short) = _make(
    'chat_preferences',
    *documents,
    lengths=framing.Lengths(128, 32),
    vocabulary=vocabulary,
  )
  for answer in (example.targets, example.rejected):
    assert (answer == end).sum() == 1 and answer[-1] == end
  # Two turns of the prompt and the answer between them.
  assert (example.inputs == end).sum() == 3
  assert (short.inputs == end).sum() == 1  # A text is a turn of the user.


def test_what_is_dropped_is_counted():
  maker, examples = _make(
    'preferences',
    [],
    ['abcd', 'no', 'why', None],
    ['yes', 'no', 'too long', None],
    ['abc', 'no', 'seven..', None],
  )
  assert [x.targets.tolist() for x in examples] == [_ids('abc')]
  assert dict(maker.counts) == {'dropped': 2, 'ties': 1}


@pytest.mark.parametrize(
  'name, document, message',
  [
    (
      'preferences',
      ['yes', 'yes', 'why', None],
      'example 0: .* the same tokens',
    ),
    ('preferences', ['yes', ' ', 'why', None], 'example 0: an answer is empty'),
    ('preferences', ['a', 'b', [], None], 'use the objective chat_preferences'),
  ],
)
def test_bad_documents_are_named_or_counted(name, document, message):
  with pytest.raises(errors.UserError, match=message):
    _make(name, document)
  maker = objective_names.parse_one(name).make(LENGTHS, BYTES)
  assert not objective_cases.examples(maker, document, skips_bad=True)
  assert maker.counts['bad_documents'] == 1


def test_a_prompt_is_framed_once_and_answers_by_the_rules_of_pairs():
  _, examples = _make(
    'preferences', ['b', 'ab', 'why', 1.5], ['a', 'abc', '', None]
  )
  frame = preferences.ROWS.frame
  rows = framing.stack_rows(
    [frame([x], LENGTHS, gemma_ids.FRAMING, teacher=True) for x in examples]
  )
  assert rows['encoder_tokens'].shape == (2, 8)
  assert rows['decoder_tokens'].shape == (2, 2, 5)
  assert rows['teacher_tokens'].shape == (2, 2, 13)
  assert rows['weights'].sum(axis=2).tolist() == [[2, 3], [2, 4]]
  assert rows['margins'].tolist() == [[1.5, 0], [0, 0]]
  preferences.ROWS.check(rows, gemma_ids.FRAMING)
  rows['decoder_tokens'][1, 1, 2] += 1
  with pytest.raises(ValueError, match='shifted right" does not hold at row 1'):
    preferences.ROWS.check(rows, gemma_ids.FRAMING)
  filler = frame([], LENGTHS, gemma_ids.FRAMING)
  assert filler['targets'].shape == (2, 5) and not filler['weights'].any()
