"""The byte vocabulary: a token for every byte of UTF-8.

| ids        | tokens                                   |
|------------|------------------------------------------|
| 0 .. 255   | <0x00> .. <0xFF>                         |
| 256 .. 259 | <pad> <eos> <bos> <mask>                 |
| 260 .. 358 | <unused0> .. <unused98>, as in Gemma     |

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from encdec_adapt.tokenizers import vocabulary

NAME = 'bytes'
_SPECIALS = ('<pad>', '<eos>', '<bos>', '<mask>') + tuple(
  f'<unused{i}>' for i in range(99)
)


class ByteVocabulary(vocabulary.Vocabulary):
  """Bytes and special tokens, without files."""

  def __init__(self, *, added_sentinels: int = 0):
    """Makes the vocabulary; see `vocabulary.Vocabulary`."""
    specials = {name: 256 + i for i, name in enumerate(_SPECIALS)}
    # The first four names, without brackets, are those of `vocabulary.ROLES`.
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
    return f'<0x{token:02X}>' if token < 256 else _SPECIALS[token - 256]

  def _encode(self, text):
    return list(text.encode('utf-8'))

  def _encode_with_boundaries(self, text):
    data = text.encode('utf-8')
    return list(data), vocabulary.boundaries_of_bytes(text, [b'.'] * len(data))

  def _decode(self, ids, *, start):
    del start
    # A model may write bytes that are not UTF-8, so errors are replaced.
    return bytes(ids).decode('utf-8', 'replace')
