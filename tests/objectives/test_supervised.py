"""Pairs and conversations as examples, and MEAP's copies of them."""

import dataclasses
import json
import pydoc_data.topics
import random

import numpy as np
import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, objective_names, supervised
from encdec_adapt.tokenizers import chat_format, special_ids, vocabulary_pair
from tests import gemma_ids, tiny_tokenizers
from tests.objectives.objective_cases import examples
from tests.tokenizers import t5_files


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  texts = list(pydoc_data.topics.topics.values())[:20]
  folder = tmp_path_factory.mktemp('gemma')
  return vocabulary_pair.open_vocabulary(
    tiny_tokenizers.save(folder, 'gemma', texts, 600)
  )


def _make(vocabulary, name, encoder=64, decoder=96):
  return objective_names.parse_one(name).make(
    framing.Lengths(encoder, decoder), vocabulary
  )


def test_pairs_with_a_prefix(vocabulary):
  objective = _make(vocabulary, 'pairs:prefix=sum: ')
  (pair,) = examples(objective, ['one two', 'three'])
  assert vocabulary.decode(pair.inputs) == 'sum: one two'
  assert vocabulary.decode(pair.targets) == 'three'
  assert pair.targets[-1] == vocabulary.eos and pair.documents == ('0',)


def test_targets_that_lose_text_or_are_empty_are_counted(vocabulary, tmp_path):
  file = t5_files.train(tmp_path / 'spiece.model')
  t5 = vocabulary_pair.open_vocabulary(file)
  pairs = _make(t5, 'pairs')
  texts = [
    'a fox',
    'a of ' * 30 + '日本 a fox',
    '日本',
    ' ',
    'of\n a  \ufb01sh',
  ]
  examples(pairs, *(['q', text] for text in texts))
  counts = pairs.counts['lossy_targets'], pairs.counts['empty_targets']
  assert counts == (2, 1)
  same = 'a of ' * 8
  assert pairs.first_losses == {
    'lossy_targets': f'1: {same + "日本 a fox"!r} becomes {same + "a fox"!r}',
    'empty_targets': "3: '' becomes ''",
  }
  # An example counts once; what is dropped does not.
  preferences = _make(t5, 'preferences')
  answers = [('a 日', 'of 日'), ('a', 'of'), ('a 日' * 99, 'a')]
  examples(preferences, *([*x, 'q', None] for x in answers))
  assert preferences.counts['lossy_targets'] == 1
  chat = _make(vocabulary, 'chat', 256)
  turn = {'role': 'user', 'content': '日'}
  examples(chat, [turn, {'role': 'assistant', 'content': ''}])
  examples(chat, [turn, {'role': 'assistant', 'content': ' 日本\n\n'}])
  assert chat.counts['empty_targets'] == 1
  assert 'lossy_targets' not in chat.counts


@pytest.mark.parametrize('rule, kept', [('drop', 1), ('truncate', 3)])
def test_long_examples_follow_a_named_rule_and_are_counted(
  vocabulary, rule, kept
):
  objective = _make(vocabulary, f'pairs:too_long={rule}', 8, 6)
  pairs = examples(
    objective, ['\u00e9' * 5, 'y'], ['x', 'y'], ['x', '\u00e9' * 5]
  )
  assert len(pairs) == kept
  count = {'drop': 'dropped', 'truncate': 'truncated'}[rule]
  assert objective.counts[count] == 2
  if rule == 'truncate':
    assert len(pairs[0].inputs) == 7 and len(pairs[2].targets) == 6
    inputs = vocabulary.encode('\u00e9' * 5)[:7]
    assert pairs[0].inputs.tolist() == inputs.tolist()
    assert pairs[2].targets[-1] != vocabulary.eos


def test_a_long_prompt_is_refused_where_prompts_are_continued(vocabulary):
  objective = _make(vocabulary, 'pairs', 8, 6)
  policy = dict(locate='a.jsonl:{}'.format, refuses_long=True)
  # An answer is only what rewards compare with.
  assert not examples(objective, ['x', '\u00e9' * 5], **policy)
  assert objective.counts['dropped'] == 1
  words = 'a.jsonl:0: its prompt has 11 .*_length is 8; .*too_long=drop of'
  with pytest.raises(errors.UserError, match=words):
    examples(objective, ['\u00e9' * 5, 'y'], **policy)


CHAT = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Hi'},
  {'role': 'assistant', 'content': ' Hello '},
  {'role': 'user', 'content': 'Bye'},
  {'role': 'assistant', 'content': 'See you'},
]


