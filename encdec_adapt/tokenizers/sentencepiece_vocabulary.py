"""SentencePiece models with any id layout: Gemma's, Llama 2's, ours.

Special tokens are the model's control and unknown pieces and, in Gemma's
files, user-defined symbols with names of special tokens, which would match in
text. Decoding is lossless for all of UTF-8: models do not normalise, and encode
unknown characters as bytes. Special cases:

- SentencePiece writes a space as U+2581 and would decode a U+2581 of the text
  as a space, so that character is encoded as its three bytes.
- Texts are encoded line by line unless a piece mixes newlines with other
  characters: the ids are the same, three times as fast on long texts.
- Some models prepend a space to every text (Llama 2, Mistral). So does this
  class; decoding removes it at the start of a text, but not after other ids.
- A model with <pad> and </s> and without BOS, or with `extra_ids` in the
  folder's tokenizer_config.json, is T5's and encodes unchanged: it merges
  spaces, normalises, and may lack characters. Its sentinels are in the file
  (mT5), or follow its pieces: `extra_ids` of them, 100 by default.
- tokenizer_config.json sets the framing (`add_bos_token`, `add_eos_token`); the
  default is BOS before a text, for T5 EOS after it.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import hashlib
import itertools
import re
from typing import Any

import sentencepiece

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import vocabulary

CONFIG = 'tokenizer_config.json'
EXTRA_IDS = 100  # The default of T5's tokenizer in transformers.
_SPACE = '\u2581'
# A newline next to another character; a line with its trailing newlines.
_MIXED_LINES = re.compile(r'\n[^\n]|[^\n]\n')
_LINE = re.compile(r'[^\n]+\n*|\n+')


class SentencePieceVocabulary(vocabulary.Vocabulary):
  """A SentencePiece model."""

  def __init__(self, path: paths.Path, *, added_sentinels: int = 0):
    """Opens a model file.

    Args:
      path: path of the file.
      added_sentinels: see `vocabulary.Vocabulary`.

    Raises:
      UserError: the file is missing or damaged, has no EOS or BOS and is not
        T5's, or loses text.
    """
    name = str(path)
    try:
      data = paths.at(path).read_bytes()
    except OSError as error:
      raise errors.UserError(
        f'vocabulary {name!r}: cannot be read ({error.strerror or error}); give'
        ' the path of a tokenizer, or train one'
      ) from None
    self._model = _load(data, name)
    config = paths.at(path).parent / CONFIG
    stated = atomic.read_json(config) if config.is_file() else {}
    roles = _roles(self._model, name)
    # Hashes the file: the result of `_plain` depends on the protobuf version.
    digest, files = hashlib.sha256(data).hexdigest(), [paths.at(path)]
    self._is_t5 = 'extra_ids' in stated or (
      roles['bos'] == roles['pad'] != roles['eos']
    )
    self._prefix = ''
    edges = [], [roles['eos']]
    if self._is_t5:
      # T5's tokenizer in transformers adds no BOS, even if the model has BOS.
      roles['bos'] = roles['pad']
      extra = self._extra_ids(stated.get('extra_ids', EXTRA_IDS))
      digest = vocabulary.digest_of(digest, extra)
      self._model = _load(_plain(data, extra, prefix=True), name)
    else:
      edges = (
        [roles['bos']] if stated.get('add_bos_token', True) else [],
        [roles['eos']] if stated.get('add_eos_token') else [],
      )
      # This class prepends the prefix instead, so it can omit it from parts.
      self._prefix = ' ' if _puts_prefix(self._model) else ''
      if self._prefix or _text_matches_specials(self._model):
        self._model = _load(_plain(data), name)
    self._bytes = self._byte_ids()
    size = self._model.get_piece_size()
    pieces = [self._model.id_to_piece(i) for i in range(size)]
    self._by_line = not any(map(_MIXED_LINES.search, pieces))
    super().__init__(
      name,
      digest,
      size,
      {
        piece.lstrip(_SPACE): i  # mT5 has a space before <extra_id_0>.
        for i, piece in enumerate(pieces)
        if _is_special(self._model, i)
      },
      roles,
      files=files,
      added_sentinels=added_sentinels,
      edges=edges,
    )

  def _extra_ids(self, stated: int) -> int:
    size = self._model.get_piece_size()
    pieces = map(self._model.id_to_piece, range(size))
    # mT5's file already has all sentinels.
    names = {piece.lstrip(_SPACE) for piece in pieces}
    return 0 if '<extra_id_0>' in names else stated

  def _byte_ids(self) -> list[int]:
    ids = [self._model.piece_to_id(f'<0x{byte:02X}>') for byte in range(256)]
    return [] if self._model.unk_id() in ids else ids

  def _piece(self, token):
    return self._model.id_to_piece(token)

  def _encode(self, text):
    if self._is_t5:
      return self._model.encode(text)
    if not text:
      return []
    text = self._prefix + text
    if _SPACE not in text or not self._bytes:
      return self._encode_lines(text)
    # Without byte pieces the character has no encoding; `_loss` rejects such
    # models.
    first, *parts = text.split(_SPACE)
    ids = self._encode_lines(first)
    for part in parts:
      ids += [self._bytes[byte] for byte in _SPACE.encode('utf-8')]
      ids += self._encode_lines(part)
    return ids

  def _encode_lines(self, text: str) -> list[int]:
    """Encodes a text without U+2581, the model's space marker."""
    if not self._by_line:
      return self._model.encode(text)
    # Runs of newlines stay together: they may be a single piece.
    parts = map(self._model.encode, _LINE.findall(text))
    return list(itertools.chain.from_iterable(parts))

  def _encode_with_boundaries(self, text):
    if self._is_t5:
      return self._encode_with_surfaces(text)
    ids = self._encode(text)
    bounds = vocabulary.boundaries_of_bytes(
      self._prefix + text if ids else '', [self._bytes_of(i) for i in ids]
    )
    if self._prefix:
      # The prepended space is not part of the text.
      bounds[1:] -= bounds[1:] > 0
    return ids, bounds

  def _encode_with_surfaces(self, text: str) -> tuple[list[int], list[int]]:
    """Encodes with a T5 model (pieces differ from the text)."""
    # Name in earlier releases; `begin` counts characters there, else bytes.
    old = getattr(self._model, 'encode_as_immutable_proto', None)
    pieces = (old or self._model.encode_as_proto)(text).pieces
    ids, bounds, end = [x.id for x in pieces], [], 0
    for i, piece in enumerate(pieces):
      start, before = text.index(piece.surface, end), pieces[i - 1]
      # The last byte of a character holds its whole surface.
      inside = i and self._model.is_byte(before.id) and not before.surface
      bounds.append(-1 if inside else start)
      end = start + len(piece.surface)
    return ids, [*bounds, len(text)]

  def _bytes_of(self, token):
    piece = self._model.id_to_piece(token)
    if self._model.is_byte(token):
      return bytes([int(piece[1:-1], 16)])
    return piece.replace(_SPACE, ' ').encode('utf-8')

  def _decode(self, ids, *, start):
    text = self._model.decode(ids)
    # The model drops a leading space from every decoded sequence.
    if self._is_t5 and not start and self._piece(ids[0]).startswith(_SPACE):
      return f' {text}'
    return text.removeprefix(self._prefix) if start else text


