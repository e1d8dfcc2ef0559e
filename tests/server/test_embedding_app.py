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


@pytest.mark.parametrize(
  'body, message',
  [
    ({}, 'input must be a text'),
    ({'input': ['x', '']}, 'input must be a text'),
    ({'input': [[1, 2]]}, 'input must be a text or texts, not [[1, 2]]'),
    ({'input': 5}, 'input must be a text or texts, not 5'),
    ({'input': {'a': 1}}, 'input must be a text or texts, not {"a": 1}'),
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
