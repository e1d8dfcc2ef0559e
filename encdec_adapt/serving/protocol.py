"""Requests, responses and errors in the shapes of OpenAI's API.

Every field that changes the result is either supported or refused. This module
knows neither HTTP nor the engine's thread.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import secrets
import time
from typing import Any

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.inference import sampling as sampling_lib
from encdec_adapt.tokenizers import chat_format, vocabulary

_MOST = 2**31 - 1  # Options are int32 on the devices.


class ApiError(Exception):
  """A refused or failed request; becomes an OpenAI-shaped error."""

  def __init__(self, status: int, message: str, param: str | None = None):
    super().__init__(message)
    self.status, self.param = status, param

  @property
  def body(self) -> dict[str, Any]:
    """Body of the response."""
    kind = 'invalid_request_error' if self.status < 500 else 'server_error'
    if self.status == 429:
      kind = 'rate_limit_error'
    error = {'message': str(self), 'type': kind, 'param': self.param}
    return {'error': {**error, 'code': None}}


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a request.

  Attributes:
    max_prompt: most tokens of a prompt, BOS included.
    max_tokens: most tokens to generate.
    context: most tokens of prompt and continuation together; None for any.
  """

  max_prompt: int
  max_tokens: int
  context: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """A parsed request.

  Attributes:
    request: what the engine is asked.
    is_chat: whether it came to /v1/chat/completions.
    stream: whether the text is sent as it is generated.
    include_usage: whether a stream ends with the numbers of tokens.
  """

  request: engine_lib.Request
  is_chat: bool
  stream: bool
  include_usage: bool


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
  return type(value) is int and 1 <= value <= _MOST


def _is_stop(value: Any) -> bool:
  texts = [value] if isinstance(value, str) else value
  return isinstance(texts, list) and all(
    isinstance(text, str) and text for text in texts
  )


def _is_prompt(value: Any) -> bool:
  if isinstance(value, list) and value:
    return all(type(i) is int and 0 <= i <= _MOST for i in value)
  return isinstance(value, str) and bool(value)


_COUNT = (_is_count, 'an integer of at least 1')
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
  'max_tokens': _COUNT,
  'max_completion_tokens': _COUNT,
  'temperature': (_is_number, 'a number'),
  'top_p': (_is_number, 'a number'),
  'min_p': (_is_number, 'a number'),
  'top_k': _COUNT,
  'seed': (lambda value: type(value) is int, 'an integer'),
  'stop': (_is_stop, 'a text or a list of texts, none empty'),
  'stream': (lambda value: isinstance(value, bool), 'true or false'),
  'stream_options': (
    lambda value: (
      isinstance(value, dict)
      and value.keys() <= {'include_usage'}
      and all(isinstance(x, bool) for x in value.values())
    ),
    'an object with "include_usage" (true or false)',
  ),
}
_PROMPT = (_is_prompt, 'a text or a list of token ids, not empty')
_MESSAGES = (lambda value: isinstance(value, list), 'a list of messages')
# Supported with one value only, which changes nothing.
_NEUTRAL = {
  'n': 1,
  'best_of': 1,
  'presence_penalty': 0,
  'frequency_penalty': 0,
  'logit_bias': {},
  'logprobs': False,
  'echo': False,
  'suffix': '',
  'tools': [],
  'response_format': {'type': 'text'},
}
_HARMLESS = {'model', 'user', 'metadata', 'store'}


def parse(
  content: bytes,
  *,
  is_chat: bool,
  limits: Limits,
  reader: vocabulary.Vocabulary,
) -> Call:
  """Parses and encodes the body of a request.

  Args:
    content: the body.
    is_chat: whether it has messages instead of a prompt.
    limits: limits of prompt and continuation.
    reader: vocabulary of the stack that reads prompts.

  Raises:
    ApiError: the request is malformed or beyond the limits; names the field.
  """
  given = _fields(content, 'messages' if is_chat else 'prompt')
  prompt = _encode(given, is_chat, reader)
  name = 'max_completion_tokens'
  if name not in given:
    name = 'max_tokens'
  most = given.get(name)
  if most is None:
    most = limits.max_tokens if is_chat else min(16, limits.max_tokens)
    if is_chat and limits.context:
      most = max(1, min(most, limits.context - len(prompt)))
  field = 'messages' if is_chat else 'prompt'
  for number, limit, of in (
    (len(prompt), limits.max_prompt, field),
    (most, limits.max_tokens, name),
    (len(prompt) + most, limits.context or _MOST, field),
  ):
    if number > limit:
      raise ApiError(
        400, f'{of}: {number} tokens are asked for; at most {limit} fit.', of
      )
  stop = given.get('stop') or ()
  try:
    request = engine_lib.Request(
      prompt,
      most,
      _sampling(given),
      (stop,) if isinstance(stop, str) else tuple(stop),
    )
  except errors.UserError as error:
    first = str(error).split()[0]
    raise ApiError(400, str(error), first if first in given else None) from None
  return Call(
    request,
    is_chat,
    given.get('stream', False),
    given.get('stream_options', {}).get('include_usage', False),
  )


