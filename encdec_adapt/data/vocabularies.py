"""SentencePiece vocabularies in Gemma's layout of ids.

| piece                     | id                 | use                        |
|---------------------------|--------------------|----------------------------|
| <pad> <eos> <bos> <unk>   | 0 1 2 3            |                            |
| <mask>                    | 4                  | masked language models     |
| <unused0> .. <unused95>   | found by name      | sentinels, in this order   |
| <unused96>                | found by name      | UL2's mode token [R]       |
| <unused97>                | found by name      | UL2's mode token [S]       |
| <unused98>                | found by name      | UL2's mode token [X]       |

A vocabulary that we train has <unused0> at 5; Gemma 2 has it at 7, Gemma 3
at 6. The papers do not say which ids Google used for sentinels and modes.

Text never becomes a special id: '<eos>' or '<unused3>' spelled out in a text
is encoded as the characters it consists of. And `decode(encode(text))` is
`text`, for every text that UTF-8 can hold: no normalisation, no prefix, no
unknown characters (they become bytes). One character needs help: SentencePiece
writes a space as U+2581 and would read a U+2581 back as a space, so we encode
that character as its three bytes.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import io
import os
import pathlib
import re

import numpy as np
import sentencepiece

from encdec_adapt.data import batch
from encdec_adapt.runtime import errors

UNK, MASK = 3, 4
_UNUSED = tuple(f'<unused{i}>' for i in range(99))
_SENTINELS = _UNUSED[:96]
_MODES = {'R': _UNUSED[96], 'S': _UNUSED[97], 'X': _UNUSED[98]}
_LAYOUT = {
  '<pad>': batch.PAD,
  '<eos>': batch.EOS,
  '<bos>': batch.BOS,
  '<unk>': UNK,
  '<mask>': MASK,
}
# Gemma's own files have these as ordinary symbols that match in text.
_SPECIAL = re.compile(
  r'<(pad|eos|bos|unk|mask|2mass|unused\d+|start_of_turn|end_of_turn'
  r'|start_of_image|end_of_image|image_soft_token)>|\[@BOS@\]'
)
_NEWLINES = ('\n', '\n\n', '\n\n\n')
_SPACE = '\u2581'
# A line of training text is cut here; SentencePiece leaves out longer ones.
_LINE_CHARACTERS = 1000


class Vocabulary:
  """Text to token ids and back, without any framing (no BOS, no EOS).

  Attributes:
    path: the model file.
    size: V, the number of pieces.
    fingerprint: sha256 of the model file, in hex.
    pad, eos, bos, unk, mask: their ids (0, 1, 2, 3, 4).
    sentinels: ids that stand for a missing span, in order; empty if the
      vocabulary has none.
    mode_ids: 'R', 'S' and 'X' to the ids of UL2's mode tokens; empty if the
      vocabulary has none.
  """

  pad, eos, bos, unk, mask = batch.PAD, batch.EOS, batch.BOS, UNK, MASK

  def __init__(self, path: str | os.PathLike):
    """Opens a model file.

    Raises:
      UserError: it is missing, damaged, or of another layout.
    """
    self.path = os.fspath(path)
    try:
      data = pathlib.Path(path).read_bytes()
    except OSError as error:
      raise errors.UserError(
        f'vocabulary {self.path!r}: cannot be read ({error.strerror}); give'
        ' the path of a SentencePiece model, or train one'
      ) from None
    self.fingerprint = hashlib.sha256(data).hexdigest()
    self._model = _load(data, self.path)
    if _text_matches_specials(self._model):
      self._model = _load(_with_specials_as_control(data), self.path)
    _check_layout(self._model, self.path)
    self.size = self._model.get_piece_size()
    self.sentinels = self._ids(_SENTINELS)
    modes = self._ids(_MODES.values())
    self.mode_ids = dict(zip(_MODES, modes, strict=True)) if modes else {}
    self._space = [self._model.piece_to_id(f'<0x{b:02X}>') for b in _bytes()]

  def _ids(self, pieces: Iterable[str]) -> list[int]:
    """Ids of the pieces; none at all where one of them does not exist."""
    ids = [self._model.piece_to_id(piece) for piece in pieces]
    return [] if UNK in ids else ids

  def piece(self, token: int) -> str:
    """Name of a piece, such as '<eos>', '<0x0A>' or '\u2581the'."""
    return self._model.id_to_piece(int(token))

  def encode(self, text: str) -> np.ndarray:
    """Token ids of `text`: int32 [n], never a special id.

    Raises:
      UserError: the text has a lone surrogate, which UTF-8 cannot hold.
    """
    try:
      data = text.encode('utf-8')
    except UnicodeEncodeError as error:
      raise errors.UserError(
        f'the text has the lone surrogate U+{ord(text[error.start]):04X} at'
        f' character {error.start} and cannot be encoded; replace it'
      ) from None
    if _SPACE not in text:
      return np.array(self._model.encode(data), np.int32)
    first, *parts = text.split(_SPACE)
    ids = self._model.encode(first)
    for part in parts:
      ids += self._space
      ids += self._model.encode(part)
    return np.array(ids, np.int32)

  def decode(
    self, ids: Sequence[int] | np.ndarray, *, show_special: bool = False
  ) -> str:
    """Text of token ids.

    Args:
      ids: int [n], each below `size`.
      show_special: write special ids by their names, mode tokens as [R], [S]
        and [X]; otherwise they are left out.

    Raises:
      ValueError: an id is not of this vocabulary.
    """
    ids = [int(i) for i in ids]
    for i in ids:
      if not 0 <= i < self.size:
        raise ValueError(
          f'token id {i} is not of the vocabulary {self.path!r}, which has'
          f' {self.size}'
        )
    modes = {token: f'[{mode}]' for mode, token in self.mode_ids.items()}
    parts, run = [], []
    for i in ids:
      if i == UNK or self._model.is_control(i):
        if show_special:
          parts += [self._model.decode(run), modes.get(i) or self.piece(i)]
          run = []
      else:
        run.append(i)
    return ''.join(parts) + self._model.decode(run)


def train_vocabulary(
  texts: Iterable[str],
  path: str | os.PathLike,
  size: int,
  *,
  max_bytes: int = 4_000_000,
) -> Vocabulary:
  """Trains a vocabulary in the module's layout and writes it.

  The same texts give the same file. The file appears whole or not at all.

  Args:
    texts: documents; read until `max_bytes` is reached, of each document at
      most a hundredth of that.
    path: where the model is written; its folder is made.
    size: number of pieces, the special ones, newlines and bytes (363
      together) included.
    max_bytes: UTF-8 bytes of text to train on, which bounds the time (about
      2 s per million on one core).

  Raises:
    UserError: there is too little text for `size`, or none.
  """
  path = pathlib.Path(path)
  data = _train(texts, path, size, max_bytes)
  try:
    _write(path, data)
  except OSError as error:
    raise errors.UserError(
      f'vocabulary {str(path)!r}: cannot be written ({error.strerror}); free'
      ' some space or choose another path'
    ) from None
  return Vocabulary(path)


def _train(
  texts: Iterable[str],
  path: pathlib.Path,
  size: int,
  max_bytes: int,
) -> bytes:
  """The trained model; `path` is for messages."""
  lines = list(_training_lines(texts, max_bytes))
  if not lines:
    raise errors.UserError(
      f'vocabulary {str(path)!r}: there is no text to train it on'
    )
  model = io.BytesIO()
  names = {f'{name[1:-1]}_piece': name for name in list(_LAYOUT)[:4]}
  ids = {f'{name[1:-1]}_id': _LAYOUT[name] for name in list(_LAYOUT)[:4]}
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines),
      model_writer=model,
      vocab_size=size,
      model_type='unigram',  # Faster to encode than the 'bpe' of Gemma's.
      control_symbols=['<mask>', *_UNUSED],
      user_defined_symbols=list(_NEWLINES),
      byte_fallback=True,
      normalization_rule_name='identity',
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      split_digits=True,
      character_coverage=0.9999,
      seed_sentencepiece_size=100_000,
      num_threads=2,  # A part of the result: sums are taken per thread.
      minloglevel=2,
      **names,
      **ids,
    )
  except RuntimeError as error:
    reason = str(error).strip().splitlines()[-1]
    raise errors.UserError(
      f'vocabulary size {size} does not suit the text ({len(lines)} lines):'
      f' {reason}. Choose another size, of at least 512, or give more text'
    ) from None
  return model.getvalue()


def _training_lines(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
  left = max_bytes
  for text in texts:
    share = max_bytes // 100 + 1
    for line in text.split('\n'):
      for start in range(0, len(line), _LINE_CHARACTERS):
        part = line[start : start + _LINE_CHARACTERS]
        yield part
        share -= len(part.encode('utf-8', 'replace'))
        left -= len(part.encode('utf-8', 'replace'))
        if left <= 0:
          return
        if share <= 0:
          break
      if share <= 0:
        break


def _write(path: pathlib.Path, data: bytes) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _load(data: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
  try:
    if not data:
      raise ValueError('an empty file')
    return sentencepiece.SentencePieceProcessor(model_proto=data)
  except (RuntimeError, ValueError) as error:
    raise errors.UserError(
      f'vocabulary {path!r}: not a SentencePiece model, or a damaged one'
      f' ({len(data)} bytes); copy it again, or train one'
    ) from error


def _text_matches_specials(model) -> bool:
  """Whether a special piece's name in a text would become its id."""
  return any(
    _SPECIAL.fullmatch(model.id_to_piece(i))
    and not (model.is_control(i) or model.is_unknown(i))
    for i in range(model.get_piece_size())
  )


