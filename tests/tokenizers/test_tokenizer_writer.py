"""Exported tokenizers give our ids in `tokenizers` and `transformers`."""

import json
import pathlib
import shutil
import sys
import sysconfig

import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import (
  chat_format,
  tokenizer_writer,
  vocabulary_pair,
)
from tests import tiny_tokenizers

STDLIB = sysconfig.get_path('stdlib')
VARIED = [
  path.read_text('utf-8')
  for path in sorted(pathlib.Path(STDLIB).glob('[a-c]*.py'))[:12]
] + [
  '',
  ' ',
  '  leading and trailing  ',
  '\n\n\n\n\nlines\n \n\tand\ttabs\r\n',
  'caf\u00e9 i\u0308 \u65e5\u672c\u8a9e \u0440\u0443\u0441 \u0639\u0631\u0628',
  'emoji \U0001f600\U0001f468\u200d\U0001f469 \ufeff\u3000\x00\x7f',
  '<bos><eos> <pad> <unused3> <mask> <0x41> <start_of_turn>user <sentinel_1>',
  '-' * 33 + '=' * 70 + ' ' * 50 + 'aaaaaaa' + '#' * 11,
  '1234567890 3.14159 0x7f',
  '<b> c<c> <c>',
]
ADDED = 4
_SYMBOLS = ['\n', '\n\n', '\u2581\u2581', '<2mass>', '<b> c', '<c>']
SYMBOLS = {'user_defined_symbols': _SYMBOLS}


CHAT = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': ' Why? '},
  {'role': 'assistant', 'content': 'No.'},
  {'role': 'user', 'content': 'Why?'},
]


def export(folder, vocabulary):
  folder.mkdir()
  return tokenizer_writer.write(folder, vocabulary)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'model_type': 'unigram'},
    {'model_type': 'unigram', 'character_coverage': 0.98, **SYMBOLS},
    {'add_dummy_prefix': True, 'user_defined_symbols': []},
    SYMBOLS,
    None,
  ],
  ids=['ours', 'unigram', 'few_characters', 'llama2', 'gemma', 'bytes'],
)
def test_exported_ids_are_ours(options, tmp_path, monkeypatch):
  path = 'bytes'
  if options is not None:
    path = tiny_tokenizers.train(tmp_path / 'm', 1000, **options)
  own = vocabulary_pair.open_vocabulary(path, added_sentinels=ADDED)
  note = export(tmp_path / 'out', own)
  assert note.startswith('4 added tokens, <sentinel_0> to <sentinel_3>')
  tokenizer_writer.check(tmp_path / 'out', own, VARIED)
  assert_same(vocabulary_pair.open_vocabulary(tmp_path / 'out'), own)
  transformers = pytest.importorskip('transformers')
  (tmp_path / 'out' / 'config.json').write_text('{"model_type": "t5gemma"}')
  monkeypatch.setitem(sys.modules, 'sentencepiece', None)
  monkeypatch.setitem(sys.modules, 'google.protobuf', None)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  assert theirs.bos_token_id == own.bos and theirs.eos_token_id == own.eos
  assert theirs.pad_token_id == own.pad and len(theirs) == own.size
  if 'unigram' not in (options or {}).values():  # Ties; see `check`.
    for text in VARIED:
      ids = theirs(text)['input_ids']
      assert ids == [own.bos, *own.encode(text)]
      assert theirs.decode(ids, skip_special_tokens=True) == text


def test_other_ids_are_refused(tmp_path):
  own = vocabulary_pair.open_vocabulary(
    tiny_tokenizers.train(tmp_path / 'm', 1000)
  )
  export(tmp_path / 'out', own)
  path = tmp_path / 'out' / 'tokenizer.json'
  content = json.loads(path.read_text())
  content['model']['merges'] = content['model']['merges'][1:]
  path.write_text(json.dumps(content))
  tokenizer_writer.check(tmp_path / 'out', own, ['xyz'])
  with pytest.raises(errors.UserError, match='encodes a text differently'):
    tokenizer_writer.check(tmp_path / 'out', own, ['xyz', *VARIED])


