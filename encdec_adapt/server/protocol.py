"""OpenAI-compatible requests, responses and errors.

A field is supported, ignored because it has no effect, or refused. This module
must not import the HTTP application or the engine's thread.
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
  """A refused or failed request, in the form of an OpenAI error."""

  def __init__(self, status: int, message: str, param: str | None = None):
    super().__init__(message)
    self.status, self.param = status, param

  @property
  def body(self) -> dict[str, Any]:
    """Body of the response."""
    name = 'invalid_request_error' if self.status < 500 else 'server_error'
    if self.status == 429:
      name = 'rate_limit_error'
    error = {'message': str(self), 'type': name, 'param': self.param}
    return {'error': {**error, 'code': None}}


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a request.

  Attributes:
    max_prompt: maximum tokens of a prompt, including BOS.
    max_tokens: maximum tokens to generate.
    context: maximum tokens of prompt plus continuation; None for no limit.
  """

  max_prompt: int
  max_tokens: int
  context: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """A parsed request.

  Attributes:
    request: prompt and options for the engine.
    is_chat: whether the endpoint is /v1/chat/completions.
    stream: whether to stream the text.
    include_usage: whether a stream ends with token counts.
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
# Python's JSON accepts NaN and infinity, which fail the comparison.
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
# Supported only with OpenAI's default value, which clients may send.
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
    is_chat: whether the body has messages instead of a prompt.
    limits: limits of prompt and continuation.
    prompts: name -> prompt encoder of the model (first) and its adapters.
      `model` must be a name in it; any name is accepted without adapters.
    run_prefix: whether to add the task prefix to a prompt of token ids.

  Raises:
    ApiError: the request is malformed or exceeds the limits; names the field.
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
    # OpenAI's defaults: 16 for completions, and no limit for chats (here the
    # server's limit, or the rest of the context).
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
    # Messages begin with the name of the option, which equals the field's.
    first = str(error).split()[0]
    param = first if first in fields else None
    raise ApiError(400, str(error), param) from None
  usage = bool(fields.get('stream_options', {}).get('include_usage'))
  return Call(request, is_chat, fields.get('stream', False), usage)


def parse_object(content: bytes) -> dict[str, Any]:
  """Returns the non-null fields of a body.

  Raises:
    ApiError: the body is not a JSON object.
  """
  try:
    body = json.loads(content)
  # Deeply nested lists overflow the parser's stack.
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
      # Compare types too, as 0 equals False.
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
  # Clients may send token ids with or without framing.
  ids = prompts.unframed(prompt)
  if run_prefix:
    ids = [*prompts.reader.encode(prompts.prefix), *ids]
  return prompts.frame(ids)


def _sampling(fields: Mapping[str, Any]) -> sampling_lib.SamplingConfig:
  """Returns the sampling options; OpenAI's default temperature is 1."""
  temperature = fields.get('temperature', 1.0)
  drawn = sampling_lib.SamplingConfig(
    temperature or 1.0,
    fields.get('top_k'),
    fields.get('top_p'),
    # Clients send 0 for no filter.
    fields.get('min_p') or None,
    seed=fields.get('seed', secrets.randbits(32)),
  )
  # Filters have no effect at temperature 0, but are still checked.
  return drawn if temperature else sampling_lib.SamplingConfig()


class Replies:
  """Makes the bodies of responses to a call."""

  def __init__(self, call: Call, model: str):
    """Assigns an id, shared by all events of a stream.

    Args:
      call: the request.
      model: name of the model.
    """
    self._call = call
    name = 'chat.completion' if call.is_chat else 'text_completion'
    name += '.chunk' if call.is_chat and call.stream else ''
    self._head = {'id': f'cmpl-{secrets.token_hex(12)}', 'object': name}
    self._head |= {'created': int(time.time()), 'model': model}

  def body(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the body of a non-streaming response."""
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
      ended: reason of the completion's end; None before the end.
      first: whether this is the first event, which has the role.
    """
    content = {'text': text}
    if self._call.is_chat:
      role = {'role': 'assistant'} if first else {}
      content = {'delta': {**role, 'content': text}}
    return {**self._head, 'choices': [_choice(content, ended)]}

  def usage(self, completion: engine_lib.Completion) -> dict[str, Any]:
    """Returns the event with token counts."""
    return {**self._head, 'choices': [], 'usage': self._usage(completion)}

  def _usage(self, completion: engine_lib.Completion) -> dict[str, int]:
    prompt, new = len(self._call.request.tokens), len(completion.tokens)
    counts = {'prompt_tokens': prompt, 'completion_tokens': new}
    return {**counts, 'total_tokens': prompt + new}


def _choice(content: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
  # OpenAI uses the same reason for EOS and for a stop string.
  reason = 'stop' if ended == 'eos' else ended
  return {'index': 0, **content, 'logprobs': None, 'finish_reason': reason}
