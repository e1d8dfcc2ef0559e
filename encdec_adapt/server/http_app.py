"""The HTTP application: endpoints, timeouts, disconnects, metrics.

Requires starlette and uvicorn.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Iterable, Mapping
import contextlib
import dataclasses
import importlib.resources
import json
import os
import socket
import sys
import time
from typing import Any

from starlette import applications, middleware, requests, responses, routing
import uvicorn
from uvicorn.protocols.http import h11_impl

from encdec_adapt.base import errors
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.server import engine_worker, origins, protocol, text_stream
from encdec_adapt.tokenizers import chat_format, vocabulary_pair

_MAX_BODY = 1 << 20  # Bytes.
_BODY_SECONDS = 30  # Timeout for receiving a body.
_STREAM = 'text/event-stream'
# Status of disconnected clients in the metrics, as in nginx; never sent.
_GONE = 499


@dataclasses.dataclass(frozen=True)
class Served:
  """Model, vocabularies and limits of a service.

  Attributes:
    name: name of the model.
    step: step of the checkpoint; None for a folder.
    opened: vocabularies.
    prompts: name -> prompt encoder of the model (first) and its adapters.
    limits: limits of a request.
    trained_on_chats: whether the model was trained on conversations.
    run_prefix: whether to add the task prefix to prompts of token ids, as to
      texts.
    max_queue: maximum number of requests waiting for a row.
    timeout: timeout of a request in seconds.
    host: address to listen on.
  """

  name: str
  step: int | None
  opened: vocabulary_pair.Opened
  prompts: Mapping[str, prompt_encoding.PromptEncoder]
  limits: protocol.Limits
  trained_on_chats: bool = False
  run_prefix: bool = False
  max_queue: int = 64
  timeout: float = 300.0
  host: str = '127.0.0.1'


class Service:
  """The endpoints.

  Attributes:
    app: the ASGI application.
    draining: whether new requests are refused.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    served: Served,
    warm_up: Iterable[Any] = (),
  ):
    """Starts the engine's thread.

    Args:
      engine: the engine, with a decoder of tokens.
      served: the model's name, vocabularies and limits.
      warm_up: see `EngineThread`.
    """
    self.thread = engine_worker.EngineThread(engine, warm_up)
    self.draining = False
    self._served, self._began = served, int(time.time())
    sides = served.opened.sides.values()
    self._chat = all(chat_format.find_template(side) for side in sides)
    self._requests: collections.Counter[int] = collections.Counter()
    self._tokens = collections.Counter(prompt=0, generated=0)
    page = importlib.resources.files(__package__).joinpath('page.html')
    self._page = page.read_text(encoding='utf-8')
    self.app = applications.Starlette(
      routes=[
        routing.Route(path, endpoint, methods=[method])
        for method, path, endpoint in (
          ('POST', '/v1/completions', self._complete),
          ('POST', '/v1/chat/completions', self._complete),
          ('GET', '/v1/models', self._models),
          ('GET', '/health', self._health),
          ('GET', '/metrics', self._metrics),
          ('GET', '/', self._show_page),
        )
      ],
      middleware=[middleware.Middleware(origins.Guard, host=served.host)],
    )

  async def _complete(self, request: requests.Request) -> responses.Response:
    try:
      call = await self._parse(request)
      events = self._events(call, request)
      # Before the response begins, as later errors cannot set a status.
      first = await anext(events)
      name = call.requests[0].adapters or self._served.name
      replies = protocol.Replies(call, name, self._served.opened.decoder)
      if call.stream:
        lines = self._stream(call, first, events, replies)
        return responses.StreamingResponse(lines, media_type=_STREAM)
      answers = [first, *[event async for event in events]]
      answers.sort(key=lambda answer: answer[0].index)
      self._requests[200] += 1
      choices = [
        replies.choice(job.index, x.text, [*job.prompt, x], x.ended, True)
        for job, x in answers
      ]
      body = replies.body(choices, [x for _, x in answers])
      return responses.JSONResponse(body)
    except protocol.ApiError as error:
      self._requests[error.status] += 1
      return refusal(error)

  async def _parse(self, request: requests.Request) -> protocol.Call:
    if self.draining:
      raise protocol.ApiError(503, 'the server is stopping.')
    content = await read_body(request)
    served, is_chat = self._served, 'chat' in request.url.path
    if is_chat and not self._chat:
      raise protocol.ApiError(400, 'the model has no chat format.')
    return protocol.parse(
      content,
      is_chat=is_chat,
      limits=served.limits,
      encoders=served.prompts,
      run_prefix=served.run_prefix,
    )

  async def _events(
    self, call: protocol.Call, request: requests.Request
  ) -> AsyncIterator[tuple[engine_worker.Job, Any]]:
    """Yields new tokens, if the call streams, and completions, with their job.

    Raises:
      ApiError: the queue is full or too short, the request timed out, the
        engine failed, or the client disconnected.
    """
    served, thread, count = self._served, self.thread, len(call.requests)
    room = thread.engine.rows + served.max_queue
    if count > room:
      bound = f'--batch_size {thread.engine.rows} + --max_queue'
      message = f'{count} answers are asked for; at most {room} fit ({bound}'
      message += f' {served.max_queue}); send fewer prompts, or a smaller n.'
      raise protocol.ApiError(400, message, 'prompt')
    # Count open requests, not the engine's load: the latest may still be in
    # its thread's queue.
    if len(thread.jobs) + count > room:
      raise protocol.ApiError(
        429,
        f'{len(thread.jobs)} answers are computed or wait, {count} are asked'
        f' for, and {room} have room; try again later, or ask for fewer.',
      )
    end = time.monotonic() + served.timeout
    spans = [x for _, x in call.echo if call.log_probs is not None]
    spans = spans or [None] * count
    jobs = thread.submit(
      call.requests, spans, n=call.n, wants_tokens=call.stream
    )
    # A client that does not read suspends this generator, and so the timeout
    # below; the timer still frees the rows.
    timer = jobs[0].loop.call_later(served.timeout, thread.release, jobs)
    # Initialize both for `finally`, which cancels them.
    new = gone = asyncio.ensure_future(_disconnected(request))
    try:
      while count:
        new = asyncio.ensure_future(jobs[0].events.get())
        await asyncio.wait(
          {new, gone},
          timeout=max(0, end - time.monotonic()),
          return_when=asyncio.FIRST_COMPLETED,
        )
        if not new.done():
          if gone.done():
            raise protocol.ApiError(_GONE, 'the client left.')
          raise protocol.ApiError(
            504, f'the request took more than {served.timeout:g} seconds.'
          )
        job, event = new.result()
        if isinstance(event, errors.UserError):
          raise protocol.ApiError(400, str(event))
        if isinstance(event, Exception):
          raise protocol.ApiError(500, 'the engine failed.')
        if isinstance(event, engine_lib.Completion):
          self._tokens['prompt'] += len(job.request.tokens)
          self._tokens['generated'] += len(event.tokens)
          count -= 1
        yield job, event
    finally:
      timer.cancel()
      new.cancel()
      gone.cancel()
      thread.release(jobs)

  async def _stream(
    self,
    call: protocol.Call,
    event: tuple[engine_worker.Job, Any],
    events: AsyncIterator[tuple[engine_worker.Job, Any]],
    replies: protocol.Replies,
  ) -> AsyncIterator[str]:
    status, begun, completions = _GONE, set(), []
    decode = self._served.opened.decoder.decode_generated
    texts = [
      text_stream.TextStream(self._served.opened.decoder, decode, x.stop)
      for x in call.requests
    ]
    async with contextlib.aclosing(events):
      try:
        while event:
          job, new = event
          text, is_first = texts[job.index], job.index not in begun
          parts, ended = [*job.prompt] if is_first else [], None
          if isinstance(new, engine_lib.Completion):
            text, ended = text.send(new.text), new.ended
            completions.append(new)
          else:
            text = text.add(new.tokens)
            parts.append(new)
          if text or is_first or ended or call.log_probs is not None:
            begun.add(job.index)
            choice = replies.choice(job.index, text, parts, ended, is_first)
            yield _line(replies.body([choice]))
          event = await anext(events, None)
        if call.include_usage:
          yield _line(replies.body([], completions))
        status = 200
      except protocol.ApiError as error:
        # The response has begun with status 200: send the error as an event.
        status = error.status
        yield _line(error.body)
      finally:
        self._requests[status] += 1
    yield 'data: [DONE]\n\n'

  async def _models(self, _: requests.Request) -> responses.Response:
    common = {'object': 'model', 'created': self._began}
    data = [{'id': name, **common} for name in self._served.prompts]
    return responses.JSONResponse({'object': 'list', 'data': data})

  async def _health(self, _: requests.Request) -> responses.Response:
    status = 'stopping' if self.draining else 'ok'
    status = 'failed' if self.thread.failed else status
    body = {'status': status, 'model': self._served.name, 'chat': self._chat}
    body['trained_on_chats'] = self._served.trained_on_chats
    body['step'] = self._served.step
    return responses.JSONResponse(body, 200 if status == 'ok' else 503)

  async def _metrics(self, _: requests.Request) -> responses.Response:
    active, waiting = self.thread.engine.load
    lines = []
    for name, label, counts in (
      ('requests_total', 'status', self._requests),
      ('tokens_total', 'kind', self._tokens),
    ):
      lines.append(f'# TYPE encdec_adapt_{name} counter')
      for key, count in sorted(counts.items()):
        lines.append(f'encdec_adapt_{name}{{{label}="{key}"}} {count}')
    gauges = {'rows': self.thread.engine.rows, 'rows_active': active}
    gauges |= {'queue_length': waiting, 'requests_open': len(self.thread.jobs)}
    for name, value in gauges.items():
      lines.append(f'# TYPE encdec_adapt_{name} gauge')
      lines.append(f'encdec_adapt_{name} {value}')
    return responses.PlainTextResponse('\n'.join(lines) + '\n')

  async def _show_page(self, _: requests.Request) -> responses.Response:
    return responses.HTMLResponse(self._page)