@pytest.mark.parametrize(
  'symbols',
  [
    ['<start_of_turn>', '<end_of_turn>'],
    ['<|turn>', '<turn|>'],
    ['<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'],
    ['<|im_start|>', '<|im_end|>'],
  ],
  ids=['gemma', 'gemma4', 'llama3', 'chatml'],
)
def test_the_chat_template_renders_as_chat_format(symbols, tmp_path):
  transformers = pytest.importorskip('transformers')
  path = tiny_tokenizers.train(
    tmp_path / 'm', 1000, user_defined_symbols=['\n', '\n\n', *symbols]
  )
  own = vocabulary_pair.open_vocabulary(path)
  export(tmp_path / 'out', own)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  spaced = [
    {**message, 'content': f' {message["content"]} '} for message in CHAT
  ]
  for messages in (CHAT, CHAT[1:2], spaced):
    found = theirs.apply_chat_template(messages, add_generation_prompt=True)
    want = chat_format.encode(messages, own, open_turn=True).ids
    assert found['input_ids'] == [own.bos, *want]


def assert_same(found, added):
  """The files have what was added to the vocabulary in memory."""
  assert found.size == added.size
  assert found.specials == added.specials
  assert found.sentinels == added.sentinels
  assert found.mode_ids == added.mode_ids
  assert found.tokens_digest == added.tokens_digest
  assert not found.added
  text = f'the quick {added.piece(added.sentinels[-1])} fox<mode_R>'
  assert found.encode(text).tolist() == added.encode(text).tolist()
  assert not set(found.encode(text)) & set(added.added)


@pytest.mark.parametrize('family', tiny_tokenizers.TOKENIZER_CONFIG)
def test_a_carried_tokenizer_is_kept(family, tiny_folder, tmp_path):
  source = shutil.copytree(tiny_folder(family), tmp_path / 'source')
  config = source / 'tokenizer_config.json'
  content = json.loads(config.read_text())
  content['added_tokens_decoder'] = {'0': {'content': 'x'}}
  config.write_text(json.dumps(content))
  export(tmp_path / 'same', vocabulary_pair.open_vocabulary(source))
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    copied = (tmp_path / 'same' / name).read_bytes()
    assert copied == (source / name).read_bytes()
  added = vocabulary_pair.open_vocabulary(source, added_sentinels=ADDED)
  out = tmp_path / 'out'
  export(out, added)
  tokenizer_writer.check(out, added, tiny_tokenizers.TEXTS[:9])
  assert_same(vocabulary_pair.open_vocabulary(out), added)
  names = {added.piece(i): i for i in added.added}
  has_modes = family in ('gemma', 'gemma4', 'llama3')
  assert len(names) == ADDED + (0 if has_modes else 3)
  theirs = tokenizers.Tokenizer.from_file(str(out / 'tokenizer.json'))
  assert {name: theirs.token_to_id(name) for name in names} == names
  found = json.loads((out / config.name).read_text())['added_tokens_decoder']
  assert found.pop('0') == {'content': 'x'}
  assert {token['content']: int(i) for i, token in found.items()} == names
  words = 'has .* added tokens already, from <sentinel_0> on; set config.data'
  with pytest.raises(errors.UserError, match=words):
    vocabulary_pair.open_vocabulary(out, added_sentinels=ADDED)


def test_files_of_other_ids_are_left_alone(tiny_folder, tmp_path):
  source = shutil.copytree(tiny_folder('qwen'), tmp_path / 'source')
  before = (source / 'tokenizer.json').read_bytes()
  other = vocabulary_pair.open_vocabulary('bytes', added_sentinels=2)
  assert 'left without them' in tokenizer_writer.write(source, other)
  assert (source / 'tokenizer.json').read_bytes() == before
