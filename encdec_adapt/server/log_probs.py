"""OpenAI's two forms of the log-probabilities of tokens.

Uses vocabularies and the engine's values; must not depend on HTTP.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.tokenizers import vocabulary

_INCOMPLETE = '\ufffd'
_MOST_BYTES = 4  # Of a character, each of which may be a token.


class Scored(NamedTuple):
  """A token with its log-probability.

  Attributes:
    data: bytes of the token (`Vocabulary.bytes_of`).
    log_prob: its log-probability; None for the first token of a prompt.
    top: the likeliest tokens in its place and their log-probabilities.
  """

  data: bytes
  log_prob: float | None
  top: list[tuple[bytes, float]]


def read(
  writer: vocabulary.Vocabulary, tokens: engine_lib.Tokens, count: int
) -> list[Scored]:
  """Returns scored tokens with the `count` likeliest in the place of each."""

  def data(token: int) -> bytes:
    # Rows of padding have no bytes.
    return writer.bytes_of(token) if token < writer.size else b''

  result = []
  for i, token in enumerate(tokens.tokens.tolist()):
    log_prob, top = tokens.log_probs[i].item(), []
    if log_prob != log_prob:  # NaN.
      log_prob = None
    elif count:  # Otherwise, the engine may have computed none.
      ids, values = (x[i, :count].tolist() for x in tokens.top)
      top = [*zip(map(data, ids), values, strict=True)]
    result.append(Scored(data(token), log_prob, top))
  return result


def _text(data: bytes) -> str:
  # As in OpenAI's API: \x9f for a byte of an incomplete character.
  return data.decode('utf-8', 'backslashreplace')


def of_chat(tokens: Sequence[Scored]) -> dict[str, Any]:
  """Returns `logprobs` of a chat completion."""

  def entry(data: bytes, log_prob: float) -> dict[str, Any]:
    return {'token': _text(data), 'logprob': log_prob, 'bytes': [*data]}

  content = [
    entry(*x[:2]) | {'top_logprobs': [entry(*y) for y in x.top]} for x in tokens
  ]
  return {'content': content, 'refusal': None}


def _top(token: Scored) -> dict[str, float] | None:
  if token.log_prob is None:
    return None
  # Of likeliest tokens with equal texts, the likelier one is reported.
  top = {_text(data): value for data, value in [*token.top[::-1], token[:2]]}
  return dict(sorted(top.items(), key=lambda x: -x[1]))


def of_completion(
  tokens: Sequence[Scored], offsets: Sequence[int]
) -> dict[str, list[Any]]:
  """Returns `logprobs` of a text completion; offsets are of `Offsets`."""
  return {
    'tokens': [_text(x.data) for x in tokens],
    'token_logprobs': [x.log_prob for x in tokens],
    'top_logprobs': [*map(_top, tokens)],
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
