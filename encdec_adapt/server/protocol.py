"""Requests, responses and errors in the shapes of OpenAI's API.

A field is supported, known to change nothing, or refused. This module imports
neither the HTTP application nor the engine's thread.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import secrets
import time
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.inference import sampling as sampling_lib

_LARGEST = 2**31 - 1  # Options are int32 on the devices.


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
    request: prompt and options for the engine.
    is_chat: whether it came to /v1/chat/completions.
    stream: whether the text is sent as it is generated.
    include_usage: whether a stream ends with the numbers of tokens.
  """

  request: engine_lib.Request
  is_chat: bool
  stream: bool
  include_usage: bool


def _is_id(value: Any) -> bool:
  # Not isinstance: bool is a subclass of int.
  return type(value) is int and 0 <= value <= _LARGEST


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value)


def _are(check: Callable[[Any], bool], limit: int) -> Callable[[Any], bool]:
  return lambda value: (
    isinstance(value, list)
    and 0 < len(value) <= limit
    and all(map(check, value))
  )


_COUNT = (
  lambda value: type(value) is int and 1 <= value <= _LARGEST,
  'an integer of at least 1',
)
# Python's JSON has NaN and infinity, for which the comparison is false.
_NUMBER = (
  lambda value: type(value) in (int, float) and abs(value) <= _LARGEST,
  'a number',
)
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
  'prompt': (
    lambda value: _is_text(value) or _are(_is_id, _LARGEST)(value),
    'a text or a list of token ids, not empty',
  ),
  'messages': (lambda value: isinstance(value, list), 'a list of messages'),
  'max_tokens': _COUNT,
  'max_completion_tokens': _COUNT,
  'temperature': _NUMBER,
  'top_p': _NUMBER,
  'min_p': _NUMBER,
  'top_k': _COUNT,
  'seed': (lambda value: type(value) is int, 'an integer'),
  'stop': (
    lambda value: value == [] or _is_text(value) or _are(_is_text, 16)(value),
    'a text or a list of at most 16 texts, none empty',
  ),
  'stream': (lambda value: isinstance(value, bool), 'true or false'),
  'stream_options': (lambda value: isinstance(value, dict), 'an object'),
}
# Supported with a single value only, OpenAI's default, which clients may send.
_NEUTRAL = {'n': 1, 'presence_penalty': 0, 'frequency_penalty': 0}
_NEUTRAL |= {'logprobs': False}
_HARMLESS = {'model', 'user', 'metadata', 'store'}


def parse(
  content: bytes,
  *,
  is_chat: bool,
  limits: Limits,
  prompts: Mapping[str, prompt_encoding.PromptEncoder],
  run_prefix: bool = False,
) -> Call:
  """Parses and encodes the body of a request.

  Args:
    content: the body.
    is_chat: whether it has messages instead of a prompt.
    limits: limits of prompt and continuation.
    prompts: encoders of the prompts of the model, which comes first, and of
      its adapters, by the names that `model` has to be one of; without
      adapters any name is accepted.
    run_prefix: whether a prompt of token ids gets the task prefix, too.

  Raises:
    ApiError: the request is malformed or beyond the limits; names the field.
  """
  field = 'messages' if is_chat else 'prompt'
  fields = _read_fields(content, field)
  first, *adapters = prompts
  model = (adapters and fields.get('model')) or first
  if model not in [first, *adapters]:
    names = ', '.join(prompts)
    raise ApiError(404, f'model is {model!r}; it must be of {names}.', 'model')
  prompt = _encode(fields[field], field, prompts[model], run_prefix)
  name = 'max_tokens' if 'max_tokens' in fields else 'max_completion_tokens'
  max_tokens = fields.get(name)
  if max_tokens is None:
    # OpenAI's defaults: 16 for completions, and no limit for chats, which here
    # means the server's, or the room in the context.
    max_tokens = limits.max_tokens if is_chat else min(16, limits.max_tokens)
    if is_chat and limits.context:
      max_tokens = max(1, min(max_tokens, limits.context - len(prompt)))
  for number, limit, of in (
    (len(prompt), limits.max_prompt, field),
    (max_tokens, limits.max_tokens, name),
    (len(prompt) + max_tokens, limits.context or _LARGEST, field),
  ):
    if number > limit:
      raise ApiError(
        400, f'{of}: {number} tokens are asked for; at most {limit} fit.', of
      )
  stop = fields.get('stop', ())
  stop = (stop,) if isinstance(stop, str) else tuple(stop)
  try:
    request = engine_lib.Request(
      prompt,
      max_tokens,
      _sampling(fields),
      stop,
      model if model in adapters else '',
    )
  except errors.UserError as error:
    # A message about an option begins with its name, which is the field's.
    first = str(error).split()[0]
    param = first if first in fields else None
    raise ApiError(400, str(error), param) from None
  usage = bool(fields.get('stream_options', {}).get('include_usage'))
  return Call(request, is_chat, fields.get('stream', False), usage)