def _load(data: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
  try:
    if not data:
      raise ValueError('an empty file')
    return sentencepiece.SentencePieceProcessor(model_proto=data)
  except (RuntimeError, ValueError) as error:
    raise vocabulary.DamagedError(
      f'vocabulary {path!r}: not a SentencePiece model, or a damaged one'
      f' ({len(data)} bytes); copy it again, or train one'
    ) from error


def _puts_prefix(model: sentencepiece.SentencePieceProcessor) -> bool:
  # Decoding drops the leading space; the second 'x' keeps its space.
  return model.decode(2 * model.encode('x')) == 'x x'


def _text_matches_specials(model: sentencepiece.SentencePieceProcessor) -> bool:
  return any(
    vocabulary.SPECIAL.fullmatch(model.id_to_piece(i))
    and not _is_special(model, i)
    for i in range(model.get_piece_size())
  )


def _is_special(model: sentencepiece.SentencePieceProcessor, i: int) -> bool:
  return model.is_control(i) or model.is_unknown(i)


def read_proto(data: bytes) -> Any:
  """Parses a SentencePiece file."""
  # Imported late: most commands do not need protobuf.
  from sentencepiece import sentencepiece_model_pb2

  return sentencepiece_model_pb2.ModelProto.FromString(data)


def _plain(data: bytes, extra: int = 0, *, prefix: bool = False) -> bytes:
  """Returns the model with special pieces that never match.

  Args:
    data: serialized model.
    extra: number of T5's sentinels after the pieces.
    prefix: whether to keep the model's prepended space.
  """
  proto = read_proto(data)
  for i in reversed(range(extra)):
    proto.pieces.add(piece=f'<extra_id_{i}>')
  for piece in proto.pieces:
    special = vocabulary.SPECIAL.fullmatch(piece.piece)
    if special and piece.type != piece.UNKNOWN:
      piece.type = piece.CONTROL
  proto.normalizer_spec.add_dummy_prefix &= prefix
  return proto.SerializeToString()


def _roles(
  model: sentencepiece.SentencePieceProcessor, path: str
) -> dict[str, int]:
  roles = {
    'eos': model.eos_id(),
    'bos': model.bos_id(),
    'unk': model.unk_id(),
    'pad': model.pad_id(),
  }
  if roles['bos'] < 0 and model.id_to_piece(roles['eos']) == '</s>':
    roles['bos'] = roles['pad']  # T5's decoder starts with it.
  for role in ('eos', 'bos'):
    if roles[role] < 0:
      raise errors.UserError(
        f'vocabulary {path!r} has no {role.upper()} piece, which rows need;'
        ' use that of Gemma, Llama or Qwen, or train one'
      )
  if roles['pad'] < 0:
    roles['pad'] = roles['eos']  # Masked everywhere, so any id works.
  # `piece_to_id` returns the unknown id for missing pieces.
  mask = model.piece_to_id('<mask>')
  return roles if mask == model.unk_id() else {**roles, 'mask': mask}
