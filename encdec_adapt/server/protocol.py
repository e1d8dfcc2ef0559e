"""OpenAI-compatible requests, responses and errors.

A field is supported, ignored because it has no effect, or refused. This module
must not import the HTTP application or the engine's thread.
"""

from collections.abc import Callable, Mapping, Sequence
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
from encdec_adapt.server import log_probs
from encdec_adapt.tokenizers import vocabulary

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
    rows: maximum choices of a prompt.
    context: maximum tokens of prompt plus continuation; None for no limit.
  """

  max_prompt: int
  max_tokens: int
  rows: int
  context: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """A parsed request.

  Attributes:
    requests: requests for the engine: `n` for each prompt, in order.
    n: number of choices of a prompt.
    is_chat: whether the endpoint is /v1/chat/completions.
    stream: whether to stream the text.
    include_usage: whether a stream ends with token counts.
    log_probs: number of likeliest tokens to report beside the log-probability
      of each token; None for no log-probabilities.
    echo: text and slice of the client's tokens of the prompt of each request,
      to begin its choice with; empty for none.
  """

  requests: Sequence[engine_lib.Request]
  n: int
  is_chat: bool
  stream: bool
  include_usage: bool
  log_probs: int | None
  echo: Sequence[tuple[str, slice]]


def _is_id(value: Any) -> bool:
  # Not isinstance: bool is a subclass of int.
  return type(value) is int and 0 <= value <= _LARGEST


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value)


def is_text_or_ids(value: Any) -> bool:
  """Returns whether a value is a text or a list of ids, not empty."""
  return _is_text(value) or _are(_is_id, _LARGEST)(value)


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
_FLAG = (lambda value: isinstance(value, bool), 'true or false')
_TOP = (
  lambda value: type(value) is int and 0 <= value <= sampling_lib.MOST_TOP,
  f'an integer of 0 to {sampling_lib.MOST_TOP}',
)
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
  'max_tokens': _COUNT,
  'max_completion_tokens': _COUNT,
  'temperature': _NUMBER,
  'top_p': _NUMBER,
  'min_p': _NUMBER,
  'presence_penalty': _NUMBER,
  'frequency_penalty': _NUMBER,
  'n': _COUNT,
  'top_k': _COUNT,
  'seed': (lambda value: type(value) is int, 'an integer'),
  'stop': (
    lambda value: value == [] or _is_text(value) or _are(_is_text, 16)(value),
    'a text or a list of at most 16 texts, none empty',
  ),
  'stream': _FLAG,
  'stream_options': (lambda value: isinstance(value, dict), 'an object'),
}
_COMPLETION_FIELDS = _FIELDS | {
  'prompt': (
    lambda value: is_text_or_ids(value) or _are(is_text_or_ids, 2048)(value),
    'a text, a list of token ids, or a list of at most 2048 of those, none'
    ' empty',
  ),
  'logprobs': _TOP,
  'echo': _FLAG,
  'documents': (
    lambda value: isinstance(value, list) and len(value) > 0,
    'a list of texts, or of objects with text and title, not empty',
  ),
}
_CHAT_FIELDS = _FIELDS | {
  'messages': (lambda value: isinstance(value, list), 'a list of messages'),
  'logprobs': _FLAG,
  'top_logprobs': _TOP,
}
# Supported only with OpenAI's default value, which clients may send.
_NEUTRAL = {'best_of': 1, 'logit_bias': {}, 'tools': []}
_NEUTRAL |= {'response_format': {'type': 'text'}}
_HARMLESS = {'model', 'user', 'metadata', 'store'}


def parse(
  content: bytes,
  *,
  is_chat: bool,
  limits: Limits,
  encoders: Mapping[str, prompt_encoding.PromptEncoder],
  run_prefix: bool = False,
) -> Call:
  """Parses the body of a request and encodes its prompts.

  Args:
    content: the body.
    is_chat: whether the body has messages instead of a prompt.
    limits: limits of prompt and continuation.
    encoders: name -> prompt encoder of the model (first) and its adapters.
      `model` must be a name in it; any name is accepted without adapters.
    run_prefix: whether to add the task prefix to prompts of token ids.

  Raises:
    ApiError: the request is malformed or exceeds the limits; names the field.
  """
  field = 'messages' if is_chat else 'prompt'
  fields = _read_fields(content, field)
  first, *adapters = encoders
  model = (adapters and fields.get('model')) or first
  if model not in [first, *adapters]:
    names = ', '.join(encoders)
    raise ApiError(404, f'model is {model!r}; it must be of {names}.', 'model')
  texts = [_messages(fields[field])] if is_chat else fields[field]
  texts = [texts] if is_text_or_ids(texts) else texts
  questions = texts
  if documents := fields.get('documents'):
    if len(texts) > 1 or not isinstance(texts[0], str):
      raise ApiError(400, 'documents need one prompt of text.', 'prompt')
    if fields.get('echo'):
      raise ApiError(400, 'echo is true; documents are not echoed.', 'echo')
    field = 'documents'
    questions = [{'question': texts[0], 'documents': documents}]
  prompts = [_encode(x, field, encoders[model], run_prefix) for x in questions]
  count, top = fields.get('n', 1), fields.get('logprobs')
  if count > limits.rows:
    message = f'n is {count}; --batch_size of the server is {limits.rows}.'
    raise ApiError(400, message, 'n')
  if is_chat:
    top = fields.get('top_logprobs', 0) if top else None
    if top is None and 'top_logprobs' in fields:
      raise ApiError(400, 'top_logprobs needs logprobs.', 'top_logprobs')
  stop = fields.get('stop', ())
  stop = (stop,) if isinstance(stop, str) else tuple(stop)
  adapter = model if model in adapters else ''
  try:
    requests = [
      # Without a seed, each choice of each prompt draws another one.
      engine_lib.Request(
        tokens, max_tokens, _sampling(fields, i, top or 0), stop, adapter
      )
      for tokens in prompts
      for max_tokens in [_max_tokens(fields, tokens, field, limits)]
      for i in range(count)
    ]
  except errors.UserError as error:
    # Messages begin with the name of the option, which equals the field's.
    first = str(error).split()[0]
    param = first if first in fields else None
    raise ApiError(400, str(error), param) from None
  usage = bool(fields.get('stream_options', {}).get('include_usage'))
  echo = []
  if fields.get('echo'):
    for x in zip(texts, prompts, strict=True):
      echo += [_echo(*x, encoders[model], run_prefix)] * count
  stream = fields.get('stream', False)
  return Call(requests, count, is_chat, stream, usage, top, echo)


def _max_tokens(
  fields: Mapping[str, Any], prompt: np.ndarray, field: str, limits: Limits
) -> int:
  """Returns the tokens to generate after a prompt.

  Raises:
    ApiError: they, the prompt, or their sum exceed a limit.
  """
  name = 'max_tokens' if 'max_tokens' in fields else 'max_completion_tokens'
  max_tokens = fields.get(name)
  if max_tokens is None:
    # OpenAI's defaults: 16 for completions, and no limit for chats (here the
    # server's limit, or the rest of the context).
    is_chat = field == 'messages'
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
  return max_tokens


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
  supported = _CHAT_FIELDS if field == 'messages' else _COMPLETION_FIELDS
  for name, value in fields.items():
    fault = None
    if name in supported:
      check, requirement = supported[name]
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


def _messages(messages: list[Any]) -> list[Any]:
  """Returns messages as `chat_format` reads them: texts, without nulls."""
  result = []
  for i, message in enumerate(messages, 1):
    if isinstance(message, dict):
      # Clients send answers back, with fields that are null.
      message = {k: x for k, x in message.items() if x is not None}
      if message.get('role') == 'developer':
        message['role'] = 'system'
      if isinstance(parts := message.get('content'), list):
        message['content'] = ''.join(_part(part, i) for part in parts)
    result.append(message)
  return result


def _part(part: Any, number: int) -> str:
  """Returns the text of a part of a message."""
  part = part if isinstance(part, dict) else {'type': part}
  if part.get('type') == 'text' and isinstance(part.get('text'), str):
    return part['text']
  raise ApiError(
    400,
    f'messages: message {number} has a part of type'
    f' {json.dumps(part.get("type"))[:80]}; the model reads only parts'
    ' {"type": "text", "text": TEXT}.',
    'messages',
  )


def _encode(
  prompt: Any,
  field: str,
  encoder: prompt_encoding.PromptEncoder,
  run_prefix: bool,
) -> np.ndarray:
  """Returns framed token ids, int32 [n]."""
  try:
    if field != 'prompt' or isinstance(prompt, str):
      return encoder.encode(prompt)
  except errors.UserError as error:
    raise ApiError(400, f'{field}: {error}', field) from None
  # Clients may send token ids with or without framing.
  ids = encoder.unframed(prompt)
  if run_prefix:
    ids = [*encoder.reader.encode(encoder.prefix), *ids]
  return encoder.frame(ids)


def _echo(
  prompt: str | Sequence[int],
  tokens: np.ndarray,
  encoder: prompt_encoding.PromptEncoder,
  run_prefix: bool,
) -> tuple[str, slice]:
  """Returns the text of a prompt, and the client's part of its tokens."""
  reader, text = encoder.reader, prompt
  if not isinstance(prompt, str):
    text = reader.decode([i for i in prompt if i < reader.size])
    # A prefix comes between the client's BOS and its other tokens.
    splits = run_prefix and encoder.prefix
    count = len(encoder.unframed(prompt) if splits else prompt)
  elif encoder.prefix:  # A token may begin in the prefix.
    count = len(reader.encode(prompt))
  else:
    count = len(tokens) - len(encoder.frame([0])) + 1 if prompt else 0
  return text, encoder.span(tokens, count)


