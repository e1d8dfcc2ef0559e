"""/v1/embeddings: vectors, sizes, encodings, refusals."""

import base64
import json

import numpy as np
import pytest

pytest.importorskip('starlette', reason='needs pip install -e .[serve]')
pytest.importorskip('uvicorn', reason='needs pip install -e .[serve]')
testclient = pytest.importorskip('starlette.testclient')

from encdec_adapt.models import heads, model_config  # noqa: E402
from encdec_adapt.server import embedding_app  # noqa: E402
from tests import toy_models  # noqa: E402

URL, TEXTS = '/v1/embeddings', ['The quick', 'two cats and a dog', 'x']


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  head = heads.Embedding('last', (12,), (4,))
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE, head=head)
  config = model_config.DecoderOnlyConfig(stack)
  folder = tmp_path_factory.mktemp('models') / 'embedder'
  return toy_models.save(folder, config, native=True)


@pytest.fixture(scope='module')
def service(model):
  return embedding_app.EmbeddingService(model, 'embedder', 2, '127.0.0.1')


def test_vectors_are_those_of_the_model(model, service):
  with testclient.TestClient(service.app, 'http://localhost') as client:
    answer = client.post(URL, json={'input': TEXTS, 'model': 'any'}).json()
    vectors = np.array([x['embedding'] for x in answer['data']])
    np.testing.assert_allclose(vectors, model.embed(TEXTS), atol=1e-6)
    assert [x['index'] for x in answer['data']] == [0, 1, 2]
    assert answer['usage']['prompt_tokens'] > 3
    body = {'input': TEXTS[0], 'encoding_format': 'base64', 'dimensions': 4}
    (entry,) = client.post(URL, json=body).json()['data']
    part = np.frombuffer(base64.b64decode(entry['embedding']), '<f4')
    expected = vectors[0, :4] / np.linalg.norm(vectors[0, :4])
    np.testing.assert_allclose(part, expected, atol=1e-6)
    assert client.get('/v1/models').json()['data'][0]['id'] == 'embedder'
    assert client.get('/health').json()['status'] == 'ok'
    assert not service.jobs


def test_token_ids_embed_like_their_text(model, service):
  client = testclient.TestClient(service.app, 'http://localhost')
  ids = [model.tokenizer.encode(text).tolist() for text in TEXTS]
  ids[1].insert(0, model.tokenizer.bos)  # With framing, or without.
  want = client.post(URL, json={'input': TEXTS}).json()
  for body, count in (({'input': ids}, 3), ({'input': ids[0]}, 1)):
    got = client.post(URL, json=body).json()
    vectors, expected = (
      [x['embedding'] for x in answer['data']] for answer in (got, want)
    )
    np.testing.assert_allclose(vectors, expected[:count], atol=1e-6)
  assert got['usage']['prompt_tokens'] == len(ids[0])


@pytest.mark.parametrize(
  'body, message',
  [
    ({}, 'input must be a text'),
    ({'input': ['x', '']}, 'input must be a text'),
    ({'input': [[1, 2], []]}, 'list of those, not [[1, 2], []]'),
    ({'input': [[1, -2]]}, 'list of those, not [[1, -2]]'),
    ({'input': [1, 10**6]}, 'must be of token ids below'),
    (
      {'input': 5},
      'input must be a text, token ids, or a list of those, not 5',
    ),
    ({'input': {'a': 1}}, 'list of those, not {"a": 1}'),
    ({'input': 'x\ud800'}, 'lone surrogate'),
    ({'input': 'x', 'dimensions': 4.0}, 'dimensions must be 12, 4, not 4.0'),
    ({'input': 'x', 'dimensions': [4]}, 'dimensions must be 12, 4, not [4]'),
    ({'input': 'x', 'dimensions': 5}, 'dimensions must be 12, 4'),
    ({'input': 'x', 'input_type': 'passage'}, 'must be query, document'),
    ({'input': 'x', 'temperature': 1}, 'temperature must be left out'),
  ],
)
def test_wrong_requests_are_refused(service, body, message):
  client = testclient.TestClient(service.app, 'http://localhost')
  headers = {'content-type': 'application/json'}
  answer = client.post(URL, content=json.dumps(body), headers=headers)
  assert answer.status_code == 400
  assert message in answer.json()['error']['message']
