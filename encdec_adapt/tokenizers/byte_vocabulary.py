"""Byte vocabularies: one token per UTF-8 byte. Ours:

| ids        | tokens                                   |
|------------|------------------------------------------|
| 0 .. 255   | <0x00> .. <0xFF>                         |
| 256 .. 259 | <pad> <eos> <bos> <mask>                 |
| 260 .. 358 | <unused0> .. <unused98>, as in Gemma     |

ByT5's:

| ids        | tokens                                                      |
|------------|-------------------------------------------------------------|
| 0 .. 2     | <pad> </s> <unk>                                            |
| 3 .. 258   | <0x00> .. <0xFF>                                            |
| 259 .. 383 | <extra_id_0> .. of its tokenizer in transformers, which it  |
|            | was not pretrained with                                     |

ByT5's sentinels are the last 100 bytes, 258 downwards, as in its pretraining
(arXiv:2105.13626, section 3.1). The first eleven never occur in UTF-8 and are
named <extra_id_0> to <extra_id_10>; the others occur in non-ASCII characters.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence

import numpy as np

from encdec_adapt.files import paths
from encdec_adapt.tokenizers import vocabulary

NAME, BYT5 = 'bytes', 'byt5'
BYT5_CLASS = 'ByT5Tokenizer'  # In transformers.
_BYT5_SPECIALS = ('<pad>', '</s>', '<unk>')
_BYT5_EXTRA, _BYT5_SENTINELS = 125, 100
_SPECIALS = ('<pad>', '<eos>', '<bos>', '<mask>') + tuple(
  f'<unused{i}>' for i in range(99)
)


class _Bytes(vocabulary.Vocabulary):
  """A token for each byte, and no files.

  Attributes:
    first: id of byte 0.
  """

  is_of_bytes = True
  first = 0

  def _piece(self, token):
    return f'<0x{token - self.first:02X}>'

  def _bytes_of(self, token):
    return bytes([token - self.first])

  def _encode(self, text):
    data = np.frombuffer(text.encode('utf-8'), np.uint8)
    return data + np.int32(self.first)

  def _encode_with_boundaries(self, text):
    ids = self._encode(text)
    return ids, vocabulary.boundaries_of_bytes(text, [b'.'] * len(ids))

  def _decode(self, ids, *, start):
    del start
    # A model may generate invalid UTF-8, so errors are replaced.
    return b''.join(map(self._bytes_of, ids)).decode('utf-8', 'replace')


class ByteVocabulary(_Bytes):
  """Bytes and special tokens, without files."""

  def __init__(self, *, added_sentinels: int = 0):
    """Makes the vocabulary; see `vocabulary.Vocabulary`."""
    specials = {name: 256 + i for i, name in enumerate(_SPECIALS)}
    # The first four names, without brackets, are roles.
    roles = {name[1:-1]: specials[name] for name in _SPECIALS[:4]}
    super().__init__(
      NAME,
      vocabulary.digest_of(NAME, specials),
      256 + len(specials),
      specials,
      roles,
      added_sentinels=added_sentinels,
    )

  def _piece(self, token):
    return super()._piece(token) if token < 256 else _SPECIALS[token - 256]


class ByT5Vocabulary(_Bytes):
  """ByT5's bytes, special tokens and sentinels."""

  first = len(_BYT5_SPECIALS)

  def __init__(
    self, *, files: Sequence[paths.Path] = (), added_sentinels: int = 0
  ):
    """Makes the vocabulary; see `vocabulary.Vocabulary`."""
    specials = {name: i for i, name in enumerate(_BYT5_SPECIALS)}
    roles = {'pad': 0, 'bos': 0, 'eos': 1, 'unk': 2}
    end = self.first + 256  # Of the bytes.
    specials |= {f'<extra_id_{i}>': end + i for i in range(_BYT5_EXTRA)}
    super().__init__(
      str(files[0]) if files else BYT5,
      vocabulary.digest_of(BYT5, specials),
      end + _BYT5_EXTRA,
      specials,
      roles,
      files=files,
      added_sentinels=added_sentinels,
      edges=((), (roles['eos'],)),
    )
    # Bytes that never occur in UTF-8 serve only as sentinels.
    self._names |= {
      i: name
      for name, i in self.sentinel_names.items()
      if i - self.first >= 0xF5
    }

  @property
  def sentinel_names(self):
    # `piece` names bytes that occur in text by value, not as sentinels.
    count = _BYT5_SENTINELS  # Added sentinels follow.
    names = {f'<extra_id_{n}>': self.sentinels[n] for n in range(count)}
    return names | {self.piece(i): i for i in self.sentinels[count:]}

  def _find_sentinels(self):
    last = self.first + 255
    return [last - i for i in range(_BYT5_SENTINELS)], {}