async def read_body(request: requests.Request) -> bytes:
  """Returns the body of a request.

  Raises:
    ApiError: the body is too long or too slow, or the client disconnected.
  """
  content = b''
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for part in request.stream():
        # Count on arrival, as chunked bodies have no declared length.
        content += part
        if len(content) > _MAX_BODY:
          raise protocol.ApiError(413, f'the limit is {_MAX_BODY} bytes.')
  except TimeoutError:
    raise protocol.ApiError(
      408, f'the body did not arrive within {_BODY_SECONDS} seconds.'
    ) from None
  except requests.ClientDisconnect:
    raise protocol.ApiError(_GONE, 'the client left.') from None
  return content


def refusal(error: protocol.ApiError) -> responses.Response:
  """Returns the response to a refused request."""
  # Escaped, as names of fields may be invalid Unicode.
  body, media_type = json.dumps(error.body), 'application/json'
  # Later bytes of the body would be read as the next request.
  headers = {'connection': 'close'} if error.status == 408 else None
  return responses.Response(body, error.status, headers, media_type)


async def _disconnected(request: requests.Request) -> None:
  """Returns when the client has disconnected."""
  while (await request.receive())['type'] != 'http.disconnect':
    pass


def _line(body: dict[str, Any]) -> str:
  return f'data: {json.dumps(body)}\n\n'


