"""Tiny SentencePiece files in the layout of T5's and mT5's."""

import io
import pathlib

import sentencepiece

from encdec_adapt.tokenizers import sentencepiece_vocabulary
from tests import tiny_tokenizers

PIECES = 400


def train(path: pathlib.Path, symbols: int = 0, **options) -> pathlib.Path:
  """Writes a unigram model with T5's ids.

  Args:
    path: path of the file.
    symbols: number of sentinels in the file, a space before each, as mT5's.
    **options: options of `SentencePieceTrainer.train`.
  """
  model, lines = io.BytesIO(), '\n'.join(tiny_tokenizers.TEXTS).split('\n')
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([line for line in lines if line][:2000]),
    model_writer=model,
    vocab_size=PIECES - symbols,
    model_type='unigram',
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    pad_piece='<pad>',
    eos_piece='</s>',
    unk_piece='<unk>',
    minloglevel=2,
    **options,
  )
  proto = sentencepiece_vocabulary.read_proto(model.getvalue())
  for i in reversed(range(symbols)):
    piece = proto.pieces.add(piece=f'\u2581<extra_id_{i}>', score=0.0)
    piece.type = piece.USER_DEFINED
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(proto.SerializeToString())
  return path