def test_every_turn_of_the_assistant_is_an_example(vocabulary):
  first, second = examples(_make(vocabulary, 'chat', 256), CHAT)
  end = vocabulary.specials['<end_of_turn>']
  shown = vocabulary.decode(second.inputs, show_special=True)
  assert shown == (
    '<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n'
    '<start_of_turn>model\nHello<end_of_turn>\n'
    '<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n'
  )
  assert vocabulary.decode(first.targets) == 'Hello'
  assert first.targets[-1] == second.targets[-1] == end
  # The ids of a whole conversation, as `generate --chat` reads its start.
  whole = chat_format.encode(CHAT, vocabulary).ids.tolist()
  made = [*second.inputs, *second.targets]
  assert made == whole[: len(made)]


def test_turns_begin_with_the_forced_token(vocabulary, monkeypatch):
  """Generation writes it first."""
  (plain, *_) = examples(_make(vocabulary, 'chat', 256), CHAT)
  ids = dataclasses.replace(vocabulary.ids, forced=7)
  monkeypatch.setattr(vocabulary, 'ids', ids)
  (turn, *_) = examples(_make(vocabulary, 'chat', 256), CHAT)
  assert turn.targets.tolist() == [7, *plain.targets]
  assert turn.inputs.tolist() == plain.inputs.tolist()
  maker = _make(vocabulary, 'chat_preferences', 256)
  (pair,) = examples(maker, ['Hello', 'No', CHAT[:2], None])
  assert pair.targets[0] == pair.rejected[0] == 7


def test_further_fields_stay_with_every_example(vocabulary):
  fields = {'tests': 'assert f()', 'level': 2}
  (pair,) = examples(_make(vocabulary, 'pairs'), ['one', 'two', fields])
  turns = examples(_make(vocabulary, 'chat', 256), [CHAT, fields])
  assert len(turns) == 2
  assert [json.loads(x.fields) for x in (pair, *turns)] == [fields] * 3
  (plain,) = examples(_make(vocabulary, 'pairs'), ['one', 'two'])
  assert plain.fields is None
  np.testing.assert_array_equal(plain.targets, pair.targets)


def test_turns_are_those_of_the_whole_conversation(tmp_path):
  """With a vocabulary that puts a space before every text, as Llama 2's."""
  names = ['<|im_start|>', '<|im_end|>']
  folder = tiny_tokenizers.save(
    tmp_path, 'llama2', tiny_tokenizers.TEXTS, 600, more=names
  )
  own = vocabulary_pair.open_vocabulary(folder)
  reference = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  rendered = ''.join(
    f'<|im_start|>{turn["role"]}\n{turn["content"]}<|im_end|>\n'
    for turn in CHAT
  )
  ids = reference.encode(rendered, add_special_tokens=False).ids
  pairs = examples(_make(own, 'chat', 256), CHAT)
  for pair, text in zip(pairs, (' Hello ', 'See you'), strict=True):
    stop = len(pair.inputs) + len(pair.targets)
    assert [*pair.inputs, *pair.targets] == ids[:stop]
    assert own.decode(pair.targets, start=False) == text
    assert pair.targets[-1] == own.specials['<|im_end|>']


@pytest.fixture(scope='module')
def qwen(tmp_path_factory):
  folder = tmp_path_factory.mktemp('qwen')
  tiny_tokenizers.save(folder, 'qwen', tiny_tokenizers.TEXTS, 500)
  return vocabulary_pair.open_vocabulary(folder)


def _decoder_only(pairs, lengths, *sides):
  """The fields of a decoder-only row: tokens read, targets with weight."""
  frame = special_ids.Framing(*(side.ids for side in sides))
  row = framing.frame_row(pairs, lengths, frame, teacher=True)
  framing.check_framing(framing.stack_rows([row]), frame, eos_inside=True)
  read = row['teacher_tokens'][row['teacher_segments'] > 0]
  index = row['teacher_index'][row['weights'] > 0]
  return read, read[index + 1], row


@pytest.mark.parametrize(
  'text', ['a b', 'a\nb\n', 'a ||| b'], ids=['plain', 'inside', 'bars']
)
def test_a_separator_stands_between_the_texts_with_weight_0(vocabulary, text):
  name = r'pairs:prefix="Q: ",separator="\n|||\n"'
  objective = _make(vocabulary, name)
  (pair,) = examples(objective, [text, 'yes'])
  read, predicted, row = _decoder_only(
    [pair], objective.lengths, vocabulary, vocabulary
  )
  between = vocabulary.encode('\n|||\n').tolist()
  answer = [*vocabulary.encode('yes'), vocabulary.eos]
  assert read.tolist() == [
    vocabulary.bos,
    *vocabulary.encode('Q: ' + text),
    *between,
    *answer,
  ]
  assert predicted.tolist() == answer
  encoder = row['encoder_tokens'][row['encoder_segments'] > 0]
  assert encoder[1:].tolist() == vocabulary.encode('Q: ' + text).tolist()