def _sampling(
  fields: Mapping[str, Any], index: int, top: int
) -> sampling_lib.SamplingConfig:
  """Returns the options of a choice; OpenAI's default temperature is 1."""
  temperature = fields.get('temperature', 1.0)
  # The first choice is that of a request for one.
  seed = fields.get('seed', secrets.randbits(32))
  drawn = sampling_lib.SamplingConfig(
    temperature or 1.0,
    fields.get('top_k'),
    fields.get('top_p'),
    # Clients send 0 for no filter.
    fields.get('min_p') or None,
    seed=sampling_lib.seed_of(seed, index) if index else seed,
    presence_penalty=fields.get('presence_penalty', 0.0),
    frequency_penalty=fields.get('frequency_penalty', 0.0),
    top_log_probs=top,
  )
  # Filters have no effect at temperature 0, but are still checked.
  greedy = {'temperature': 0.0, 'top_k': None, 'top_p': None, 'min_p': None}
  return drawn if temperature else dataclasses.replace(drawn, **greedy)


class Replies:
  """Makes the bodies of responses to a call."""

  def __init__(self, call: Call, model: str, writer: vocabulary.Vocabulary):
    """Assigns an id, shared by all events of a stream.

    Args:
      call: the request.
      model: name of the model.
      writer: vocabulary of the generated tokens.
    """
    self._call, self._writer = call, writer
    name = 'chat.completion' if call.is_chat else 'text_completion'
    name += '.chunk' if call.is_chat and call.stream else ''
    self._head = {'id': f'cmpl-{secrets.token_hex(12)}', 'object': name}
    self._head |= {'created': int(time.time()), 'model': model}
    start = bool(call.echo) or writer.ids.ends_with_eos
    self._offsets = [
      log_probs.Offsets(writer, start=start) for _ in call.requests
    ]

  def body(
    self,
    choices: Sequence[dict[str, Any]],
    completions: Sequence[engine_lib.Completion] = (),
  ) -> dict[str, Any]:
    """Returns a response or an event; with token counts of completions."""
    body = {**self._head, 'choices': choices}
    if completions:
      call = self._call
      prompt = sum(len(x.tokens) for x in call.requests[:: call.n])
      new = sum(len(x.tokens) for x in completions)
      counts = {'prompt_tokens': prompt, 'completion_tokens': new}
      body['usage'] = {**counts, 'total_tokens': prompt + new}
    return body

  def choice(
    self,
    index: int,
    text: str,
    parts: Sequence[engine_lib.Tokens],
    ended: str | None,
    is_first: bool,
  ) -> dict[str, Any]:
    """Returns a choice, or an event's part of it.

    Args:
      index: index of the choice.
      text: new text.
      parts: new tokens; the first part is of the prompt if its text is echoed
        and it was scored.
      ended: reason of the completion's end; None before the end.
      is_first: whether this is the first part, with the role or the echo.
    """
    call = self._call
    if call.is_chat:
      content = {'role': 'assistant'} if is_first else {}
      content |= {'content': text}
      content = {'delta' if call.stream else 'message': content}
    else:
      echo = call.echo[index][0] if call.echo and is_first else ''
      content = {'text': echo + text}
    values, tokens = None, []
    if call.log_probs is not None and parts:
      for part in parts:
        tokens += log_probs.read(self._writer, part, call.log_probs)
      values = log_probs.of_chat(tokens)
      if not call.is_chat:
        ids = np.concatenate([x.tokens for x in parts]).tolist()
        offsets = map(self._offsets[index].add, ids)
        values = log_probs.of_completion(tokens, offsets)
    # OpenAI uses the same reason for EOS and for a stop string.
    reason = 'stop' if ended == 'eos' else ended
    content |= {'logprobs': values, 'finish_reason': reason}
    return {'index': index, **content}
