"""Opens vocabularies: one per model, or another for the encoder.

A vocabulary is a path, or one of two names:

| path                   | vocabulary                                         |
|------------------------|----------------------------------------------------|
| bytes                  | `byte_vocabulary`                                  |
| byt5                   | ByT5's, which has no file                          |
| a file *.json          | a tokenizer.json; a tokenizer_config.json of ByT5  |
| any other file         | a SentencePiece model                              |
| a folder               | its tokenizer.model (T5: spiece.model) if it is    |
|                        | SentencePiece (the file that a model was trained   |
|                        | with), or its tokenizer.json, or ByT5's            |
|                        | tokenizer_config.json                              |
| hf://ORG/NAME[@REV]    | such a folder, or a file in it, on the Hub         |

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, hub, paths
from encdec_adapt.tokenizers import (
  byte_vocabulary,
  chat_format,
  sentencepiece_vocabulary,
  special_ids,
  tokenizer_json,
  vocabulary,
)

BYTES, BYT5 = byte_vocabulary.NAME, byte_vocabulary.BYT5
SENTENCEPIECE, T5 = 'tokenizer.model', 'spiece.model'
_CONFIG = sentencepiece_vocabulary.CONFIG
TOKENIZER_JSON = tokenizer_json.FILE
# Tokenizer files of transformers.
FILES = (
  TOKENIZER_JSON,
  SENTENCEPIECE,
  T5,
  _CONFIG,
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
)


def open_vocabulary(
  path: str | os.PathLike[str], *, added_sentinels: int = 0
) -> vocabulary.Vocabulary:
  """Opens a vocabulary.

  Args:
    path: see the module's table.
    added_sentinels: number of appended sentinels, followed by mode tokens if
      the vocabulary has none.

  Raises:
    UserError: the vocabulary is missing, damaged, or loses text.
  """
  if os.fspath(path) == BYTES:
    return byte_vocabulary.ByteVocabulary(added_sentinels=added_sentinels)
  if os.fspath(path) == BYT5:
    return byte_vocabulary.ByT5Vocabulary(added_sentinels=added_sentinels)
  path = _at(path)
  if path.is_dir():
    folder, path = path, file_in(path)
    if path is None:
      raise errors.UserError(
        f'vocabulary {str(folder)!r}: the folder has neither a {SENTENCEPIECE}'
        f' of SentencePiece nor a {TOKENIZER_JSON}'
      )
  if path.name == _CONFIG:
    return byte_vocabulary.ByT5Vocabulary(
      files=[path], added_sentinels=added_sentinels
    )
  if path.suffix == '.json':
    return tokenizer_json.TokenizerJson(path, added_sentinels=added_sentinels)
  return sentencepiece_vocabulary.SentencePieceVocabulary(
    path, added_sentinels=added_sentinels
  )


def exists(path: str) -> bool:
  """Returns whether there is a file or folder to open."""
  return path in (BYTES, BYT5) or _at(path).exists()


def _at(path: str | os.PathLike[str]) -> paths.Path:
  if not hub.is_address(path):
    return paths.at(path)
  folder, _, name = os.fspath(path).rpartition('/')
  # These also state ids of roles.
  files = (*FILES, 'config.json', vocabulary.GENERATION)
  if name in FILES:
    return hub.fetch(folder, files) / name
  return hub.fetch(path, files)


def file_in(folder: str | os.PathLike[str]) -> paths.Path | None:
  """Returns the vocabulary file of a folder for `open_vocabulary`, or None."""
  # SentencePiece first: a tokenizer.json in the same folder may be a conversion
  # with different ids for some texts.
  for name in (SENTENCEPIECE, T5):
    file = paths.at(folder) / name
    if file.is_file():
      with file.open('rb') as content:
        if vocabulary.is_sentencepiece(content.read(1)):
          return file
  file = paths.at(folder) / TOKENIZER_JSON
  if file.is_file():
    return file
  file = paths.at(folder) / _CONFIG
  is_byt5 = file.is_file() and (
    atomic.read_json(file).get('tokenizer_class') == byte_vocabulary.BYT5_CLASS
  )
  return file if is_byt5 else None


def check_size(
  vocab: vocabulary.Vocabulary, rows: int, side: str, *, key: str = ''
) -> str:
  """Checks that a model's embedding table covers a vocabulary.

  Special tokens unused by framing, objectives and chats may lie beyond the
  table, since text never becomes such a token; Gemma 3's image token does.

  Args:
    vocab: vocabulary of the stack.
    rows: rows of the model's embedding table.
    side: name of the stack.
    key: configuration key or flag that sets `rows`; '' for none.

  Returns:
    A note on special tokens beyond the table, '' without any.

  Raises:
    UserError: the table lacks a token that may occur; names both sizes, the
      token, and the key. Or a tokenizer.json beside the vocabulary has tokens
      that it lacks.
  """
  path, size, piece = vocab.path, vocab.size, vocab.piece
  if tokens := _added_beside(vocab):
    raise errors.UserError(
      f'the {TOKENIZER_JSON} beside {path} has {len(tokens)} tokens that it has'
      f' not ({tokens[0]!r}, ..); add their rows with `convert resize`, or'
      f' remove that {TOKENIZER_JSON}.'
    )
  surplus = range(rows, size)
  used = next((i for i in surplus if _may_be_read(vocab, i)), None)
  if used is not None:
    added = f' ({len(vocab.added)} of them added)' if vocab.added else ''
    raise errors.UserError(
      f"the vocabulary {path} has {size} tokens{added} and the {side}'s table"
      f' {rows} rows, none for {piece(used)!r} ({used}); give the vocabulary of'
      ' this model, or '
      + (f'set {key}={size}.' if key else 'add the rows with `convert resize`.')
    )
  if not surplus:
    return ''
  return (
    f'{len(surplus)} special tokens of the vocabulary {path}, the first'
    f" {piece(rows)!r} ({rows}), have no row in the {side}'s table and are"
    ' left out: a text that spells one out is read as its characters.'
  )


def _added_beside(vocab: vocabulary.Vocabulary) -> list[str]:
  """Returns tokens that users have added to the conversion of a model."""
  if not vocab.files or vocab.files[0].suffix == '.json':
    return []
  file = vocab.files[0].parent / TOKENIZER_JSON
  tokens = atomic.read_json(file)['added_tokens'] if file.is_file() else []
  return [
    token['content']
    for token in tokens
    if token['id'] >= vocab.stored_size and not token.get('special')
  ]


def _may_be_read(vocab: vocabulary.Vocabulary, token: int) -> bool:
  name = vocab.piece(token)
  if not name:  # A gap between ids.
    return False
  roles = {getattr(vocab, role) for role in vocabulary.ROLES}
  return (
    # Text can become any ordinary token.
    vocab.specials.get(name) != token
    or token in {*roles, *vocab.sentinels, *vocab.mode_ids.values()}
    or name in chat_format.markers()
  )


@dataclasses.dataclass(frozen=True)
class Opened:
  """The vocabularies of a model's two sides.

  Attributes:
    decoder: vocabulary of the decoder, its targets and a teacher.
    encoder: vocabulary of the encoder; the same object if both sides share it.
  """

  decoder: vocabulary.Vocabulary
  encoder: vocabulary.Vocabulary

  @property
  def differ(self) -> bool:
    """Whether ids mean different text on the two sides."""
    return self.decoder.fingerprint != self.encoder.fingerprint

  @property
  def sides(self) -> dict[str, vocabulary.Vocabulary]:
    """Vocabularies by name of the stack."""
    return {'encoder': self.encoder, 'decoder': self.decoder}

  @property
  def framing(self) -> special_ids.Framing:
    """Framing ids, by side."""
    return special_ids.Framing(self.encoder.ids, self.decoder.ids)

  @property
  def fingerprints(self) -> dict[str, Any]:
    """Fields of a `records.RecordSpec` determined by the vocabularies."""
    return {
      'vocabulary': self.decoder.fingerprint,
      'encoder_vocabulary': self.encoder.fingerprint,
      'opening': self.encoder.ids.frame_size - 1,
    }

  def check_tables(self, sizes: Mapping[str, int]) -> list[str]:
    """Checks the vocabularies against a model's embedding tables.

    Args:
      sizes: rows of the model's table, by name of the stack.

    Returns:
      Notes, see `check_size`.

    Raises:
      UserError: see `check_size`.
    """
    key = 'config.model.{}.vocab_size'
    notes = (
      check_size(self.sides[side], rows, side, key=key.format(side))
      for side, rows in sizes.items()
    )
    return list(filter(None, notes))

  def describe(self) -> dict[str, Any]:
    """Returns the JSON description for manifests and checkpoints."""
    return {side: v.describe() for side, v in self.sides.items()}


@dataclasses.dataclass(frozen=True)
class Choice:
  """Paths of a model's vocabularies.

  Attributes:
    decoder: path, or 'bytes'.
    encoder: path, or 'bytes'; '' for the decoder's.
    added_sentinels: sentinels added to the decoder's vocabulary, and to the
      encoder's if it is the same.
  """

  decoder: str
  encoder: str = ''
  added_sentinels: int = 0

  def path(self, side: str) -> str:
    """Returns the path of a stack's vocabulary."""
    return self.encoder or self.decoder if side == 'encoder' else self.decoder

  def open(self) -> Opened:
    """Opens the vocabularies.

    Raises:
      UserError: see `open_vocabulary`.
    """
    decoder = open_vocabulary(
      self.decoder, added_sentinels=self.added_sentinels
    )
    # A shared object: both sides get the added sentinels.
    if self.encoder in ('', self.decoder):
      return Opened(decoder, decoder)
    return Opened(decoder, open_vocabulary(self.encoder))
