"""Common interface of all vocabularies, independent of file format.

Text never becomes a special id: '<eos>' or '<unused3>' in a text is encoded as
characters. Encoding adds no framing, and decoding returns the encoded text. A
tokenizer that loses more than Unicode normalisation does (unknown characters,
spaces) is rejected on opening, unless it frames rows like T5
(`special_ids.SideIds.ends_with_eos`); a tokenizer
that changes text has a `note`.

Special tokens are found by name. Sentinels and UL2's mode tokens are

| names                            | sentinels    | modes R, S, X  |
|----------------------------------|--------------|----------------|
| <unused0> .. (Gemma, and ours)   | 0 .. 95      | 96, 97, 98     |
| <|reserved_special_token_0|> ..  | all but      | the last three |
| (Llama 3)                        | three        |                |
| <extra_id_0> .. (T5), downwards  | all          | none           |
| from the last id                 |              |                |
| others (Llama 2, Qwen)           | none         | none           |

and <sentinel_0> .. can be appended to any vocabulary, with <mode_R>, <mode_S>,
<mode_X> if it has no modes (`added_sentinels`). An export writes them into the
tokenizer's files (`tokenizer_writer`), where they are found again. The papers
do not state Google's ids of sentinels and modes.

Framing follows the ids that the tokenizer adds around every text, and
`decoder_start_token_id` of the model's config.json in the same folder (an
export also writes it into tokenizer_config.json):

| tokenizer puts        | start token | an encoder reads | decoders start with |
|-----------------------|-------------|------------------|---------------------|
| nothing, or BOS first | BOS, or not | BOS p            | BOS                 |
|                       | stated      |                  |                     |
| EOS last (T5, CodeT5) | stated      | p EOS, or BOS p  | the start token     |
|                       |             | EOS if it puts   |                     |
|                       |             | BOS first        |                     |
| EOS, then others last | stated      | p EOS others     | the start token     |
| (mBART cc25)          |             |                  |                     |
| EOS last, has no BOS  | not stated  | p EOS            | padding             |
| both (BERT, RoBERTa)  | not stated  | BOS p EOS        | BOS                 |

Targets begin with the ids before such inputs, or with `forced_bos_token_id` of
the model's generation_config.json, or without this file of config.json, which
is generated first (BART, mBART-50). It must be stated if inputs begin with
another token than BOS: the language of inputs is not that of targets.

A decoder reads `BOS p`, or `p` alone if the tokenizer puts nothing and BOS is
EOS or padding (GPT-2, Qwen).

A final EOS is ignored if there is a BOS and no start token is stated: the model
may be a decoder. Inconsistent files are rejected.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
from collections.abc import Mapping, Sequence
import functools
import hashlib
import json
import re
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import special_ids

START = 'decoder_start_token_id'
CONFIGS = ('tokenizer_config.json', 'config.json')  # Files with that key.
GENERATION = 'generation_config.json'
FORCED = 'forced_bos_token_id'
ROLES = ('pad', 'eos', 'bos', 'unk', 'mask')
MODES = ('R', 'S', 'X')
# Names that never match in text, whatever the tokenizer's files declare:
# Gemma's files list them as ordinary symbols, so a document could end itself.
SPECIAL = re.compile(
  r'<(pad|eos|bos|unk|mask|s|/s|2mass|unused\d+|start_of_turn|end_of_turn'
  r'|start_of_image|end_of_image|image_soft_token|sentinel_\d+|mode_[RSX])>'
  r'|\u2581?<extra_id_\d+>'
  r'|\[@BOS@\]|<\|[^|]+\|>|<\|\w+>|<\w+\|>'
)
ADDED = re.compile(r'<(sentinel_\d+|mode_([RSX]))>')
# Gemma 2 has <unused0> to <unused98>; the last three of them are the modes.
_GEMMA_SENTINELS = tuple(f'<unused{i}>' for i in range(96))
_GEMMA_MODES = tuple(f'<unused{i}>' for i in range(96, 99))
_T5 = re.compile(r'<extra_id_(\d+)>')
_LLAMA = re.compile(r'<\|reserved_special_token_(\d+)\|>')

# Text that must round-trip exactly: leading, trailing and repeated spaces, a
# newline, a private-use character (never a token).
_EXACT = '  x  y\n\tz\U000f1234  '
# Text that normalisation may change, and what it becomes, by the wording of the
# note. Such vocabularies are tolerated: the text keeps its meaning.
_CHANGEABLE = {
  'composes accents (Unicode NFC)': ('A\u030a', '\xc5'),
  'replaces ligatures and the like (Unicode NFKC)': ('\ufb01', 'fi'),
  'turns the character U+2581 into a space': ('x\u2581y', 'x y'),
  'lowercases': ('Xx', 'xx'),
  'drops accents': ('u\xfc', 'uu'),
}

# Text that tokenizers of T5 and BERT lose, by the wording of the note.
_LOSABLE = {
  'merges spaces and drops line breaks': 'x  x\nx ',
  'leaves out characters that it lacks': 'x\U000f1234x',
}


class DamagedError(errors.UserError):
  """A vocabulary file is damaged, rather than unsuitable."""


class Vocabulary(abc.ABC):
  """Text to token ids and back, without any framing (no BOS, no EOS).

  Attributes:
    path: path of the vocabulary, as opened.
    size: V, vocabulary size, added tokens included.
    stored_size: vocabulary size without tokens added in memory.
    fingerprint: hex digest of everything that determines the meaning of ids.
    ids: framing ids; `pad`, `eos` and `bos` are the same ids.
    unk: id of unknown characters, or None.
    mask: id of the MLM mask token, or None.
    specials: name -> id of every special token.
    sentinels: ids of the sentinels in order; may be empty.
    mode_ids: 'R', 'S' and 'X' -> ids of UL2's mode tokens; may be empty.
    note: description of changes to encoded text; '' for none.
    files: source files of the vocabulary.
    is_of_bytes: whether every ordinary token is a byte.
  """

  is_of_bytes = False

  def __init__(
    self,
    path: str,
    digest: str,
    size: int,
    specials: Mapping[str, int],
    roles: Mapping[str, int],
    *,
    files: Sequence[paths.Path] = (),
    added_sentinels: int = 0,
    edges: tuple[Sequence[int], Sequence[int]] = ((), ()),
    frames: bool = False,
    omits_bos: bool = False,
  ):
    """Initialises the attributes for a subclass.

    Args:
      path: path of the vocabulary, as opened.
      digest: fingerprint without added sentinels.
      size: largest id on disk, plus 1.
      specials: name -> id of every special token.
      roles: ids by role, one of `ROLES`; `unk` and `mask` may be missing.
      files: source files of the vocabulary.
      added_sentinels: number of appended sentinels, followed by mode tokens if
        the vocabulary has none.
      edges: ids that the tokenizer adds before and after every text.
      frames: whether encoders read both, as BERT and RoBERTa.
      omits_bos: see `special_ids.SideIds`.

    Raises:
      UserError: encoding loses text, or the files state different framings.
    """
    self.path = path
    self.files = tuple(files)
    self.specials = dict(specials)
    self._names = {i: name for name, i in self.specials.items()}
    self.pad, self.eos, self.bos = roles['pad'], roles['eos'], roles['bos']
    self.unk, self.mask = roles.get('unk'), roles.get('mask')
    head, tail = map(tuple, edges)
    start = self._stated_start(tail)
    is_t5 = frames or start is not None or self.bos == self.pad != self.eos
    ends_with_eos = is_t5 and tail[:1] == (self.eos,)
    opening, closing = (head, tail[1:]) if ends_with_eos else ((), ())
    if ends_with_eos:
      self.bos = self.bos if start is None else start
    elif head not in ((), (self.bos,)) or (
      tail and (start is not None or len(tail) > 1)
    ):
      raise errors.UserError(
        f'the tokenizer {path} puts {head} before and {tail} behind every text,'
        f' and its files name BOS {self.bos} and EOS {self.eos}; correct its'
        ' post_processor, or the tokenizer_config.json beside it, or name the'
        f' {START} of an encoder-decoder there.'
      )
    forced = self._stated_forced() if ends_with_eos else None
    if forced is None and not frames and {*opening} - {roles['bos']}:
      names = ' '.join(self._names.get(i, str(i)) for i in opening)
      raise errors.UserError(
        f'the tokenizer {path} puts {names} before every text, the language of'
        ' inputs, and its model is not forced to write a language; state the id'
        f' of one as {FORCED} in {self.files[0].parent / GENERATION}.'
      )
    # Omitted if they say nothing new: older records stay valid.
    first = () if forced is None else (forced,)
    framings = [ids for ids in (first, closing) if ids not in ((), opening)]
    if (self.bos, opening) != (roles['bos'], ()) or framings:
      digest = digest_of(digest, self.bos, opening, *framings)
    self.stored_size = self.size = size
    # An export writes added tokens into the files, from where they are reread.
    self._original_size = _original_size(self._names, size)
    self.sentinels, self.mode_ids = self._find_sentinels()
    self._take(range(self._original_size, size))
    if added_sentinels:
      self._add(added_sentinels)
      # Records are valid only for models with the same sentinels.
      digest = hashlib.sha256(
        f'{digest} and {added_sentinels} sentinels'.encode()
      ).hexdigest()
    self.fingerprint = digest
    self.ids = special_ids.SideIds(
      self.pad,
      self.eos,
      self.bos,
      tuple(self.sentinels),
      tuple(self.mode_ids.values()),
      ends_with_eos,
      opening,
      forced,
      closing,
      omits_bos,
    )
    self.note = self._loss()

  def _stated_start(self, tail: Sequence[int]) -> int | None:
    """Returns the decoder start token stated in the tokenizer's folder.

    Adds the files to `files` if they determine the framing: if `tail` is not
    empty.

    Raises:
      UserError: an id disagrees with the tokenizer; names file and key.
    """
    start, allowed = None, {START: {self.bos}}
    if tail:
      allowed = {'eos_token_id': {self.eos}, 'pad_token_id': {self.pad}}
      allowed[START] = {*self.specials.values()}
    for file in [self.files[0].parent / x for x in CONFIGS if self.files]:
      stated = atomic.read_json(file) if file.is_file() else {}
      decides = START in stated or file.name == CONFIGS[0]
      if tail and stated and decides and file not in self.files:
        self.files += (file,)
      for key, ids in allowed.items() if START in stated else ():
        value = stated.get(key)
        if value is not None and ids.isdisjoint(np.ravel(value).tolist()):
          raise errors.UserError(
            f'{file} has {key} {value!r}, and the tokenizer {self.path} has'
            f' {sorted(ids)[:3]}; correct one, or use the files of one model.'
          )
      if stated.get(START) is not None:
        start = stated[START]
        allowed[START] = {start}
    return start

  def _stated_forced(self) -> int | None:
    """Returns the token that decoders are forced to write first, or None.

    Adds the file that decides to `files`.

    Raises:
      UserError: it is no special token.
    """
    names = (GENERATION, *CONFIGS) if self.files else ()
    files = [self.files[0].parent / name for name in names]
    tokens = {x: atomic.read_json(x).get(FORCED) for x in files if x.is_file()}
    if not {*tokens.values()} - {None}:
      return None
    # As in transformers, a generation config decides alone.
    file, token = next(
      (file, token)
      for file, token in tokens.items()
      if token is not None or file.name == GENERATION
    )
    if token not in (None, *self.specials.values()):
      raise errors.UserError(
        f'{file} has {FORCED} {token!r}, which is no special token of the'
        f' tokenizer {self.path}; correct it, or use the files of one model.'
      )
    if file not in self.files:
      self.files += (file,)
    return token

  def _add(self, sentinels: int) -> None:
    # A second group would reuse the names of the first.
    if self._original_size < self.size:
      raise errors.UserError(
        f'vocabulary {self.path!r} has {self.size - self._original_size} added'
        f' tokens already, from {self.piece(self._original_size)} on; set'
        ' config.data.add_sentinels=0'
      )
    new = [f'<sentinel_{i}>' for i in range(sentinels)]
    new += [] if self.mode_ids else [f'<mode_{mode}>' for mode in MODES]
    ids = range(self.size, self.size + len(new))
    self.specials.update(zip(new, ids, strict=True))
    self._names.update(zip(ids, new, strict=True))
    self._take(ids)
    self.size = ids.stop

  def _find_sentinels(self) -> tuple[list[int], dict[str, int]]:
    return _sentinels_and_modes(self.specials)

  def _take(self, added: range) -> None:
    modes = {i: ADDED.fullmatch(self._names[i])[2] for i in added}
    self.sentinels = [*self.sentinels, *(i for i in added if not modes[i])]
    self.mode_ids |= {mode: i for i, mode in modes.items() if mode}

  @property
  def sentinel_names(self) -> dict[str, int]:
    """Ids of the sentinels by name, in order."""
    return {self.piece(i): i for i in self.sentinels}

  @property
  def added(self) -> range:
    """Ids added in memory only, not stored in a file."""
    return range(self.stored_size, self.size)

  def describe(self) -> dict[str, Any]:
    """Returns the JSON description for manifests and checkpoints."""
    roles = {role: getattr(self, role) for role in ROLES}
    return {
      'fingerprint': self.fingerprint,
      'size': self.size,
      'special_tokens': {
        role: {'id': i, 'token': self.piece(i)}
        for role, i in roles.items()
        if i is not None
      },
      'ends_with_eos': self.ids.ends_with_eos,
      **({'opening': [*self.ids.opening]} if self.ids.opening else {}),
      **({} if self.ids.forced is None else {'forced': self.ids.forced}),
      **({'closing': [*self.ids.closing]} if self.ids.closing else {}),
      **({'omits_bos': True} if self.ids.omits_bos else {}),
    }

  @functools.cached_property
  def tokens_digest(self) -> str:
    """Hash of all token names, equal if ids mean the same text.

    Unlike the fingerprint, it is independent of the file format, the roles of
    special tokens and added ids, but depends on the framing of inputs.
    """
    # repr disambiguates names with newlines.
    names = '\n'.join(repr(self._piece(i)) for i in range(self._original_size))
    names += '\nends with EOS' if self.ids.ends_with_eos else ''
    names += f'\nopens with {self.ids.opening}' if self.ids.opening else ''
    names += '\nomits BOS' if self.ids.omits_bos else ''
    names += f'\ncloses with {self.ids.closing}' if self.ids.closing else ''
    return hashlib.sha256(names.encode('utf-8', 'replace')).hexdigest()

  @functools.cached_property
  def text_ids(self) -> np.ndarray:
    """Ids of ordinary tokens, int32: neither special nor gaps."""
    special = set(self.specials.values())
    text = [i for i in range(self.size) if i not in special and self.piece(i)]
    return np.array(text, np.int32)

  @functools.cached_property
  def sentence_ends(self) -> np.ndarray:
    """Whether a token ends in '.', '!' or '?' or has a newline, bool [size]."""
    ends = np.zeros(self.size, bool)
    for i in self.text_ids.tolist():
      # Not at the start of text, where some tokenizers drop a space.
      text = self.decode([i], start=False)
      ends[i] = text.endswith(('.', '!', '?')) or '\n' in text
    return ends

  def piece(self, token: int) -> str:
    """Returns the name of a token, such as '<eos>', '<0x0A>' or '\u2581the'."""
    token = int(token)
    return self._names.get(token) or self._piece(token)

  def bytes_of(self, token: int) -> bytes:
    """Returns the UTF-8 of a token, or of the name of a special token."""
    if token in self._names:
      return self.decode([token], show_special=True).encode()
    return self._bytes_of(token)

  def encode(self, text: str) -> np.ndarray:
    """Returns the token ids of `text`, int32 [n], never special ids.

    Raises:
      UserError: the text has a lone surrogate, which is not valid in UTF-8.
    """
    _require_utf8(text)
    return np.array(self._encode(text), np.int32)

  def encode_with_boundaries(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a text and locates its tokens.

    Returns:
      The ids as in `encode`, int32 [n]; and character offsets of the token
      boundaries, int32 [n + 1], -1 inside a character.
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
    """Decodes token ids.

    Args:
      ids: int [n], each below `size`.
      show_special: write special ids as their names, mode tokens as [R], [S]
        and [X]; otherwise they are omitted.
      start: whether the ids start a text; False if they follow other ids. Some
        tokenizers prepend a space to every text (Llama 2), which decoding
        removes at the start.

    Raises:
      ValueError: an id is not below `size`.
    """
    ids = [int(i) for i in ids]
    for i in ids:
      if not 0 <= i < self.size:
        raise ValueError(
          f'token id {i} is not below the size {self.size} of {self.path!r}'
        )
    modes = {token: f'[{mode}]' for mode, token in self.mode_ids.items()}
    # Runs of ordinary ids are decoded together, since a character may span
    # several byte tokens. Omitted special ids do not end a run.
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

  def decode_generated(
    self, tokens: Sequence[int] | np.ndarray, *, show_special: bool = False
  ) -> str:
    """Decodes tokens generated after a prompt.

    Ids beyond the vocabulary, possible with a larger embedding table, are
    padding.
    """
    ids = [i if i < self.size else self.pad for i in tokens]
    # T5's targets are separate texts, with a prepended space.
    start = self.ids.ends_with_eos
    return self.decode(ids, show_special=show_special, start=start)

  def _loss(self) -> str:
    """Describes how encoding changes text.

    Raises:
      UserError: encoding changes more than Unicode normalisation does.
    """
    losable = _LOSABLE if self.ids.ends_with_eos else {}
    if not losable and self.decode(self.encode(_EXACT)) != _EXACT:
      raise errors.UserError(
        f'vocabulary {self.path!r} does not give back the text it encodes (it'
        ' trims or merges spaces, or lacks bytes for unknown characters); use'
        ' that of Gemma, Llama or Qwen, or train one'
      )
    changes = [x for x in losable if self._changed(losable[x]) != losable[x]]
    for change, (text, becomes) in _CHANGEABLE.items():
      if (changed := self._changed(text)) != text:
        others = 'changes other characters'
        changes.append(change if changed == becomes else others)
    return ' and '.join(dict.fromkeys(changes))

  def _changed(self, text: str) -> str:
    return self.decode(self.encode(text))

  @abc.abstractmethod
  def _piece(self, token: int) -> str:
    """Returns the name of a stored id; '' at a gap."""

  @abc.abstractmethod
  def _bytes_of(self, token: int) -> bytes:
    """Returns the bytes of an ordinary id."""

  @abc.abstractmethod
  def _encode(self, text: str) -> Sequence[int] | np.ndarray:
    """Encodes a text without lone surrogates."""

  @abc.abstractmethod
  def _encode_with_boundaries(
    self, text: str
  ) -> tuple[Sequence[int], Sequence[int]]:
    """See `encode_with_boundaries`."""

  @abc.abstractmethod
  def _decode(self, ids: list[int], *, start: bool) -> str:
    """Decodes one or more ordinary ids."""


def boundaries_of_bytes(text: str, pieces: Sequence[bytes]) -> np.ndarray:
  """Returns the boundaries of tokens from their bytes.

  Args:
    text: encoded text.
    pieces: bytes of each token, [n], which concatenate to the text.

  Returns:
    int32 [n + 1], as in `Vocabulary.encode_with_boundaries`.
  """
  data = np.frombuffer(text.encode('utf-8'), np.uint8)
  starts = (data & 0xC0) != 0x80  # First bytes of characters.
  counts = np.append(np.cumsum(starts) - starts, len(text))
  counts[:-1][~starts] = -1
  return counts[np.cumsum([0, *map(len, pieces)])]


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
  sentinels, modes = (
    [specials[name] for name in names if name in specials]
    for names in (_GEMMA_SENTINELS, _GEMMA_MODES)
  )
  # All or none: a tokenizer with only a few unused tokens has another use for
  # them, and ids would depend on their number.
  if len(sentinels) == len(_GEMMA_SENTINELS) and len(modes) == len(MODES):
    return sentinels, dict(zip(MODES, modes, strict=True))
  if extra := _numbered(_T5, specials):
    return extra, {}
  ids = _numbered(_LLAMA, specials)
  if len(ids) <= len(MODES):
    return [], {}
  return ids[: -len(MODES)], dict(zip(MODES, ids[-len(MODES) :], strict=True))


def _numbered(names: re.Pattern[str], specials: Mapping[str, int]) -> list[int]:
  found = {
    int(match[1]): i
    for name, i in specials.items()
    if (match := names.fullmatch(name))
  }
  return [found[number] for number in sorted(found)]


def _original_size(names: Mapping[int, str], size: int) -> int:
  while ADDED.fullmatch(names.get(size - 1, '')):
    size -= 1
  return size


def is_sentencepiece(start: bytes) -> bool:
  """Returns whether a tokenizer.model with this first byte is SentencePiece.

  A SentencePiece model starts with a piece, field 1 of its proto; Llama 3's
  tokenizer.model is text.
  """
  return start[:1] == b'\n'


def digest_of(*parts: Any) -> str:
  """Returns the hex SHA-256 of JSON values."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
