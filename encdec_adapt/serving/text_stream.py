"""Text of a continuation that is still being generated."""

from collections.abc import Callable, Sequence
import re

import numpy as np

from encdec_adapt.tokenizers import vocabulary

_BYTE = re.compile(r'<0x[0-9A-F]{2}>')
_INCOMPLETE = '\ufffd'


class TextStream:
  """Turns tokens into text that later tokens do not change.

  Held back until more is known: bytes of an incomplete character, and text that
  may be the beginning of a stop string.
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
    known = [
      token
      for token in self._tokens
      if token < self._writer.size and token not in self._special
    ]
    # A run of byte tokens is decoded as a whole: its end may change its start.
    while known and _BYTE.fullmatch(self._writer.piece(known[-1])):
      known.pop()
    text = self._decode(np.array(known, np.int32)) if known else ''
    return self._emit(self._certain(text.rstrip(_INCOMPLETE)))

  def finish(self, text: str) -> str:
    """Returns what is left of the whole text."""
    return self._emit(text)

  def _certain(self, text: str) -> str:
    """Returns a text without what stop strings remove or may remove."""
    ends = [text.find(stop) for stop in self._stop if stop in text]
    for stop in self._stop:
      ends += [
        len(text) - n
        for n in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:n])
      ]
    return text[: min(ends, default=len(text))]

  def _emit(self, text: str) -> str:
    """Returns what a text has beyond what was sent."""
    if not text.startswith(self._sent):
      return ''
    new, self._sent = text[len(self._sent) :], text
    return new
