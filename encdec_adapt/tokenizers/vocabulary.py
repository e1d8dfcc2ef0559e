"""What a vocabulary is, whatever software its file is of.

Text never becomes a special id: '<eos>' or '<unused3>' spelled out in a text
is encoded as the characters it consists of. Encoding adds no framing, and
decoding gives back what was encoded. A tokenizer that loses more than
Unicode's normalisation does (characters it does not know, spaces) is refused
when it is opened; one that normalises says so in `note`.

Special tokens are found by name. Sentinels and UL2's mode tokens are

| names                            | sentinels    | modes R, S, X  |
|----------------------------------|--------------|----------------|
| <unused0> .. (Gemma, and ours)   | 0 .. 95      | 96, 97, 98     |
| <|reserved_special_token_0|> ..  | all but      | the last three |
| (Llama 3)                        | three        |                |
| none of these (Llama 2, Qwen)    | none         | none           |

and any vocabulary can be given new ones at its end: <sentinel_0> .., and
<mode_R>, <mode_S>, <mode_X> where it has no modes (`added_sentinels`). An
export writes them into the tokenizer's files (`added_tokens`), where they are
found again. The papers do not say which ids Google used for sentinels and
modes.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import re
from typing import Any

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import paths
from encdec_adapt.tokenizers import special_ids

ROLES = ('pad', 'eos', 'bos', 'unk', 'mask')
MODES = ('R', 'S', 'X')
# Names that never match in a text, whatever a file says of them.
SPECIAL = re.compile(
  r'<(pad|eos|bos|unk|mask|s|/s|2mass|unused\d+|start_of_turn|end_of_turn'
  r'|start_of_image|end_of_image|image_soft_token|sentinel_\d+|mode_[RSX])>'
  r'|\[@BOS@\]|<\|[^|]+\|>'
)
_ADDED = re.compile(r'<(sentinel_\d+|mode_([RSX]))>')
_GEMMA_SENTINELS = tuple(f'<unused{i}>' for i in range(96))
_GEMMA_MODES = tuple(f'<unused{i}>' for i in range(96, 99))
_LLAMA = re.compile(r'<\|reserved_special_token_(\d+)\|>')

# What must come back exactly: spaces at both ends and in a row, a line's end,
# a character that is surely no token.
_EXACT = '  x  y\n\tz\U000f1234  '
# What Unicode's normal forms may change, by what a note calls it.
_CHANGEABLE = {
  'composes accents (Unicode NFC)': 'A\u030a',
  'replaces ligatures and the like (Unicode NFKC)': '\ufb01',
  'turns the character U+2581 into a space': 'x\u2581y',
}


class DamagedError(errors.UserError):
  """The file of a vocabulary is not what it was: no use to anyone."""


@dataclasses.dataclass(frozen=True)
class SpecialIds:
  """Ids by role.

  Attributes:
    pad: fills rows up; it is masked everywhere.
    eos: ends a document.
    bos: starts a segment.
    unk: stands for what the vocabulary cannot say; None where there is none.
    mask: of masked language models; None where there is none.
  """

  pad: int
  eos: int
  bos: int
  unk: int | None = None
  mask: int | None = None


class Vocabulary(abc.ABC):
  """Text to token ids and back, without any framing (no BOS, no EOS).

  Attributes:
    path: where it was opened from.
    size: V, ids are below it; those that were added included.
    fingerprint: of all that decides what an id means, in hex.
    pad, eos, bos: ids, see `SpecialIds`.
    unk, mask: ids or None.
    specials: every special token's name -> id.
    sentinels: ids that stand for a missing span, in order; maybe none.
    mode_ids: 'R', 'S' and 'X' to the ids of UL2's mode tokens; maybe none.
    note: what a text loses when it is encoded, '' for nothing.
    files: what it consists of, the files it was read from.
  """

  def __init__(
    self,
    path: str,
    digest: str,
    size: int,
    specials: Mapping[str, int],
    ids: SpecialIds,
    *,
    files: Sequence[paths.Path] = (),
    added_sentinels: int = 0,
  ):
    """For subclasses.

    Args:
      path: where it was opened from.
      digest: fingerprint of the vocabulary as it is on disk.
      size: one more than the largest id on disk.
      specials: every special token's name -> id.
      ids: those with a role.
      files: it was read from.
      added_sentinels: how many new sentinels get ids at its end; they bring
        the mode tokens with them, where it has none.

    Raises:
      UserError: it loses text.
    """
    self.path = path
    self.files = tuple(files)
    self.pad, self.eos, self.bos = ids.pad, ids.eos, ids.bos
    self.unk, self.mask = ids.unk, ids.mask
    self.specials = dict(specials)
    self._names = {i: name for name, i in self.specials.items()}
    self.stored_size = self.size = size
    self._own_size = _before_added(self._names, size)
    self.sentinels, self.mode_ids = _sentinels_and_modes(self.specials)
    self._take(range(self._own_size, size))
    if added_sentinels:
      self._add(added_sentinels)
      digest = hashlib.sha256(
        f'{digest} and {added_sentinels} sentinels'.encode()
      ).hexdigest()
    self.fingerprint = digest
    self.note = self._loss()

  def _add(self, sentinels: int) -> None:
    """Gives new sentinels, and modes where there are none, the next ids."""
    if self._own_size < self.size:
      raise errors.UserError(
        f'vocabulary {self.path!r}: it has {self.size - self._own_size} added'
        f' tokens already, from {self.piece(self._own_size)} on; set'
        ' config.data.add_sentinels=0'
      )
    new = [f'<sentinel_{i}>' for i in range(sentinels)]
    new += [] if self.mode_ids else [f'<mode_{mode}>' for mode in MODES]
    ids = range(self.size, self.size + len(new))
    self.specials.update(zip(new, ids, strict=True))
    self._names.update(zip(ids, new, strict=True))
    self._take(ids)
    self.size = ids.stop

  def _take(self, added: range) -> None:
    """Sentinels and modes of ids that were added, now or by an export."""
    modes = {i: _ADDED.fullmatch(self._names[i])[2] for i in added}
    self.sentinels = [*self.sentinels, *(i for i in added if not modes[i])]
    self.mode_ids |= {mode: i for i, mode in modes.items() if mode}

  @property
  def added(self) -> range:
    """Ids that were added at its end and that no file of it has."""
    return range(self.stored_size, self.size)

  @property
  def ids(self) -> special_ids.SideIds:
    """What a side of a row is framed with."""
    return special_ids.SideIds(self.pad, self.eos, self.bos)

  def describe(self) -> dict[str, Any]:
    """What manifests and checkpoints say of it, for JSON."""
    roles = {role: getattr(self, role) for role in ROLES}
    return {
      'fingerprint': self.fingerprint,
      'size': self.size,
      'special_tokens': {
        role: {'id': i, 'token': self.piece(i)}
        for role, i in roles.items()
        if i is not None
      },
    }

  @functools.cached_property
  def tokens_digest(self) -> str:
    """Hash of all token names: equal where ids mean the same text.

    Unlike the fingerprint it does not depend on the kind of file, on the
    roles of special tokens, or on ids that were added.
    """
    names = '\n'.join(repr(self._piece(i)) for i in range(self._own_size))
    return hashlib.sha256(names.encode('utf-8', 'replace')).hexdigest()

  def piece(self, token: int) -> str:
    """Name of a token, such as '<eos>', '<0x0A>' or '\u2581the'."""
    token = int(token)
    return self._names.get(token) or self._piece(token)

  def encode(self, text: str) -> np.ndarray:
    """Token ids of `text`: int32 [n], never a special id.

    Raises:
      UserError: the text has a lone surrogate, which UTF-8 cannot hold.
    """
    _require_utf8(text)
    return np.array(self._encode(text), np.int32)

  def encode_with_boundaries(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and where they part the text.

    Returns:
      The ids as `encode` gives them, int32 [n]; and int32 [n + 1], before
      each token and after the last: how many characters of the text are
      before it, or -1 where it is inside of a character.
    """
    _require_utf8(text)
    ids, boundaries = self._encode_with_boundaries(text)
    return np.array(ids, np.int32), np.array(boundaries, np.int32)

  def decode(
    self,
    ids: Sequence[int] | np.ndarray,
    *,
    show_special: bool = False,
    start: bool = True,
  ) -> str:
    """Text of token ids.

    Args:
      ids: int [n], each below `size`.
      show_special: write special ids by their names, mode tokens as [R], [S]
        and [X]; otherwise they are left out.
      start: the ids are those of a whole text from its start; False for what
        goes on after other ids. It matters where a tokenizer puts a space
        before every text (Llama 2), which is taken away again.

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
      if i not in self._names:
        run.append(i)
      elif show_special:
        if run:
          parts.append(self._decode(run, start=start))
          start, run = False, []
        parts.append(modes.get(i) or self._names[i])
    return ''.join(parts) + (self._decode(run, start=start) if run else '')

  def _loss(self) -> str:
    """What a text loses by being encoded.

    Raises:
      UserError: more than Unicode's normalisation.
    """
    if self.decode(self.encode(_EXACT)) != _EXACT:
      raise errors.UserError(
        f'vocabulary {self.path!r}: it does not give back the text it encodes'
        ' (it trims or merges spaces, or lacks bytes for characters that it'
        ' does not know); use that of Gemma, Llama or Qwen, or train one'
      )
    return ' and '.join(
      how
      for how, text in _CHANGEABLE.items()
      if self.decode(self.encode(text)) != text
    )

  @abc.abstractmethod
  def _piece(self, token: int) -> str:
    """Name of an id on disk; '' where there is a gap."""

  @abc.abstractmethod
  def _encode(self, text: str) -> Sequence[int]:
    """Ids of a text that UTF-8 can hold."""

  @abc.abstractmethod
  def _encode_with_boundaries(
    self, text: str
  ) -> tuple[Sequence[int], Sequence[int]]:
    """As `encode_with_boundaries`."""

  @abc.abstractmethod
  def _decode(self, ids: list[int], *, start: bool) -> str:
    """Text of ids that are not special, at least one."""


def boundaries_of_bytes(text: str, pieces: Sequence[bytes]) -> np.ndarray:
  """Boundaries of tokens whose bytes, one after another, are the text's.

  Args:
    text: a text.
    pieces: bytes of each token, [n].

  Returns:
    As `Vocabulary.encode_with_boundaries`.
  """
  data = np.frombuffer(text.encode('utf-8'), np.uint8)
  starts = (data & 0xC0) != 0x80  # Bytes that a character starts with.
  before = np.append(np.cumsum(starts) - starts, len(text))
  before[:-1][~starts] = -1
  return before[np.cumsum([0, *map(len, pieces)])]


def _require_utf8(text: str) -> None:
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as error:
    raise errors.UserError(
      f'the text has the lone surrogate U+{ord(text[error.start]):04X} at'
      f' character {error.start} and cannot be encoded; replace it'
    ) from None


def _sentinels_and_modes(
  specials: Mapping[str, int],
) -> tuple[list[int], dict[str, int]]:
  """The module's table."""
  sentinels, modes = (
    [specials[name] for name in names if name in specials]
    for names in (_GEMMA_SENTINELS, _GEMMA_MODES)
  )
  if len(sentinels) == len(_GEMMA_SENTINELS) and len(modes) == len(MODES):
    return sentinels, dict(zip(MODES, modes, strict=True))
  reserved = {
    int(match[1]): i
    for name, i in specials.items()
    if (match := _LLAMA.fullmatch(name))
  }
  ids = [reserved[number] for number in sorted(reserved)]
  if len(ids) <= len(MODES):
    return [], {}
  sentinels, modes = ids[: -len(MODES)], ids[-len(MODES) :]
  return sentinels, dict(zip(MODES, modes, strict=True))


def _before_added(names: Mapping[int, str], size: int) -> int:
  """The size without the sentinels and modes that an export added."""
  while _ADDED.fullmatch(names.get(size - 1, '')):
    size -= 1
  return size


def is_sentencepiece(start: bytes) -> bool:
  """Whether a tokenizer.model that begins so is of SentencePiece.

  Such a model starts with a piece, field 1 of its message; Llama 3's file of
  this name is text.
  """
  return start[:1] == b'\n'


def digest_of(*parts: Any) -> str:
  """SHA-256 of JSON values, in hex."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
