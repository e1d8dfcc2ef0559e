"""The HTTP application of an embedding model: POST /v1/embeddings.

Requires starlette and uvicorn.
"""

import asyncio
import base64
from collections.abc import Mapping
import json
from typing import Any

import numpy as np
from starlette import applications, middleware, requests, responses, routing

from encdec_adapt.base import errors
from encdec_adapt.generation import model_in_memory
from encdec_adapt.server import http_app, origins, protocol

_ROLES = ('query', 'document')
_HARMLESS = ('model', 'user')


class EmbeddingService:
  """The endpoints; `http_app.run` serves them.

  Attributes:
    app: the ASGI application.
    draining: whether new requests are refused.
    jobs: texts of requests in progress.
    failed: always None, as errors affect only their request.
  """

  failed = None

  def __init__(
    self, model: model_in_memory.LoadedModel, name: str, rows: int, host: str
  ):
    """Creates the application.

    Args:
      model: the embedding model.
      name: name of the model.
      rows: texts per batch.
      host: address to listen on.
    """
    self._model, self._name, self._rows = model, name, rows
    self.draining, self.jobs, self._lock = False, [], asyncio.Lock()
    stack = model.config.decoder
    self._sizes = stack.head.sizes(stack.width)
    self.thread = self  # Requests are computed sequentially.
    self.app = applications.Starlette(
      routes=[
        routing.Route('/v1/embeddings', self._embed, methods=['POST']),
        routing.Route('/v1/models', self._models),
        routing.Route('/health', self._health),
      ],
      middleware=[middleware.Middleware(origins.Guard, host=host)],
    )

  def close(self) -> None:
    """Does nothing: there is no thread."""

  async def _embed(self, request: requests.Request) -> responses.Response:
    try:
      if self.draining:
        raise protocol.ApiError(503, 'the server is stopping.')
      content = await http_app.read_body(request)
      texts, fields = self._parse(protocol.parse_object(content))
      self.jobs.append(texts)
      try:
        async with self._lock:
          role = fields.get('input_type', 'document')
          vectors = await asyncio.to_thread(
            self._model.embed_texts, texts, role, self._rows
          )
      finally:
        self.jobs.remove(texts)
      return responses.JSONResponse(self._body(texts, vectors, fields))
    except protocol.ApiError as error:
      return http_app.refusal(error)
    except errors.UserError as error:  # Text without tokens.
      return http_app.refusal(protocol.ApiError(400, str(error), 'input'))

  def _parse(self, fields: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    texts = fields.get('input')
    texts = [texts] if protocol.is_text_or_ids(texts) else texts
    allowed = {
      'input_type': _ROLES,
      'encoding_format': ('float', 'base64'),
      'dimensions': self._sizes,
    }
    if (
      not isinstance(texts, list)
      or not texts
      or not all(map(protocol.is_text_or_ids, texts))
    ):
      raise _must_be(
        'input', 'a text, token ids, or a list of those', fields.get('input')
      )
    # A gather from the embedding table would clamp them silently.
    largest = max([0, *(i for x in texts if isinstance(x, list) for i in x)])
    if largest >= (size := self._model.tokenizer.size):
      raise _must_be('input', f'of token ids below {size}', largest)
    for name in fields.keys() - {'input', *_HARMLESS}:
      value, values = fields[name], allowed.get(name, ())
      # Compare types too: 4.0 and true equal integers.
      if not any(type(x) is type(value) and x == value for x in values):
        choices = ', '.join(map(str, values)) or 'left out'
        raise _must_be(name, choices, value)
    return texts, fields

  def _body(
    self, texts: list[Any], vectors: np.ndarray, fields: Mapping[str, Any]
  ) -> dict[str, Any]:
    size = fields.get('dimensions', self._sizes[0])
    vectors = vectors[:, :size].astype('<f4')
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encode = np.ndarray.tolist
    if fields.get('encoding_format') == 'base64':
      encode = lambda x: base64.b64encode(x.tobytes()).decode()  # noqa: E731
    data = [
      {'object': 'embedding', 'index': i, 'embedding': encode(x)}
      for i, x in enumerate(vectors)
    ]
    tokenize = self._model.tokenizer.encode
    count = sum(len(tokenize(x) if isinstance(x, str) else x) for x in texts)
    usage = {'prompt_tokens': count, 'total_tokens': count}
    head = {'object': 'list', 'model': self._name}
    return {**head, 'data': data, 'usage': usage}

  async def _models(self, _: requests.Request) -> responses.Response:
    model = {'id': self._name, 'object': 'model'}
    return responses.JSONResponse({'object': 'list', 'data': [model]})

  async def _health(self, _: requests.Request) -> responses.Response:
    status = 'stopping' if self.draining else 'ok'
    body = {'status': status, 'model': self._name}
    return responses.JSONResponse(body, 503 if self.draining else 200)


def _must_be(name: str, values: str, value: Any) -> protocol.ApiError:
  message = f'{name} must be {values}, not {json.dumps(value)[:80]}.'
  return protocol.ApiError(400, message, name)
