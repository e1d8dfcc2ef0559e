"""Text of a continuation that is still being generated.

Knows vocabularies, but neither the engine nor HTTP.
"""

from collections.abc import Callable, Sequence
import re

import numpy as np

from encdec_adapt.tokenizers import vocabulary

_BYTE = re.compile(r'<0x[0-9A-F]{2}>')
_INCOMPLETE = '\ufffd'


class TextStream:
  """Turns tokens into text that later tokens do not change.

  Held back until more tokens come: bytes of an incomplete character, and text
  that may be the beginning of a stop string.
  """

  def __init__(
    self,
    writer: vocabulary.Vocabulary,
    decode: Callable[[np.ndarray], str],
    stop: Sequence[str],
  ):
    """Starts a text.

    Args:
      writer: vocabulary of the tokens.
      decode: returns the text of all tokens, as the engine does.
      stop: texts that end the continuation.
    """
    self._writer, self._decode, self._stop = writer, decode, stop
    self._special = set(writer.specials.values())
    self._tokens: list[int] = []
    self._sent = ''

  def add(self, tokens: np.ndarray) -> str:
    """Adds tokens [n]; returns the new text that is certain."""
    self._tokens += tokens.tolist()
    # All tokens are decoded each time, as the engine does: the text of a token
    # depends on those before it. Ids that pad the table are not tokens.
    plain = [
      token
      for token in self._tokens
      if token < self._writer.size and token not in self._special
    ]
    # A run of byte tokens among pieces is decoded as a whole: its end may
    # change its start.
    if not self._writer.is_of_bytes:
      while plain and _BYTE.fullmatch(self._writer.piece(plain[-1])):
        plain.pop()
    text = self._decode(np.array(plain, np.int32)) if plain else ''
    return self.send(self._certain(text.rstrip(_INCOMPLETE)))

  def send(self, text: str) -> str:
    """Returns the part of a text that has not been sent; it counts as sent."""
    # A text that differs from the sent one cannot be taken back.
    if not text.startswith(self._sent):
      return ''
    new, self._sent = text[len(self._sent) :], text
    return new

  def _certain(self, text: str) -> str:
    """Returns a text up to a stop string or the possible start of one."""
    ends = [text.find(stop) for stop in self._stop if stop in text]
    for stop in self._stop:
      ends += [
        len(text) - n
        for n in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:n])
      ]
    return text[: min(ends, default=len(text))]
