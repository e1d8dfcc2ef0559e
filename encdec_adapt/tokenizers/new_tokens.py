"""Adds tokens to the tokenizer files of a folder.

A new token matches wherever its text occurs, before the text is split into
pieces, as after `add_tokens` in transformers. A name of a special token
(`vocabulary.SPECIAL`) never matches in text. Both are in tokenizer.json alone,
so the SentencePiece model beside it, which lacks them, is removed.
"""

from collections.abc import Mapping
import pathlib

import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import (
  tokenizer_writer,
  vocabulary,
  vocabulary_pair,
)

_LISTED = 'added_tokens_decoder'  # In tokenizer_config.json.
_ADDED = 'added_tokens.json'


def read_file(path: str) -> dict[str, str]:
  """Reads a file of new tokens, one a line.

  Args:
    path: a file in UTF-8. A line is a token, or a token, a tab and the name of
      the piece whose rows it copies.

  Returns:
    Token -> piece, '' to draw its rows.

  Raises:
    UserError: the file cannot be read, or a line is empty, has spaces around
      its token, or occurs twice.
  """
  try:
    text = paths.at(path).read_bytes().decode()
  except (OSError, UnicodeDecodeError) as error:
    raise errors.UserError(
      f'the file of tokens {path} cannot be read ({error}); give a file in'
      ' UTF-8 with a token a line.'
    ) from error
  tokens: dict[str, str] = {}
  for number, line in enumerate(text.removesuffix('\n').split('\n'), 1):
    token, _, piece = line.partition('\t')
    problem = ''
    if not token or token != token.strip():
      problem = 'must be a token without spaces around it'
    elif token in tokens:
      problem = 'is a token of an earlier line; remove one'
    if problem:
      raise errors.UserError(f'line {number} of {path}, {line!r}, {problem}.')
    tokens[token] = piece
  return tokens


def add(
  folder: pathlib.Path, tokens: Mapping[str, str], rows: int
) -> dict[int, int | None]:
  """Adds tokens to the files that `tokenizer_writer.write` has completed.

  Args:
    folder: a local folder.
    tokens: result of `read_file`.
    rows: rows of the model's table.

  Returns:
    Id of each token -> id of its piece, None to draw its rows.

  Raises:
    UserError: there is no tokenizer.json, it has sentinels at its end, a token
      exists, a piece to copy has no row, or text with a token is not given
      back.
  """
  file = folder / tokenizer_writer.JSON
  if not file.exists():
    raise errors.UserError(
      f'the vocabulary has no {file.name}, and ByT5 can have none: its'
      ' tokenizer is bytes alone; add tokens to another model.'
    )
  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  before = tokenizer.get_vocab()
  if last := next(filter(vocabulary.ADDED.fullmatch, [*before, *tokens]), ''):
    raise errors.UserError(
      f'the vocabulary or the file has {last!r}, and sentinels must be its last'
      ' tokens; config.data.add_sentinels adds them, after other tokens.'
    )
  for token, piece in tokens.items():
    if (known := before.get(token)) is not None:
      raise errors.UserError(
        f'the token {token!r} exists already, with the id {known}; remove its'
        ' line.'
      )
    if piece and before.get(piece, rows) >= rows:
      raise errors.UserError(
        f'the token {token!r} copies {piece!r}, and the model has no row for'
        ' it; name a token as tokenizer.json does (\u2581the, \u0120the).'
      )
  special = {x: bool(vocabulary.SPECIAL.fullmatch(x)) for x in tokens}
  added = [
    tokenizers.AddedToken(token, normalized=False, special=special[token])
    for token in tokens
  ]
  tokenizer.add_tokens(added)
  ids = {token: tokenizer.token_to_id(token) for token in tokens}
  # `tokenizers` counts, and does not look for the last id.
  if not {*ids.values()}.isdisjoint(before.values()):
    raise errors.UserError(
      f'the vocabulary has {len(before)} tokens and ids up to'
      f' {max(before.values())}, so that new tokens would get ids of others;'
      ' give a tokenizer without gaps.'
    )
  tokenizer.save(str(file))
  for name in (vocabulary_pair.SENTENCEPIECE, vocabulary_pair.T5):
    (folder / name).unlink(missing_ok=True)
  config = atomic.read_json(folder / tokenizer_writer.CONFIG)
  if _LISTED in config:
    # transformers' classes that rebuild the tokenizer read only this list.
    config[_LISTED] |= {
      str(i): {'content': token, 'normalized': False, 'special': special[token]}
      for token, i in ids.items()
    }
    atomic.write_json(folder / tokenizer_writer.CONFIG, config)
  if (folder / _ADDED).exists():
    listed = atomic.read_json(folder / _ADDED)
    atomic.write_json(folder / _ADDED, listed | ids)
  _check(vocabulary_pair.open_vocabulary(file), ids, special)
  return {
    ids[x]: before[piece] if piece else None for x, piece in tokens.items()
  }


def _check(
  vocab: vocabulary.Vocabulary,
  ids: Mapping[str, int],
  special: Mapping[str, bool],
) -> None:
  for token, i in ids.items():
    text = f'a {token} b'
    read = vocab.encode(text)
    # T5 merges spaces, and lacks characters.
    lost = vocab.decode(read) != text and not vocab.ids.ends_with_eos
    if lost or (i in read) == special[token]:
      raise errors.UserError(
        f'with the token {token!r} the tokenizer reads {text!r} as'
        f' {[*map(vocab.piece, read)]}, and gives back {vocab.decode(read)!r};'
        ' remove the token, or change it: byte-level tokenizers take ASCII, and'
        ' those that put a space before a text (Llama 2) no new tokens.'
      )
