"""Tiny tokenizers in the layout of T5's, mT5's and CodeT5's."""

import io
import json
import pathlib

import sentencepiece
from tokenizers import processors

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
    pad_piece='<pad>',
    eos_piece='</s>',
    unk_piece='<unk>',
    minloglevel=2,
    **{'bos_id': -1, **options},
  )
  proto = sentencepiece_vocabulary.read_proto(model.getvalue())
  for i in reversed(range(symbols)):
    piece = proto.pieces.add(piece=f'\u2581<extra_id_{i}>', score=0.0)
    piece.type = piece.USER_DEFINED
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(proto.SerializeToString())
  return path


def train_code_t5(
  folder: pathlib.Path, *, template: bool = False, **fields
) -> pathlib.Path:
  """Writes a byte-level tokenizer that frames `<s> p </s>`; returns its folder.

  Args:
    folder: folder to write to.
    template: whether the post-processor is a template, and not RoBERTa's.
    **fields: fields of config.json in place of CodeT5's.
  """
  tokenizer = tiny_tokenizers.make('qwen', tiny_tokenizers.TEXTS, PIECES)
  names = ['<pad>', '<s>', '</s>', *(f'<extra_id_{i}>' for i in range(9))]
  tokenizer.add_special_tokens(names)
  pad, bos, eos = map(tokenizer.token_to_id, names[:3])
  edges = ('</s>', eos), ('<s>', bos)
  tokenizer.post_processor = processors.RobertaProcessing(*edges)
  if template:
    tokenizer.post_processor = processors.TemplateProcessing(
      single='<s> $A </s>', special_tokens=edges
    )
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  roles = zip(('pad_token', 'bos_token', 'eos_token'), names, strict=False)
  config = {'tokenizer_class': 'PreTrainedTokenizerFast', **dict(roles)}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  content = {'model_type': 't5', 'decoder_start_token_id': pad, **fields}
  content = {'pad_token_id': pad, 'eos_token_id': eos} | content
  (folder / 'config.json').write_text(json.dumps(content))
  return folder
