"""Sentinels that were added, in a tokenizer's files, and found there again."""

import json

import pytest
import sentencepiece
import tokenizers

from encdec_adapt.cli import errors
from encdec_adapt.tokenizers import (
  added_tokens,
  vocabularies,
  vocabulary_training,
)
from tests import tiny, tiny_tokenizers

TEXTS = tiny.text(30)
FAMILIES = ('llama3', 'qwen', 'gemma', 'llama2')
ADDED = 4


def write(folder, added):
  """Writes the new contents into the folder; returns their names."""
  paths = {file.name: file for file in folder.iterdir()}
  new = added_tokens.contents(paths, added)
  for name, content in new.items():
    (folder / name).write_bytes(content)
  return set(new)


def assert_same(found, added):
  """The file has what was added to the vocabulary before."""
  assert found.size == added.size
  assert found.specials == added.specials
  assert found.sentinels == added.sentinels
  assert found.mode_ids == added.mode_ids
  assert found.tokens_digest == added.tokens_digest
  assert not found.added
  text = f'the quick {added.piece(added.sentinels[-1])} fox<mode_R>'
  assert found.encode(text).tolist() == added.encode(text).tolist()
  assert not set(found.encode(text)) & set(added.added)
  assert found.decode(added.added, show_special=True) == (
    added.decode(added.added, show_special=True)
  )


@pytest.mark.parametrize('family', FAMILIES)
def test_a_tokenizer_json_has_them(family, tmp_path):
  tiny_tokenizers.save(tmp_path, family, TEXTS, 300)
  config = tmp_path / 'tokenizer_config.json'
  listed = {'0': {'content': 'x'}}
  content = json.loads(config.read_text())
  config.write_text(json.dumps({**content, 'added_tokens_decoder': listed}))
  (tmp_path / 'added_tokens.json').write_text('{"y": 1}')
  added = vocabularies.open_vocabulary(tmp_path, added_sentinels=ADDED)
  names = {added.piece(i): i for i in added.added}
  assert len(names) == ADDED + (0 if family in ('gemma', 'llama3') else 3)
  assert len(write(tmp_path, added)) == 3
  assert_same(vocabularies.open_vocabulary(tmp_path), added)
  theirs = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  assert {name: theirs.token_to_id(name) for name in names} == names
  content = json.loads(config.read_text())
  found = content['added_tokens_decoder']
  assert found.pop('0') == {'content': 'x'}
  assert {token['content']: int(i) for i, token in found.items()} == names
  assert json.loads((tmp_path / 'added_tokens.json').read_text()) == {
    'y': 1,
    **names,
  }


def test_a_sentencepiece_model_has_them(tmp_path):
  path = tmp_path / 'tokenizer.model'
  vocabulary_training.train_vocabulary(TEXTS, path, 400)
  added = vocabularies.open_vocabulary(path, added_sentinels=ADDED)
  assert write(tmp_path, added) == {'tokenizer.model'}
  assert_same(vocabularies.open_vocabulary(path), added)
  theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
  assert theirs.get_piece_size() == added.size
  assert theirs.encode('x<sentinel_2>')[-1] == added.sentinels[-2]


def test_they_are_not_added_twice(tmp_path):
  tiny_tokenizers.save(tmp_path, 'qwen', TEXTS, 300)
  write(tmp_path, vocabularies.open_vocabulary(tmp_path, added_sentinels=ADDED))
  words = 'has 7 added tokens already, from <sentinel_0> on; set config.data'
  with pytest.raises(errors.UserError, match=words):
    vocabularies.open_vocabulary(tmp_path, added_sentinels=ADDED)


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer.model'])
def test_files_of_other_ids_are_left_alone(name, tmp_path):
  if name.endswith('json'):
    tiny_tokenizers.save(tmp_path, 'qwen', TEXTS, 300)
  else:
    vocabulary_training.train_vocabulary(TEXTS, tmp_path / name, 400)
  other = vocabularies.open_vocabulary('bytes', added_sentinels=2)
  assert not write(tmp_path, other)
  assert not write(tmp_path, vocabularies.open_vocabulary(tmp_path))