def test_a_separator_stays_when_inputs_are_cut(vocabulary):
  name = 'pairs:too_long=truncate,separator=: '
  objective = _make(vocabulary, name, 8)
  (pair,) = examples(objective, ['\u00e9' * 9, 'y'])
  between = vocabulary.encode(': ').tolist()
  ids = vocabulary.encode('\u00e9' * 9).tolist()
  assert pair.prefix.tolist() == [*ids[: 7 - len(between)], *between]
  assert pair.inputs.tolist() == ids[:7]
  with pytest.raises(errors.UserError, match='set it to at least'):
    _make(vocabulary, 'pairs:separator=' + '\u00e9' * 9, 8)


def test_each_side_reads_pairs_and_chats_in_its_own_vocabulary(
  vocabulary, qwen
):
  lengths = framing.Lengths(256, 96)
  pairs, chats = (
    objective_names.parse_one(name).make(
      lengths, qwen, encoder_vocabulary=vocabulary
    )
    for name in ('pairs:separator=: ', 'chat')
  )
  (pair,) = examples(pairs, ['one two', 'three'])
  read, _, row = _decoder_only([pair], lengths, vocabulary, qwen)
  answer = [*qwen.encode('three'), qwen.eos]
  ids = [*qwen.encode('one two'), *qwen.encode(': '), *answer]
  assert read.tolist() == ids
  encoder = row['encoder_tokens'][row['encoder_segments'] > 0]
  assert encoder.tolist() == [vocabulary.bos, *vocabulary.encode('one two')]
  for i, pair in zip((2, 4), examples(chats, CHAT), strict=True):
    read, predicted, _ = _decoder_only([pair], lengths, vocabulary, qwen)
    before = chat_format.encode(CHAT[:i], vocabulary, open_turn=True).ids
    assert pair.inputs.tolist() == before.tolist()
    whole = chat_format.encode(CHAT[: i + 1], qwen)
    ids = whole.ids[: np.flatnonzero(whole.assistant)[-1] + 1]
    assert read.tolist() == ids.tolist()
    end = qwen.specials['<|im_end|>']
    assert predicted.tolist() == [*qwen.encode(CHAT[i]['content']), end]


def test_turns_that_end_in_eos_are_framed(tmp_path):
  # Qwen's EOS ends a turn, so inputs have several.
  one = vocabulary_pair.open_vocabulary(
    tiny_tokenizers.save(tmp_path, 'qwen', tiny_tokenizers.TEXTS, 600)
  )
  lengths = framing.Lengths(256, 96)
  made = examples(objective_names.parse_one('chat').make(lengths, one), CHAT)
  frame = special_ids.Framing(one.ids, one.ids)
  rows = framing.stack_rows(
    [framing.frame_row([pair], lengths, frame) for pair in made]
  )
  framing.check_framing(rows, frame, eos_inside=True)
  with pytest.raises(ValueError, match='reads no EOS'):
    framing.check_framing(rows, frame)


def test_a_copy_that_does_not_fit_leaves_the_example(vocabulary):
  objective = _make(vocabulary, 'pairs:meap=concat', 64, 96)
  (pair,) = examples(objective, ['q', 'word ' * 30])
  assert len(pair.targets) < 96 and pair.weights.all()
  assert objective.counts['left without a masked copy'] == 1


@pytest.mark.parametrize(
  'text, plain',
  [
    ('pairs:meap=concat,prefix=a', 'pairs:prefix=a'),
    ('meap:share=0.2', 'causal_lm'),
    ('chat:meap=separate', 'chat'),
    ('meap_prefix_lm:share=0.2,shortest=8', 'prefix_lm:shortest=8'),
  ],
)
def test_held_out_rows_have_no_masks(text, plain):
  assert (
    objective_names.for_evaluation(objective_names.parse_one(text)).text
    == plain
  )


@pytest.mark.parametrize(
  'messages, words',
  [
    (CHAT[:4], '^example line 0: it ends with the user'),
    (CHAT[:2], 'it has no turn of the assistant'),
    (CHAT[2:3], 'it begins with the assistant'),
    ([{'role': 'user'}], 'message 1 of the conversation'),
  ],
)
def test_conversations_without_an_answer_are_refused(
  vocabulary, messages, words
):
  objective = _make(vocabulary, 'chat', 256)
  with pytest.raises(errors.UserError, match=words):
    examples(objective, messages, locate='line {}'.format)


INPUTS = np.arange(100, 105, dtype=np.int32)
LONG = np.append(np.arange(200, 260, dtype=np.int32), np.int32(gemma_ids.EOS))
MASK = 4


