"""Training a vocabulary: the same every time, bounded, whole or not at all."""

import itertools
import json

import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import (
  chat_format,
  tokenizer_writer,
  vocabulary_training,
)
from tests import tiny_tokenizers

SIZE = 512


def test_training_is_deterministic_and_atomic(tmp_path):
  first, second = (
    vocabulary_training.train_vocabulary(
      itertools.cycle(tiny_tokenizers.TEXTS),
      tmp_path / name,
      SIZE,
      max_bytes=100_000,
    )
    for name in ('a.model', 'b.model')
  )
  assert first.fingerprint == second.fingerprint
  assert len(first.fingerprint) == 64
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a.model', 'b.model']
  other = vocabulary_training.train_vocabulary(
    tiny_tokenizers.TEXTS, tmp_path / 'b.model', SIZE + 1, max_bytes=100_000
  )
  assert other.size == SIZE + 1 and other.fingerprint != first.fingerprint


def test_a_chat_format_stands_behind_the_unused_tokens(tmp_path):
  rendered = '<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n'
  vocabulary = vocabulary_training.train_vocabulary(
    tiny_tokenizers.TEXTS, tmp_path / 'a.model', SIZE, chat='chatml'
  )
  names = ['<|im_start|>', '<|im_end|>', '\n']
  assert [vocabulary.piece(i) for i in (104, 105, 106)] == names
  assert vocabulary.encode(rendered)[0] > 104  # In a text it stays text.
  # An export has the format: as `transformers` reads its folder.
  folder = tmp_path / 'export'
  folder.mkdir()
  tokenizer_writer.write(folder, vocabulary)
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  assert config['chat_template'] == chat_format.jinja(
    chat_format.TEMPLATES['chatml']
  )
  exported = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  ids = exported.encode(rendered, add_special_tokens=False).ids
  messages = [{'role': 'user', 'content': 'Why?'}]
  turns = chat_format.encode(messages, vocabulary, open_turn=True)
  assert turns.ids.tolist() == ids


def test_training_refuses(tmp_path):
  path = tmp_path / 'a.model'
  with pytest.raises(errors.UserError, match='there is no text'):
    vocabulary_training.train_vocabulary(['', '\n'], path, SIZE)
  refusal = r'size 100000 does not suit .*: Vocabulary .*value <= \d+\. Choose'
  with pytest.raises(errors.UserError, match=refusal):
    vocabulary_training.train_vocabulary(
      tiny_tokenizers.TEXTS[:2], path, 100_000
    )
  with pytest.raises(errors.UserError, match='vocabulary size 64 does not'):
    vocabulary_training.train_vocabulary(tiny_tokenizers.TEXTS[:2], path, 64)
  assert not list(tmp_path.iterdir())
  (tmp_path / 'file').touch()
  with pytest.raises(errors.UserError, match='cannot be written'):
    vocabulary_training.train_vocabulary(
      tiny_tokenizers.TEXTS, tmp_path / 'file' / 'a', SIZE, max_bytes=50_000
    )
