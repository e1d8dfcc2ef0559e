"""Tiny tokenizer.json folders in the manner of each family, trained here."""

from collections.abc import Sequence
import json
import pathlib
import pydoc_data.topics

import pytest
import sentencepiece
import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

from encdec_adapt.tokenizers import vocabulary_training

TEXTS = list(pydoc_data.topics.topics.values())[:30]
_WORDS = (
  r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
LLAMA3 = (
  ['<|begin_of_text|>', '<|end_of_text|>']
  + [f'<|reserved_special_token_{i}|>' for i in range(2)]
  + ['<|finetune_right_pad_id|>', '<|reserved_special_token_2|>']
  + ['<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>']
  + [f'<|reserved_special_token_{i}|>' for i in range(3, 12)]
)
QWEN = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
GEMMA = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>']
GEMMA_SYMBOLS = (
  [f'<unused{i}>' for i in range(99)]
  + ['<start_of_turn>', '<end_of_turn>', '\n', '\n\n']
)  # fmt: skip
_BYTES = [f'<0x{byte:02X}>' for byte in range(256)]
TOKENIZER_CONFIG = {
  'llama3': {'bos_token': '<|begin_of_text|>', 'eos_token': '<|end_of_text|>'},
  'qwen': {
    'bos_token': None,
    'eos_token': {'__type': 'AddedToken', 'content': '<|im_end|>'},
    'pad_token': '<|endoftext|>',
  },
  'gemma': {name[1:-1] + '_token': name for name in GEMMA[:4]},
  'gemma4': {name[1:-1] + '_token': name for name in GEMMA[:4]},
  'llama2': {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'},
  'gpt2': dict.fromkeys(('bos_token', 'eos_token'), '<|endoftext|>'),
  'bert': {'cls_token': '[CLS]', 'sep_token': '[SEP]', 'pad_token': '[PAD]'},
}
BERT = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']


def make(family: str, texts: list[str], size: int) -> tokenizers.Tokenizer:
  """Trains a tokenizer.

  Args:
    family: llama3, qwen, gpt2, gemma, gemma4, llama2 or bert.
    texts: to train on.
    size: tokens before those that are added at the end.
  """
  if family in ('llama3', 'qwen', 'gpt2'):
    return _byte_level(family, texts, size)
  if family == 'bert':
    return _word_piece(texts, size)
  return _byte_fallback(family, texts, size)


def _word_piece(texts, size):
  tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token='[UNK]'))
  tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece()
  trainer = trainers.WordPieceTrainer(
    vocab_size=size, special_tokens=BERT, show_progress=False
  )
  tokenizer.train_from_iterator(texts, trainer)
  ends = [(name, tokenizer.token_to_id(name)) for name in ('[SEP]', '[CLS]')]
  tokenizer.post_processor = processors.BertProcessing(*ends)
  return tokenizer


def _byte_level(family, texts, size):
  tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=family == 'llama3'))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_WORDS), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  if family == 'qwen':
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=size, initial_alphabet=alphabet, show_progress=False
    ),
  )
  specials = {'llama3': LLAMA3, 'qwen': QWEN, 'gpt2': QWEN[:1]}
  tokenizer.add_special_tokens(specials[family])
  if family == 'qwen':
    tokenizer.add_tokens(['<tool_call>'])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
  elif family == 'llama3':
    bos = '<|begin_of_text|>'
    tokenizer.post_processor = processors.Sequence(
      [
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(
          single=f'{bos} $A', special_tokens=[(bos, tokenizer.token_to_id(bos))]
        ),
      ]
    )
  return tokenizer


def _byte_fallback(family, texts, size):
  tokenizer = tokenizers.Tokenizer(
    models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True)
  )
  replace = normalizers.Replace(' ', '\u2581')
  undo = [
    decoders.Replace('\u2581', ' '),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  turns = {'<start_of_turn>': '<|turn>', '<end_of_turn>': '<turn|>'}
  symbols = GEMMA_SYMBOLS
  if family == 'gemma4':
    symbols = [turns.get(x, x) for x in symbols]
  specials = GEMMA + symbols
  tokenizer.normalizer = replace
  tokenizer.decoder = decoders.Sequence(undo)
  if family == 'llama2':
    specials = ['<unk>', '<s>', '</s>']
    tokenizer.normalizer = normalizers.Sequence(
      [normalizers.Prepend('\u2581'), replace]
    )
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(' ', 1, 0)])
  tokenizer.train_from_iterator(
    # A token begins with a space or has none, as in theirs.
    (word for text in texts for word in text.replace(' ', '\n ').split('\n')),
    trainers.BpeTrainer(
      vocab_size=size, special_tokens=specials + _BYTES, show_progress=False
    ),
  )
  return _with_ordinary(tokenizer, _BYTES + symbols)


def _with_ordinary(tokenizer, names):
  """The tokenizer with these tokens no special ones of it.

  Bytes are no added tokens at all; Gemma's symbols are, of no special kind.
  """
  content = json.loads(tokenizer.to_str())
  content['added_tokens'] = [
    {**token, 'special': token['content'] not in names}
    for token in content['added_tokens']
    if token['content'] not in _BYTES
  ]
  return tokenizers.Tokenizer.from_str(json.dumps(content))


def save(
  folder: pathlib.Path,
  family: str,
  texts: list[str],
  size: int,
  *,
  config: bool = True,
  more: Sequence[str] = (),
) -> pathlib.Path:
  """Writes a tokenizer as a Hugging Face folder has it.

  Args:
    folder: folder to write to; made if missing.
    family: see `make`.
    texts: texts to train on.
    size: see `make`.
    config: also write tokenizer_config.json.
    more: special tokens that are added at the end.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer = make(family, texts, size)
  tokenizer.add_special_tokens(list(more))
  tokenizer.save(str(folder / 'tokenizer.json'))
  if config:
    (folder / 'tokenizer_config.json').write_text(
      json.dumps(TOKENIZER_CONFIG[family])
    )
  return folder


def train(path: pathlib.Path, size: int, **options) -> pathlib.Path:
  """Trains a SentencePiece vocabulary of ours on `TEXTS`; returns its path.

  Args:
    path: file to write.
    size: number of pieces.
    **options: options of SentencePiece in place of ours.
  """
  train = sentencepiece.SentencePieceTrainer.train
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      sentencepiece.SentencePieceTrainer,
      'train',
      lambda **own: train(**{**own, **options}),
    )
    vocabulary_training.train_vocabulary(TEXTS, path, size)
  return path