def parse_object(content: bytes) -> dict[str, Any]:
  """Returns the fields of a body that are not null.

  Raises:
    ApiError: the body is not a JSON object.
  """
  try:
    body = json.loads(content)
  # Deeply nested lists exhaust the stack of the parser.
  except (ValueError, RecursionError) as error:
    raise ApiError(400, f'the body is not JSON ({error}).') from None
  if not isinstance(body, dict):
    raise ApiError(400, 'the body must be a JSON object.')
  return {name: value for name, value in body.items() if value is not None}


def _read_fields(content: bytes, field: str) -> dict[str, Any]:
  fields = parse_object(content)
  if field not in fields:
    raise ApiError(400, f'{field} is missing; it is required.', field)
  supported = _FIELDS.keys() - {'prompt', 'messages'} | {field}
  for name, value in fields.items():
    fault = None
    if name in supported:
      check, requirement = _FIELDS[name]
      fault = None if check(value) else f'it must be {requirement}'
    elif name in _NEUTRAL:
      # Compares types too: 0 equals False in Python.
      only = _NEUTRAL[name]
      same = value == only and isinstance(value, bool) == isinstance(only, bool)
      fault = None if same else f'only {json.dumps(only)} is supported'
    elif name not in _HARMLESS:
      fault = 'the field is not supported'
    if fault:
      shown = json.dumps(value)[:80]
      raise ApiError(400, f'{name} is {shown}; {fault}.', name)
  return fields


def _encode(
  prompt: Any,
  field: str,
  prompts: prompt_encoding.PromptEncoder,
  run_prefix: bool,
) -> np.ndarray:
  """Returns the framed token ids of the prompt, int32 [n]."""
  try:
    if field == 'messages' or isinstance(prompt, str):
      return prompts.encode(prompt)
  except errors.UserError as error:
    raise ApiError(400, f'{field}: {error}', field) from None
  # Clients that encode prompts themselves may or may not frame them.
  ids = prompts.unframed(prompt)
  if run_prefix:
    ids = [*prompts.reader.encode(prompts.prefix), *ids]
  return prompts.frame(ids)


def _sampling(fields: Mapping[str, Any]) -> sampling_lib.SamplingConfig:
  """Returns the sampling options; the default temperature is OpenAI's, 1."""
  temperature = fields.get('temperature', 1.0)
  drawn = sampling_lib.SamplingConfig(
    temperature or 1.0,
    fields.get('top_k'),
    fields.get('top_p'),
    # Clients send 0 for no filter.
    fields.get('min_p') or None,
    seed=fields.get('seed', secrets.randbits(32)),
  )
  # Filters change nothing at temperature 0, but are checked all the same.
  return drawn if temperature else sampling_lib.SamplingConfig()


class Replies:
  """Bodies of the responses to a call."""

  def __init__(self, call: Call, model: str):
    """Gives the response an id, which all events of a stream share.

    Args:
      call: the request.
      model: name of the model.
    """
    self._call = call
    kind = 'chat.completion' if call.is_chat else 'text_completion'
    kind += '.chunk' if call.is_chat and call.stream else ''
    self._head = {'id': f'cmpl-{secrets.token_hex(12)}', 'object': kind}
    self._head |= {'created': int(time.time()), 'model': model}

  def body(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the body of a response that is not streamed."""
    message = {'message': {'role': 'assistant', 'content': completion.text}}
    content = message if self._call.is_chat else {'text': completion.text}
    choices = [_choice(content, completion.ended)]
    return {**self._head, 'choices': choices, 'usage': self._usage(completion)}

  def chunk(
    self, text: str, ended: str | None = None, *, first: bool = False
  ) -> dict[str, Any]:
    """Returns an event of a stream.

    Args:
      text: new text.
      ended: reason that the completion ended; None before that.
      first: whether it is the first event, which names the role.
    """
    content = {'text': text}
    if self._call.is_chat:
      role = {'role': 'assistant'} if first else {}
      content = {'delta': {**role, 'content': text}}
    return {**self._head, 'choices': [_choice(content, ended)]}

  def usage(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the event with the numbers of tokens."""
    return {**self._head, 'choices': [], 'usage': self._usage(completion)}

  def _usage(self, completion: engine_lib.Completion) -> dict[str, int]:
    prompt, new = len(self._call.request.tokens), len(completion.tokens)
    counts = {'prompt_tokens': prompt, 'completion_tokens': new}
    return {**counts, 'total_tokens': prompt + new}


def _choice(content: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
  # OpenAI's API has the same reason for EOS and for a stop string.
  reason = 'stop' if ended == 'eos' else ended
  return {'index': 0, **content, 'logprobs': None, 'finish_reason': reason}
