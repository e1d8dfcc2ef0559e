"""OpenAI's two forms of the log-probabilities of tokens.

Uses vocabularies and the engine's values; must not depend on HTTP.
"""

from collections.abc import Sequence
import re
from typing import Any, NamedTuple

from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.tokenizers import vocabulary

_BYTE = re.compile(r'<0x([0-9A-F]{2})>')
_INCOMPLETE = '\ufffd'
_MOST_BYTES = 4  # Of a character, each of which may be a token.


class Scored(NamedTuple):
  """A token with its log-probability.

  Attributes:
    text: text of the token; the name of special tokens and bytes.
    log_prob: its log-probability; None for the first token of a prompt.
    top: the likeliest tokens in its place and their log-probabilities.
  """

  text: str
  log_prob: float | None
  top: list[tuple[str, float]]


def read(
  writer: vocabulary.Vocabulary, tokens: engine_lib.Tokens, count: int
) -> list[Scored]:
  """Returns scored tokens with the `count` likeliest in the place of each."""

  def name(token: int) -> str:
    if token >= writer.size:  # A row of padding.
      return ''
    text = writer.decode([token], show_special=True, start=False)
    return writer.piece(token) if _INCOMPLETE in text else text

  result = []
  for i, token in enumerate(tokens.tokens.tolist()):
    log_prob, top = tokens.log_probs[i].item(), []
    if log_prob != log_prob:  # NaN.
      log_prob = None
    elif count:  # Otherwise, the engine may have computed none.
      ids, values = (x[i, :count].tolist() for x in tokens.top)
      top = [*zip(map(name, ids), values, strict=True)]
    result.append(Scored(name(token), log_prob, top))
  return result


def of_chat(tokens: Sequence[Scored]) -> dict[str, Any]:
  """Returns `logprobs` of a chat completion."""

  def entry(text: str, log_prob: float) -> dict[str, Any]:
    byte = _BYTE.fullmatch(text)
    data = bytes.fromhex(byte[1]) if byte else text.encode()
    return {'token': text, 'logprob': log_prob, 'bytes': [*data]}

  content = [
    entry(*x[:2]) | {'top_logprobs': [entry(*y) for y in x.top]} for x in tokens
  ]
  return {'content': content, 'refusal': None}


def of_completion(
  tokens: Sequence[Scored], offsets: Sequence[int]
) -> dict[str, list[Any]]:
  """Returns `logprobs` of a text completion; offsets are of `Offsets`."""
  top = [{**dict(x.top[::-1]), x.text: x.log_prob} for x in tokens]
  return {
    'tokens': [x.text for x in tokens],
    'token_logprobs': [x.log_prob for x in tokens],
    'top_logprobs': [None if None in x.values() else x for x in top],
    'text_offset': [*offsets],
  }


class Offsets:
  """Offsets of tokens in a text that grows."""

  def __init__(self, writer: vocabulary.Vocabulary, *, start: bool):
    """Starts an empty text.

    Args:
      writer: vocabulary of the tokens.
      start: whether the first token starts a text (`Vocabulary.decode`).
    """
    self._writer, self._start = writer, start
    self._run, self._length = [], 0

  def add(self, token: int) -> int:
    """Appends a token and returns its offset in characters."""
    offset, self._run = self._length, [*self._run, token]
    ids = [i for i in self._run if i < self._writer.size]
    text = self._writer.decode(ids, start=self._start)
    # The tokens of a character share its offset.
    if not text.endswith(_INCOMPLETE) or len(self._run) == _MOST_BYTES:
      self._length += len(text)
      self._start, self._run = self._start and not text, []
    return offset