def _with_specials_as_control(data: bytes) -> bytes:
  """The model with its special pieces made unmatchable in text."""
  from sentencepiece import sentencepiece_model_pb2  # Brings protobuf.

  proto = sentencepiece_model_pb2.ModelProto.FromString(data)
  for piece in proto.pieces:
    if _SPECIAL.fullmatch(piece.piece) and piece.type != piece.UNKNOWN:
      piece.type = piece.CONTROL
  return proto.SerializeToString()


def _check_layout(model, path: str) -> None:
  has = {name: model.piece_to_id(name) for name in _LAYOUT}
  # A piece that does not exist has the id of <unk>.
  has = {name: i for name, i in has.items() if model.id_to_piece(i) == name}
  if has != _LAYOUT:
    raise errors.UserError(
      f'vocabulary {path!r}: its special ids are not those that records are'
      f' framed with. It needs {_LAYOUT} and has {has}.'
      ' Use a Gemma vocabulary or train one'
    )
  # A ligature, a run of spaces at both ends, a character that is surely no
  # piece: lost by normalisation, trimming and a missing byte fallback.
  probe = '  \ufb01  x\n\U0010fffe  '
  # Twice, which shows a prefix that is put before every text.
  if model.decode(2 * model.encode(probe)) != 2 * probe:
    raise errors.UserError(
      f'vocabulary {path!r}: it does not give back the text it encodes (it'
      ' normalises, trims, adds a prefix or lacks byte fallback); use a Gemma'
      ' vocabulary or train one'
    )


def _bytes() -> bytes:
  return _SPACE.encode('utf-8')
