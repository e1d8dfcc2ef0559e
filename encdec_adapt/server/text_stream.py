"""Incremental detokenization of a continuation.

Uses vocabularies; must not depend on the engine or HTTP.
"""

from collections.abc import Callable, Sequence
import re

import numpy as np

from encdec_adapt.tokenizers import vocabulary

_BYTE = re.compile(r'<0x[0-9A-F]{2}>')
_INCOMPLETE = '\ufffd'


class TextStream:
  """Decodes tokens to text that later tokens cannot change.

  Holds back bytes of an incomplete character, and text that may begin a stop
  string.
  """

  def __init__(
    self,
    writer: vocabulary.Vocabulary,
    decode: Callable[[np.ndarray], str],
    stop: Sequence[str],
  ):
    """Starts an empty text.

    Args:
      writer: vocabulary of the tokens.
      decode: decodes all tokens, like the engine.
      stop: stop strings.
    """
    self._writer, self._decode, self._stop = writer, decode, stop
    self._special = set(writer.specials.values())
    self._tokens: list[int] = []
    self._sent = ''

  def add(self, tokens: np.ndarray) -> str:
    """Adds tokens [n]; returns the new final text."""
    self._tokens += tokens.tolist()
    # Decode all tokens each time, like the engine: the text of a token depends
    # on its predecessors. Ids of padding rows are not tokens.
    plain = [
      token
      for token in self._tokens
      if token < self._writer.size and token not in self._special
    ]
    # Hold back trailing byte tokens, which are decoded together: the end of a
    # run may change its start.
    if not self._writer.is_of_bytes:
      while plain and _BYTE.fullmatch(self._writer.piece(plain[-1])):
        plain.pop()
    text = self._decode(np.array(plain, np.int32)) if plain else ''
    return self.send(self._certain(text.rstrip(_INCOMPLETE)))

  def send(self, text: str) -> str:
    """Returns the unsent part of a text, and marks it as sent."""
    # Sent text cannot be retracted.
    if not text.startswith(self._sent):
      return ''
    new, self._sent = text[len(self._sent) :], text
    return new

  def _certain(self, text: str) -> str:
    """Returns a text up to a stop string or its possible start."""
    ends = [text.find(stop) for stop in self._stop if stop in text]
    for stop in self._stop:
      ends += [
        len(text) - n
        for n in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:n])
      ]
    return text[: min(ends, default=len(text))]