class _Protocol(h11_impl.H11Protocol):
  """HTTP/1.1 with descriptive errors."""

  def send_400_response(self, msg: str) -> None:
    """Refuses invalid HTTP, such as HTTP/1.1 without `Host`."""
    # uvicorn calls this while handling h11's exception.
    super().send_400_response(f'{msg} {sys.exc_info()[1]}\n')


class _Server(uvicorn.Server):
  """Stops after a signal, once no request is in progress."""

  service: Service

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    """Listens, and then prints the address."""
    await super().startup(sockets)
    host = self.config.host
    host = f'[{host}]' if ':' in host else host  # IPv6.
    address = f'http://{host}:{self.config.port}/'
    print(f'{address} (Ctrl-C finishes what is in progress)')

  def handle_exit(self, sig: int, frame: Any) -> None:
    """Starts draining; a second signal ends the process."""
    del sig, frame
    if self.service.draining:
      print('stopped: requests in progress are lost', file=sys.stderr)
      # Exit immediately: an orderly shutdown would answer 500, and Python would
      # abort while the engine's thread computes.
      os._exit(1)
    self.service.draining = True
    print('stopping: requests in progress are finished', file=sys.stderr)

  async def on_tick(self, counter: int) -> bool:
    """Returns whether to stop."""
    drained = self.service.draining and not self.service.thread.jobs
    failed = self.service.thread.failed is not None
    return await super().on_tick(counter) or drained or failed


def is_free(host: str, port: int) -> bool:
  """Returns whether a port is free; prints an error if not."""
  # Called before the slow reading of the model; uvicorn binds the port later.
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    socket.create_server((host, port), family=family).close()
  except OSError as error:
    print(
      f'Error: --host={host} --port={port} cannot be listened on ({error});'
      ' choose another port, or end the program that uses it.',
      file=sys.stderr,
    )
    return False
  return True


def run(service: Service, host: str, port: int) -> int:
  """Serves until a signal or a failure of the engine.

  Args:
    service: the endpoints.
    host: address to listen on.
    port: port to listen on.

  Returns:
    The exit status: 1 if the engine failed or the port is not free. A second
    signal also exits with 1.
  """
  options = {'log_level': 'warning', 'lifespan': 'off', 'http': _Protocol}
  options['timeout_graceful_shutdown'] = 10  # Seconds, for slow readers.
  server = _Server(uvicorn.Config(service.app, host, port, **options))
  server.service = service
  # A second signal also ends the wait for a program that is being compiled.
  with server.capture_signals():
    with contextlib.suppress(SystemExit):  # The port was taken meanwhile.
      server.run()
    service.thread.close()
  return int(service.thread.failed is not None or not server.started)
