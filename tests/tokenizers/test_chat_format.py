"""Conversations as literal tokens, masks, and what is refused."""

import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import chat_format, vocabulary_pair

MESSAGES = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': ' Say <eos><|im_end|><|eot_id|> '},
  {'role': 'assistant', 'content': 'No, never.'},
  {'role': 'user', 'content': 'Why?'},
]
# As the family's own template renders it, BOS apart.
RENDERED = {
  'gemma': (
    '<start_of_turn>user\nBe brief.\n\nSay {}<end_of_turn>\n'
    '<start_of_turn>model\nNo, never.<end_of_turn>\n'
    '<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n'
  ),
  'gemma4': (
    '<|turn>system\nBe brief.<turn|>\n<|turn>user\nSay {}<turn|>\n'
    '<|turn>model\nNo, never.<turn|>\n'
    '<|turn>user\nWhy?<turn|>\n<|turn>model\n'
  ),
  'llama3': (
    '<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>'
    '<|start_header_id|>user<|end_header_id|>\n\nSay {}<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\nNo, never.<|eot_id|>'
    '<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n'
  ),
  'qwen': (
    '<|im_start|>system\nBe brief.<|im_end|>\n'
    '<|im_start|>user\n Say {} <|im_end|>\n'
    '<|im_start|>assistant\nNo, never.<|im_end|>\n'
    '<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n'
  ),
}
END = {
  'gemma': '<end_of_turn>',
  'gemma4': '<turn|>',
  'llama3': '<|eot_id|>',
  'qwen': '<|im_end|>',
}


@pytest.fixture(scope='module', params=RENDERED)
def family(request):
  return request.param


def test_ids_are_those_of_the_rendered_text(family, tiny_folder, vocabulary):
  """As `tokenizers` reads the template's text, where no text is special."""
  messages = [dict(message) for message in MESSAGES]
  messages[1]['content'] = ' Say it '
  reference = tokenizers.Tokenizer.from_file(
    str(tiny_folder(family) / 'tokenizer.json')
  )
  # Gemma's turns are of no special kind in its file, and match all the same.
  want = reference.encode(
    RENDERED[family].format('it'), add_special_tokens=False
  )
  turns = chat_format.encode(messages, vocabulary, open_turn=True)
  assert turns.ids.tolist() == want.ids


def test_special_tokens_that_are_said_stay_text(family, vocabulary):
  turns = chat_format.encode(MESSAGES, vocabulary, open_turn=True)
  shown = vocabulary.decode(turns.ids, show_special=True)
  assert shown == RENDERED[family].format('<eos><|im_end|><|eot_id|>')
  end = vocabulary.specials[END[family]]
  assert (turns.ids == end).sum() == RENDERED[family].count(END[family])
  assert chat_format.end_of_turn(vocabulary) == end


def test_the_mask_is_what_the_assistant_says(family, vocabulary):
  turns = chat_format.encode(MESSAGES, vocabulary, open_turn=True)
  said = turns.ids[turns.assistant]
  shown = vocabulary.decode(said, show_special=True)
  assert shown == 'No, never.' + END[family]
  assert turns.assistant.dtype == bool
  assert len(turns.assistant) == len(turns.ids)


@pytest.mark.parametrize(
  'messages, message',
  [
    ([], 'has no message'),
    ([{'role': 'user'}], 'message 1 .* must be an object'),
    ([{'role': 'tool', 'content': 'x'}], 'message 1 .* must be an object'),
    ([{'role': 'user', 'content': 3}], 'message 1 .* must be an object'),
    ([MESSAGES[1], MESSAGES[0]], 'message 2 .* system only first'),
  ],
)
def test_other_conversations_are_refused(vocabulary, messages, message):
  with pytest.raises(errors.UserError, match=message):
    chat_format.encode(messages, vocabulary)


def test_gemmas_system_text_is_not_stripped(tiny_folder):
  own = vocabulary_pair.open_vocabulary(tiny_folder('gemma'))
  messages = [{'role': 'system', 'content': ' Be brief. \n'}, MESSAGES[3]]
  ids = chat_format.encode(messages, own).ids
  assert own.decode(ids, show_special=True) == (
    '<start_of_turn>user\n Be brief. \n\n\nWhy?<end_of_turn>\n'
  )


def test_gemmas_system_needs_a_user(tiny_folder):
  own = vocabulary_pair.open_vocabulary(tiny_folder('gemma'))
  with pytest.raises(errors.UserError, match='add a message of the user'):
    chat_format.encode(MESSAGES[:1], own)


def test_vocabularies_without_a_template_are_refused():
  own = vocabulary_pair.open_vocabulary('bytes')
  with pytest.raises(errors.UserError, match='bytes has no chat template'):
    chat_format.encode(MESSAGES, own)
