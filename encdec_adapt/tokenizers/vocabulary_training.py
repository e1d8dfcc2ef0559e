"""Trains a SentencePiece BPE vocabulary with Gemma's id layout.

| piece                     | id                 |
|---------------------------|--------------------|
| <pad> <eos> <bos> <unk>   | 0 1 2 3            |
| <mask>                    | 4                  |
| <unused0> .. <unused98>   | 5 .. 103           |
| runs of one to three \n   | 104 .. 106         |
| <0x00> .. <0xFF>          | 107 .. 362         |

The special tokens of a chat format follow <unused98> and shift later ids.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Iterator
import io
import os

import sentencepiece

from encdec_adapt.base import errors
from encdec_adapt.files import disk, paths
from encdec_adapt.tokenizers import chat_format, sentencepiece_vocabulary

_SPECIALS = ('<pad>', '<eos>', '<bos>', '<unk>')  # 0 to 3.
_UNUSED = tuple(f'<unused{i}>' for i in range(99))
_NEWLINES = ('\n', '\n\n', '\n\n\n')
# Lines are split at this length: SentencePiece skips lines above 4192 bytes.
_LINE_CHARACTERS = 1000


def train_vocabulary(
  texts: Iterable[str],
  path: str | os.PathLike,
  size: int,
  *,
  max_bytes: int = 4_000_000,
  chat: str = '',
) -> sentencepiece_vocabulary.SentencePieceVocabulary:
  """Trains a vocabulary in the module's layout and writes it atomically.

  The same texts give the same file.

  Args:
    texts: documents; read until `max_bytes` is reached, at most a hundredth of
      that per document.
    path: path of the model; its folder is created.
    size: vocabulary size, including the 363 special tokens, newlines and bytes.
    max_bytes: UTF-8 bytes of training text, which bounds the time.
    chat: family of `chat_format.TEMPLATES`, to add its special tokens.

  Raises:
    UserError: there is no text, too little text for `size`, or the file cannot
      be written.
  """
  path = paths.at(path)
  lines = list(_training_lines(texts, max_bytes))
  if not lines:
    raise errors.UserError(
      f'vocabulary {str(path)!r}: there is no text to train it on'
    )
  turns = chat_format.TEMPLATES[chat].specials if chat else ()
  model = io.BytesIO()
  names = {f'{name[1:-1]}_piece': name for name in _SPECIALS}
  ids = {f'{name[1:-1]}_id': i for i, name in enumerate(_SPECIALS)}
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines),
      model_writer=model,
      vocab_size=size,
      # As in Gemma: `transformers` and `tokenizers` read any SentencePiece file
      # as BPE, and would encode a unigram model differently.
      model_type='bpe',
      control_symbols=['<mask>', *_UNUSED, *turns],
      user_defined_symbols=list(_NEWLINES),
      # Lossless: `Vocabulary` decodes texts exactly.
      byte_fallback=True,
      normalization_rule_name='identity',
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      # As in Gemma: indentation is a piece, numbers are split into digits.
      allow_whitespace_only_pieces=True,
      split_digits=True,
      character_coverage=0.9999,
      # Fixed: the file must not depend on the machine.
      num_threads=2,
      minloglevel=2,
      **names,
      **ids,
    )
  except RuntimeError as error:
    # What precedes quotes the library's source and condition.
    reason = str(error).strip().rpartition('] ')[2]
    raise errors.UserError(
      f'vocabulary size {size} does not suit the text ({len(lines)} lines):'
      f' {reason} Choose another size, or give more text'
    ) from None
  with disk.writing(path):
    paths.write(path, model.getvalue())
  return sentencepiece_vocabulary.SentencePieceVocabulary(path)


def _training_lines(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
  budget = max_bytes
  for text in texts:
    # Limits each document: a book would fill the vocabulary with its names.
    share = max_bytes // 100 + 1
    for line in text.split('\n'):
      for start in range(0, len(line), _LINE_CHARACTERS):
        if min(budget, share) <= 0:
          break
        part = line[start : start + _LINE_CHARACTERS]
        yield part
        size = len(part.encode('utf-8', 'replace'))
        share, budget = share - size, budget - size
    # Stops before reading the next document: sources may be infinite.
    if budget <= 0:
      return
