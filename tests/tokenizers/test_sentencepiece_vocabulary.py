"""Layout, losslessness, special tokens in text, and what is refused."""

import pathlib

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny_tokenizers

SIZE = 512
SPELLED_OUT = (
  '<pad><eos><bos><unk><mask><unused3><unused98> [R][S][X] <0x41> <2mass>'
  ' \u2581 \u2585 \u2047 <start_of_turn>'
)


@pytest.fixture(scope='module', params=['unigram', 'bpe'])
def vocabulary(request, tmp_path_factory):
  """A vocabulary that we train; and one as Gemma's, which are 'bpe'."""
  path = tmp_path_factory.mktemp('vocabulary') / 'new' / 'folder' / 'a.model'
  tiny_tokenizers.train(path, SIZE, model_type=request.param)
  return vocabulary_pair.open_vocabulary(path)


def test_layout(vocabulary):
  assert vocabulary.size == SIZE
  names = [vocabulary.piece(i) for i in range(5)]
  assert names == ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>']
  assert (vocabulary.pad, vocabulary.eos, vocabulary.bos) == (0, 1, 2)
  assert (vocabulary.unk, vocabulary.mask) == (3, 4)
  assert vocabulary.sentinels == list(range(5, 101))
  assert vocabulary.mode_ids == {'R': 101, 'S': 102, 'X': 103}
  assert vocabulary.piece(104) == '\n'
  assert vocabulary.piece(107) == '<0x00>'


def test_special_ids_are_shown_on_demand(vocabulary):
  ids = [2, 102, *vocabulary.encode('a b'), 5, *vocabulary.encode(' c'), 3, 1]
  assert vocabulary.decode(ids) == 'a b c'
  shown = vocabulary.decode(np.array(ids), show_special=True)
  assert shown == '<bos>[S]a b<unused0> c<unk><eos>'


def test_bad_input_is_refused(vocabulary):
  assert len(vocabulary.encode('2026')) >= 4  # Digits are split.
  for i in (SIZE, -1):
    with pytest.raises(ValueError, match=f'token id {i} is not below'):
      vocabulary.decode([i])
  with pytest.raises(errors.UserError, match=r'U\+D800 at character 3'):
    vocabulary.encode('abc\ud800')


def test_damaged_files_are_refused(vocabulary, tmp_path):
  path = tmp_path / 'a.model'
  with pytest.raises(errors.UserError, match='cannot be read'):
    vocabulary_pair.open_vocabulary(path)
  data = pathlib.Path(vocabulary.path).read_bytes()
  for damaged in (b'not a model', data[: len(data) // 2]):
    path.write_bytes(damaged)
    with pytest.raises(errors.UserError, match='a damaged one|give back'):
      vocabulary_pair.open_vocabulary(path)


def _changed(vocabulary, path, change):
  """A copy of a vocabulary's file with something changed in it."""
  data = pathlib.Path(vocabulary.path).read_bytes()
  proto = sentencepiece_model_pb2.ModelProto.FromString(data)
  change(proto)
  path.write_bytes(proto.SerializeToString())
  return path


def test_specials_of_gemmas_own_files_do_not_match_text(vocabulary, tmp_path):
  def as_gemma(proto):
    # Gemma 2's specials are ordinary symbols, with <unused0> at 7.
    names = ['<2mass>', '[@BOS@]', *(f'<unused{i}>' for i in range(99))]
    for piece, name in zip(proto.pieces[5:106], names, strict=True):
      piece.piece = name
    for piece in proto.pieces[4:106]:
      piece.type = piece.USER_DEFINED

  path = _changed(vocabulary, tmp_path / 'gemma.model', as_gemma)
  raw = sentencepiece.SentencePieceProcessor(model_file=str(path))
  assert raw.encode('<mask><unused3>') == [4, 10]
  gemma = vocabulary_pair.open_vocabulary(path)
  ids = gemma.encode(SPELLED_OUT)
  assert gemma.decode(ids) == SPELLED_OUT
  assert ids.min() > 105
  assert gemma.sentinels == list(range(7, 103))
  assert gemma.mode_ids == {'R': 103, 'S': 104, 'X': 105}


def _without_bytes(proto):
  proto.trainer_spec.byte_fallback = False
  for piece in proto.pieces[107:]:
    piece.type = piece.NORMAL


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda p: setattr(p.pieces[2], 'piece', 'other'), 'no BOS piece'),
    (_without_bytes, 'does not give back the text .* lacks bytes'),
  ],
)
def test_models_that_cannot_serve_are_refused(
  vocabulary, tmp_path, change, message
):
  path = _changed(vocabulary, tmp_path / 'other.model', change)
  with pytest.raises(errors.UserError, match=message):
    vocabulary_pair.open_vocabulary(path)