@pytest.mark.parametrize('layout', ['separate', 'concat'])
def test_meap_has_no_copy_of_50_targets(layout):
  short = framing.Pair(INPUTS, np.append(LONG[:50], np.int32(gemma_ids.EOS)))
  (plain,) = supervised.meap_copies(short, MASK, layout, None)
  assert plain.targets.tolist() == plain.decoder_inputs.tolist()
  assert plain.weights.tolist() == [1] * 51
  longer = short._replace(targets=LONG[:52])
  made = supervised.meap_copies(longer, MASK, layout, lambda n, k: range(k))
  assert len(made) == (2 if layout == 'separate' else 1)


def test_meap_separate_masks_the_answer_and_predicts_the_masked():
  stream, again = random.Random(3), random.Random(3)
  plain, copy = supervised.meap_copies(
    framing.Pair(INPUTS, LONG),
    MASK,
    'separate',
    lambda n, k: stream.sample(range(n), k),
  )
  at = sorted(again.sample(range(60), 6))  # 10% of 60, EOS left out.
  assert plain.weights.tolist() == [1] * 61
  assert np.flatnonzero(copy.weights).tolist() == at
  assert np.flatnonzero(copy.decoder_inputs == MASK).tolist() == at
  assert copy.targets.tolist() == LONG.tolist()
  assert copy.inputs.tolist() == INPUTS.tolist()


def test_meap_inputs_masks_what_an_encoder_reads():
  inputs = np.arange(100, 130, dtype=np.int32)
  plain, copy = supervised.meap_copies(
    framing.Pair(inputs, LONG), MASK, 'inputs', lambda n, k: range(0, n, n // k)
  )
  assert (
    plain.inputs is inputs and plain.weights is plain.decoder_inputs is None
  )
  expected = inputs.tolist()
  expected[0] = expected[10] = expected[20] = MASK  # 10% of 30.
  assert copy.inputs.tolist() == expected
  assert copy.targets.tolist() == LONG.tolist()
  assert copy.weights is copy.decoder_inputs is None
  for pair in (
    framing.Pair(inputs, LONG[:51]),  # 50 tokens before the last.
    framing.Pair(inputs[:9], LONG),  # A tenth of them is less than a token.
  ):
    assert supervised.meap_copies(pair, MASK, 'inputs', None) == [pair]


def test_copies_with_masked_inputs_are_packed_and_framed(vocabulary):
  name = 'pairs:meap=inputs,separator=: '
  objective = _make(vocabulary, name, 256, 128)
  plain, copy = examples(objective, ['one two three ' * 8, 'word ' * 30])
  between = len(vocabulary.encode(': '))
  assert (plain.prefix[-between:] == copy.prefix[-between:]).all()
  masked = copy.inputs != plain.inputs
  assert masked.sum() == len(plain.inputs) // 10
  assert (copy.inputs[masked] == vocabulary.mask).all()
  # Decoders read the same masks.
  assert copy.prefix[:-between].tolist() == copy.inputs.tolist()
  rows = framing.stack_rows(
    [
      framing.frame_row(
        [plain, copy],
        framing.Lengths(512, 256),
        special_ids.Framing(vocabulary.ids, vocabulary.ids),
        teacher=True,
      )
    ]
  )
  framing.check_framing(
    rows, special_ids.Framing(vocabulary.ids, vocabulary.ids)
  )
  assert (rows['weights'].sum() == len(plain.targets) + len(copy.targets)).all()


def test_meap_concat_masks_a_copy_of_the_whole_sample():
  stream, again = random.Random(3), random.Random(3)
  (pair,) = supervised.meap_copies(
    framing.Pair(INPUTS, LONG),
    MASK,
    'concat',
    lambda n, k: stream.sample(range(n), k),
  )
  at = sorted(again.sample(range(65), 6))  # 10% of 5 + 60.
  copy = slice(61, None)
  assert pair.targets.tolist() == [*LONG, *INPUTS, *LONG]
  assert pair.decoder_inputs[:61].tolist() == LONG.tolist()
  assert np.flatnonzero(pair.decoder_inputs[copy] == MASK).tolist() == at
  weights = np.zeros(66)
  weights[5:] = 1
  weights[at] = 1
  assert pair.weights.tolist() == [*[1] * 61, *weights]


def test_options_with_unknown_values_are_refused(vocabulary):
  with pytest.raises(
    errors.UserError, match='too_long=cut.*too_long=drop.truncate'
  ):
    _make(vocabulary, 'pairs:too_long=cut')
  with pytest.raises(errors.UserError, match='meap=both'):
    _make(vocabulary, 'chat:meap=both')
