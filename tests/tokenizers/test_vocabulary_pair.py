"""Which vocabulary a path is, two of them together, and the bytes."""

import re

import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import special_ids, vocabulary_pair
from tests import tiny_tokenizers

TEXTS = ['some words of a text, and others'] * 3


def test_bytes_are_utf8():
  own = vocabulary_pair.open_vocabulary('bytes')
  assert own.encode('a\u00e9').tolist() == [0x61, 0xC3, 0xA9]
  assert (own.pad, own.eos, own.bos) == (256, 257, 258)
  assert (own.mask, own.unk, own.size) == (259, None, 359)
  assert own.sentinels == list(range(260, 356))
  assert own.mode_ids == {'R': 356, 'S': 357, 'X': 358}
  shown = own.decode([258, 0x61, 356, 0xC3, 0xA9, 257], show_special=True)
  assert shown == '<bos>a[R]\u00e9<eos>'
  assert own.piece(10) == '<0x0A>' and own.piece(256) == '<pad>'
  _, boundaries = own.encode_with_boundaries('a\u00e9b')
  assert boundaries.tolist() == [0, 1, -1, 2, 3]


def test_paths(tmp_path):
  folder = tiny_tokenizers.save(tmp_path / 'a', 'qwen', TEXTS, 300)
  by_folder = vocabulary_pair.open_vocabulary(folder)
  by_file = vocabulary_pair.open_vocabulary(folder / 'tokenizer.json')
  assert by_folder.fingerprint == by_file.fingerprint
  assert by_folder.path == str(folder / 'tokenizer.json')
  with pytest.raises(errors.UserError, match='neither a tokenizer.model'):
    vocabulary_pair.open_vocabulary(tmp_path)
  with pytest.raises(errors.UserError, match='cannot be read'):
    vocabulary_pair.open_vocabulary(tmp_path / 'none.json')


def test_two_vocabularies(tmp_path):
  folder = tiny_tokenizers.save(tmp_path / 'a', 'qwen', TEXTS, 300)
  choice = vocabulary_pair.Choice('bytes', str(folder))
  assert choice.path('encoder') == str(folder)
  assert choice.path('decoder') == 'bytes'
  opened = choice.open()
  assert opened.differ
  qwen = vocabulary_pair.open_vocabulary(folder)
  assert opened.framing == special_ids.Framing(
    encoder=special_ids.SideIds(qwen.pad, qwen.eos, qwen.bos, omits_bos=True),
    decoder=special_ids.SideIds(256, 257, 258),
  )
  described = opened.describe()
  assert described['encoder']['fingerprint'] == qwen.fingerprint
  assert described['decoder']['size'] == 359
  one = vocabulary_pair.Choice('bytes', added_sentinels=2)
  assert one.path('encoder') == 'bytes'
  assert not one.open().differ and one.open().encoder.size == 361
  # The same tokenizer at another place is the same vocabulary.
  copy = tiny_tokenizers.save(tmp_path / 'b', 'qwen', TEXTS, 300)
  assert not vocabulary_pair.Choice(str(folder), str(copy)).open().differ


def _with_token(folder, name, *, special):
  """A Gemma tokenizer with one more token at its end."""
  path = tiny_tokenizers.save(folder, 'gemma', TEXTS, 400) / 'tokenizer.json'
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  rows = tokenizer.get_vocab_size()
  (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([name])
  tokenizer.save(str(path))
  return vocabulary_pair.open_vocabulary(path), rows


def test_a_special_token_beyond_the_table_is_left_out(tmp_path):
  """As Gemma 3's for images is in what transformers 5 saves."""
  own, rows = _with_token(tmp_path, '<image_soft_token>', special=True)
  assert own.size == rows + 1
  note = vocabulary_pair.check_size(own, rows, 'decoder')
  assert f"'<image_soft_token>' ({rows})" in note
  ids = own.encode('some <image_soft_token>')
  assert ids.max() < rows and own.decode(ids) == 'some <image_soft_token>'
  assert vocabulary_pair.check_size(own, rows + 1, 'decoder') == ''


@pytest.mark.parametrize('name', ['ordinary', '<|im_end|>', '<sentinel_0>'])
def test_other_tokens_beyond_the_table_are_refused(name, tmp_path):
  own, rows = _with_token(tmp_path, name, special=name != 'ordinary')
  words = re.escape(f"none for '{name}' ({rows}); give the vocabulary of this")
  with pytest.raises(errors.UserError, match=words):
    vocabulary_pair.check_size(own, rows, 'decoder')