def _fields(content: bytes, prompt: str) -> dict[str, Any]:
  """Returns the fields of a body that are not null, checked one by one."""
  try:
    body = json.loads(content, parse_constant=_refuse_constant)
  except (ValueError, RecursionError) as error:
    raise ApiError(400, f'the body is not JSON ({error}).') from None
  if not isinstance(body, dict):
    raise ApiError(400, 'the body must be a JSON object.')
  checks = _FIELDS | {prompt: _PROMPT if prompt == 'prompt' else _MESSAGES}
  given = {name: value for name, value in body.items() if value is not None}
  if prompt not in given:
    raise ApiError(400, f'{prompt} is missing; it is required.', prompt)
  for name, value in given.items():
    shown = json.dumps(value)[:80]
    if name in checks:
      check, words = checks[name]
      if not check(value):
        raise ApiError(400, f'{name} is {shown}; it must be {words}.', name)
    elif name in _NEUTRAL:
      only = _NEUTRAL[name]
      if value != only or isinstance(value, bool) != isinstance(only, bool):
        raise ApiError(
          400, f'{name} is {shown}; only {json.dumps(only)} is supported.', name
        )
    elif name not in _HARMLESS:
      raise ApiError(
        400, f'{name} ({shown}) is not supported; leave it out.', name
      )
  return given


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON number')


def _encode(
  given: Mapping[str, Any], is_chat: bool, reader: vocabulary.Vocabulary
) -> np.ndarray:
  """Returns the token ids of the prompt, BOS first, int32 [n]."""
  field = 'messages' if is_chat else 'prompt'
  try:
    if is_chat:
      ids = chat_format.encode(given[field], reader, open_turn=True).ids
    elif isinstance(given[field], str):
      ids = reader.encode(given[field])
    else:
      ids = np.array(given[field], np.int32)
      ids = ids[1:] if ids[0] == reader.bos else ids
  except errors.UserError as error:
    raise ApiError(400, f'{field}: {error}', field) from None
  return np.array([reader.bos, *ids], np.int32)


def _sampling(given: Mapping[str, Any]) -> sampling_lib.SamplingConfig:
  """Returns how tokens are chosen; temperature 1 by default, as OpenAI's."""
  try:
    heat, top_p, min_p = (
      None if given.get(name) is None else float(given[name])
      for name in ('temperature', 'top_p', 'min_p')
    )
  except OverflowError:
    raise ApiError(400, 'a number is too large for the request.') from None
  drawn = sampling_lib.SamplingConfig(
    heat or 1.0,
    given.get('top_k'),
    None if top_p == 1 else top_p,
    min_p or None,
    seed=given.get('seed', secrets.randbits(32)),
  )
  # Filters change nothing at temperature 0, but are checked all the same.
  return sampling_lib.SamplingConfig() if heat == 0 else drawn


class Replies:
  """Bodies of the responses to one call."""

  def __init__(self, call: Call, model: str):
    """Gives the response an id.

    Args:
      call: the request.
      model: name of the model.
    """
    self._call = call
    kind = 'chat.completion' if call.is_chat else 'text_completion'
    prefix = 'chatcmpl' if call.is_chat else 'cmpl'
    self._head = {
      'id': f'{prefix}-{secrets.token_hex(12)}',
      'object': kind,
      'created': int(time.time()),
      'model': model,
    }

  def whole(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the body of a response that is not streamed."""
    message = {'message': {'role': 'assistant', 'content': completion.text}}
    said = message if self._call.is_chat else {'text': completion.text}
    return {
      **self._head,
      'choices': [_choice(said, completion.ended)],
      'usage': self._usage(completion),
    }

  def chunk(
    self, text: str, ended: str | None = None, *, first: bool = False
  ) -> dict[str, Any]:
    """Returns an event of a stream.

    Args:
      text: new text.
      ended: why the completion ended; None before that.
      first: whether it is the first event, which names the role.
    """
    delta = {'role': 'assistant'} if first else {}
    said = {'delta': {**delta, 'content': text}}
    head = self._head
    if self._call.is_chat:
      head = {**head, 'object': 'chat.completion.chunk'}
    said = said if self._call.is_chat else {'text': text}
    return {**head, 'choices': [_choice(said, ended)]}

  def usage(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the event with the numbers of tokens."""
    return {**self.chunk(''), 'choices': [], 'usage': self._usage(completion)}

  def _usage(self, completion: engine_lib.Completion) -> dict[str, int]:
    prompt, new = len(self._call.request.tokens), len(completion.tokens)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': new,
      'total_tokens': prompt + new,
    }


def _choice(said: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
  reason = 'stop' if ended == 'eos' else ended
  return {'index': 0, **said, 'logprobs': None, 'finish_reason': reason}
