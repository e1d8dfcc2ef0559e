"""Opens vocabularies: one for a model, or one for each of its sides.

A vocabulary is named by a path, or is 'bytes':

| path                   | what is opened                                     |
|------------------------|----------------------------------------------------|
| bytes                  | `byte_vocabulary`                                  |
| a file *.json          | a tokenizer.json                                   |
| any other file         | a SentencePiece model                              |
| a folder               | its tokenizer.model, where it is SentencePiece     |
|                        | (which is what a model was trained with), or its   |
|                        | tokenizer.json                                     |

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import dataclasses
import os
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import paths
from encdec_adapt.tokenizers import (
  byte_vocabulary,
  chat_format,
  sentencepiece_vocabulary,
  special_ids,
  tokenizer_json,
  vocabulary,
)

BYTES = byte_vocabulary.NAME
SENTENCEPIECE = 'tokenizer.model'
TOKENIZER_JSON = tokenizer_json.FILE


def open_vocabulary(
  path: str | os.PathLike[str], *, added_sentinels: int = 0
) -> vocabulary.Vocabulary:
  """Opens a vocabulary.

  Args:
    path: as the module's table says.
    added_sentinels: how many new sentinels get ids at its end; they bring
      the mode tokens with them, where it has none.

  Raises:
    UserError: there is none, it is damaged, or it loses text.
  """
  if os.fspath(path) == BYTES:
    return byte_vocabulary.ByteVocabulary(added_sentinels=added_sentinels)
  path = paths.at(path)
  if path.is_dir():
    found = file_in(path)
    if found is None:
      raise errors.UserError(
        f'vocabulary {str(path)!r}: the folder has neither a {SENTENCEPIECE}'
        f' of SentencePiece nor a {TOKENIZER_JSON}'
      )
    path = found
  if path.suffix == '.json':
    return tokenizer_json.TokenizerJson(path, added_sentinels=added_sentinels)
  return sentencepiece_vocabulary.SentencePieceVocabulary(
    path, added_sentinels=added_sentinels
  )


def exists(path: str) -> bool:
  """Whether there is something to open at a path."""
  return path == BYTES or paths.at(path).exists()


def file_in(folder: str | os.PathLike[str]) -> paths.Path | None:
  """The file that `open_vocabulary` opens of a folder; None for none."""
  file = paths.at(folder) / SENTENCEPIECE
  if file.is_file():
    with file.open('rb') as content:
      if vocabulary.is_sentencepiece(content.read(1)):
        return file
  file = paths.at(folder) / TOKENIZER_JSON
  return file if file.is_file() else None


def check_size(
  one: vocabulary.Vocabulary, rows: int, side: str, *, key: str = ''
) -> str:
  """Refuses a vocabulary with ids that a model has no row for.

  Special tokens that nothing is framed with may lie beyond: no text becomes
  one of them. Gemma 3's stands for a piece of an image.

  Args:
    one: the vocabulary.
    rows: tokens of the model's table.
    side: the stack that reads it.
    key: of the configuration, or the flag, that sets the rows; '' for none.

  Returns:
    What to say of ids beyond the table; or ''.

  Raises:
    UserError: names both sizes, a token beyond the table, and the key.
  """
  if one.size <= rows:
    return ''
  beyond = range(rows, one.size)
  used = next((i for i in beyond if _may_be_read(one, i)), None)
  if used is None:
    names = ', '.join(f'{one.piece(i)!r} ({i})' for i in beyond[:3])
    return (
      f'{len(beyond)} special tokens of the vocabulary {one.path} have ids'
      f" beyond the {rows} rows of the {side}'s table and are left out, {names}"
      + ' and so on' * (len(beyond) > 3)
      + ': a text that spells one out is read as the characters it consists of.'
    )
  added = len(one.added)
  raise errors.UserError(
    f'the vocabulary {one.path} has {one.size} tokens'
    + f', {added} that config.data.add_sentinels adds included,' * bool(added)
    + f" and the {side}'s table {rows} rows, none for {one.piece(used)!r}"
    + f' ({used}); give the vocabulary of this model'
    + f', or set {key}={one.size}' * bool(key)
    + '.'
  )


def _may_be_read(one: vocabulary.Vocabulary, token: int) -> bool:
  """Whether a text, its framing, an objective or a chat has the token."""
  name = one.piece(token)
  if not name:  # A gap between ids.
    return False
  roles = {getattr(one, role) for role in vocabulary.ROLES}
  return (
    one.specials.get(name) != token
    or token in {*roles, *one.sentinels, *one.mode_ids.values()}
    or name in chat_format.markers()
  )


@dataclasses.dataclass(frozen=True)
class Opened:
  """The vocabularies of a model's two sides.

  Attributes:
    decoder: of the decoder, its targets and a teacher.
    encoder: of the encoder; the same one where there is one.
  """

  decoder: vocabulary.Vocabulary
  encoder: vocabulary.Vocabulary

  @property
  def differ(self) -> bool:
    """Whether an id means another thing on the other side."""
    return self.decoder.fingerprint != self.encoder.fingerprint

  @property
  def sides(self) -> dict[str, vocabulary.Vocabulary]:
    """By the name of the stack."""
    return {'encoder': self.encoder, 'decoder': self.decoder}

  @property
  def framing(self) -> special_ids.Framing:
    """What rows are framed with."""
    return special_ids.Framing(self.encoder.ids, self.decoder.ids)

  @property
  def fingerprints(self) -> dict[str, str]:
    """Fields of a `records.RecordSpec`."""
    return {
      'vocabulary': self.decoder.fingerprint,
      'encoder_vocabulary': self.encoder.fingerprint,
    }

  def describe(self) -> dict[str, Any]:
    """What manifests and checkpoints say of them, for JSON."""
    return {name: one.describe() for name, one in self.sides.items()}


@dataclasses.dataclass(frozen=True)
class Choice:
  """Which vocabularies a model has.

  Attributes:
    decoder: path, or 'bytes'.
    encoder: the same of the encoder; '' for the decoder's.
    added_sentinels: of the decoder's, see `open_vocabulary`; also of the
      encoder's where it is the same.
  """

  decoder: str
  encoder: str = ''
  added_sentinels: int = 0

  def path(self, side: str) -> str:
    """That of a stack, by its name."""
    return self.encoder or self.decoder if side == 'encoder' else self.decoder

  def open(self) -> Opened:
    """Opens them.

    Raises:
      UserError: as `open_vocabulary`.
    """
    decoder = open_vocabulary(
      self.decoder, added_sentinels=self.added_sentinels
    )
    if self.encoder in ('', self.decoder):
      return Opened(decoder, decoder)
    return Opened(decoder, open_vocabulary(self.encoder))
