"""The HTTP application on a toy model: answers, refusals, lost clients."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest

pytest.importorskip('starlette', reason='needs pip install -e .[serve]')
pytest.importorskip('uvicorn', reason='needs pip install -e .[serve]')
testclient = pytest.importorskip('starlette.testclient')

import encdec_adapt  # noqa: E402
from encdec_adapt.base import errors  # noqa: E402
from encdec_adapt.generation import prompt_encoding  # noqa: E402
from encdec_adapt.inference import engine as engine_lib  # noqa: E402
from encdec_adapt.server import (  # noqa: E402
  http_app,
  log_probs,
  origins,
  protocol,
  text_stream,
)
from encdec_adapt.tokenizers import (  # noqa: E402
  byte_vocabulary,
  vocabulary_pair,
)
from tests import tiny, tiny_tokenizers, toy_models  # noqa: E402

PROMPTS = ['The quick', 'two cats and a dog', 'x']
CHAT = {'messages': [{'role': 'user', 'content': 'hello'}]}
COMPLETIONS, CHATS = '/v1/completions', '/v1/chat/completions'


@pytest.fixture(scope='module')
def loaded(tmp_path_factory):
  """A T5Gemma of random weights, whose text has bytes of characters."""
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  config = toy_models.pair_and_decoder(stack)['encoder_decoder']
  return toy_models.save(tmp_path_factory.mktemp('models') / 'pair', config)


def _service(loaded, *, rows=2, adapters=(), warm_up=(), **options):
  made = loaded.engine(rows=rows, steps=4)
  limits = protocol.Limits(max_prompt=40, max_tokens=4000, rows=rows)
  opened = loaded.stored.open_vocabularies()
  encoder = prompt_encoding.PromptEncoder(loaded.stored)
  prompts = dict.fromkeys(('pair', *adapters), encoder)
  served = http_app.Served('pair', 7, opened, prompts, limits, **options)
  return http_app.Service(made, served, warm_up)


@pytest.fixture(scope='module')
def service(loaded):
  return _service(loaded)


def _client(service):
  return testclient.TestClient(service.app, 'http://localhost')


@pytest.fixture(scope='module')
def decoder(tmp_path_factory):
  """A decoder-only model of random weights."""
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  config = toy_models.pair_and_decoder(stack)['decoder_only']
  folder = tmp_path_factory.mktemp('models') / 'decoder'
  return toy_models.save(folder, config)


@pytest.fixture(scope='module')
def client(service):
  with _client(service) as made:
    yield made


def _expected(loaded, prompt, **options):
  vocabulary = loaded.stored.open_vocabularies().encoder
  tokens = np.array([vocabulary.bos, *vocabulary.encode(prompt)])
  request = engine_lib.Request(tokens, **options)
  [(_, completion)] = loaded.engine(rows=2).run([request])
  return completion


def _events(answer):
  lines = [line for line in answer.text.split('\n\n') if line]
  assert lines.pop() == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines]


def _metrics(client):
  lines = client.get('/metrics').text.splitlines()
  pairs = [line.rsplit(' ', 1) for line in lines if line[0] != '#']
  return {name.removeprefix('encdec_adapt_'): int(n) for name, n in pairs}


def _begin(service, body, receive, send):
  """Begins a call of the application, without a server."""
  content = json.dumps({'prompt': 'x', 'max_tokens': 4000, **body}).encode()
  messages = [{'type': 'http.request', 'body': content}]

  async def receive_all():
    return messages.pop() if messages else await receive()

  scope = {'type': 'http', 'method': 'POST', 'path': COMPLETIONS}
  scope |= {'headers': [], 'query_string': b'', 'server': ('x', 80)}
  return asyncio.ensure_future(service.app(scope, receive_all, send))


def _wait(condition):
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


@pytest.mark.parametrize('prompt', PROMPTS)
def test_completions_are_the_engines(loaded, client, prompt):
  want = _expected(loaded, prompt, max_tokens=30)
  body = {'prompt': prompt, 'max_tokens': 30, 'temperature': 0, 'model': 'any'}
  answer = client.post(COMPLETIONS, json=body)
  assert answer.status_code == 200
  [choice] = answer.json()['choices']
  assert choice['text'] == want.text
  assert choice['finish_reason'] == {'eos': 'stop'}.get(want.ended, want.ended)
  assert answer.json()['usage']['completion_tokens'] == len(want.tokens)

  body |= {'stream': True, 'stream_options': {'include_usage': True}}
  *chunks, usage = _events(client.post(COMPLETIONS, json=body))
  assert ''.join(c['choices'][0]['text'] for c in chunks) == want.text
  assert usage['usage'] == answer.json()['usage']
  assert len(chunks) > 1

  if len(want.text) > 8:
    stop = want.text[5:8]
    body |= {'stop': [stop, 'never said']}
    *chunks, _ = _events(client.post(COMPLETIONS, json=body))
    text = ''.join(c['choices'][0]['text'] for c in chunks)
    assert text == want.text[: want.text.index(stop)]
    assert chunks[-1]['choices'][0]['finish_reason'] == 'stop'


@pytest.mark.long
def test_a_gpt2_folder_completes_as_transformers_does(tmp_path):
  """Over HTTP and in Python, the text is `generate`'s of transformers."""
  trained = pytest.importorskip('tests.e2e.test_trained_encoders')
  folder = trained.save('gpt2', tmp_path / 'gpt2')
  tokenizer = trained.transformers.AutoTokenizer.from_pretrained(folder)
  tokens = tokenizer(PROMPTS[0], return_tensors='pt')
  model = trained.tiny_models.load(folder)
  output = model.generate(**tokens, do_sample=False, max_new_tokens=16)[0]
  ids = output[tokens.input_ids.shape[1] :]
  want = tokenizer.decode(ids, skip_special_tokens=True)
  loaded = encdec_adapt.load(folder)
  assert loaded.generate(PROMPTS[:1], max_tokens=16) == [want] != ['']
  with pytest.raises(errors.UserError, match='learned, config.model.decoder.p'):
    loaded.generate([PROMPTS[0] * 9])
  body = {'prompt': PROMPTS[0], 'max_tokens': 16, 'temperature': 0}
  with _client(_service(loaded)) as client:
    [choice] = client.post(COMPLETIONS, json=body).json()['choices']
    assert choice['text'] == want
    assert client.post(CHATS, json=CHAT).status_code == 400


def test_texts_have_the_prefix_and_ids_where_it_is_wanted(loaded):
  prompts = prompt_encoding.PromptEncoder(loaded.stored, prefix='Say: ')
  encode = lambda text: prompts.reader.encode(text).tolist()  # noqa: E731
  ids = encode('cats')
  prefixed = [*encode('Say: '), *ids]
  for prompt, run_prefix, want in (
    ('cats', False, encode('Say: cats')),
    (ids, False, ids),
    (ids, True, prefixed),
    ([prompts.reader.bos, *ids], True, prefixed),
  ):
    call = protocol.parse(
      json.dumps({'prompt': prompt, 'echo': True}).encode(),
      is_chat=False,
      limits=protocol.Limits(40, 40, 2),
      encoders={'pair': prompts},
      run_prefix=run_prefix,
    )
    tokens, [(text, span)] = call.requests[0].tokens.tolist(), call.echo
    assert tokens == [prompts.reader.bos, *want]
    assert (text, tokens[span]) == ('cats', ids)


def test_a_text_is_encoded_once(loaded, monkeypatch):
  prompts, texts = prompt_encoding.PromptEncoder(loaded.stored), []
  encode = prompts.reader.encode
  monkeypatch.setattr(
    prompts.reader, 'encode', lambda text: texts.append(text) or encode(text)
  )
  protocol.parse(
    json.dumps({'prompt': ['cats', 'dogs'], 'n': 2, 'echo': True}).encode(),
    is_chat=False,
    limits=protocol.Limits(40, 40, 2),
    encoders={'pair': prompts},
  )
  assert texts == ['cats', 'dogs']


def test_draws_are_of_the_seed(client):
  body = {'prompt': 'The', 'max_tokens': 12, 'seed': 3, 'top_p': 0.9}
  texts = [
    client.post(COMPLETIONS, json=body | {'seed': seed}).json()['choices']
    for seed in (3, 3, 4)
  ]
  assert texts[0] == texts[1] != texts[2]


def test_equal_prompts_draw_independently_without_a_seed(client):
  body = {'prompt': ['The'] * 4, 'n': 2, 'max_tokens': 12, 'temperature': 2}
  answers = [
    client.post(COMPLETIONS, json=body | change).json()['choices']
    for change in ({}, {'seed': 3}, {'seed': 3})
  ]
  assert len({choice['text'] for choice in answers[0]}) == 8
  assert answers[1] == answers[2]


def test_chats(client):
  body = {**CHAT, 'max_tokens': 9, 'temperature': 0}
  answer = client.post(CHATS, json=body).json()
  message = answer['choices'][0]['message']
  assert message['role'] == 'assistant'
  chunks = _events(client.post(CHATS, json=body | {'stream': True}))
  deltas = [chunk['choices'][0]['delta'] for chunk in chunks]
  assert deltas[0]['role'] == 'assistant'
  assert ''.join(d['content'] for d in deltas) == message['content']


def test_lists_and_choices_are_those_of_single_requests(loaded, client):
  body = {'max_tokens': 6, 'seed': 3, 'logprobs': 1, 'prompt': PROMPTS}
  alone = [
    client.post(COMPLETIONS, json=body | {'prompt': prompt, 'n': 2}).json()
    for prompt in PROMPTS
  ]
  want = [choice for answer in alone for choice in answer['choices']]
  assert want[0]['text'] != want[1]['text']
  answer = client.post(COMPLETIONS, json=body | {'n': 2}).json()
  assert [x['index'] for x in answer['choices']] == [*range(6)]
  assert [x['text'] for x in answer['choices']] == [x['text'] for x in want]
  assert answer['usage'] == {
    name: sum(x['usage'][name] for x in alone) for name in answer['usage']
  }
  first = client.post(COMPLETIONS, json=body | {'prompt': PROMPTS[0]}).json()
  assert first['choices'][0] == alone[0]['choices'][0]
  vocabulary = loaded.stored.open_vocabularies().encoder
  ids = [vocabulary.encode(x).tolist() for x in PROMPTS]
  for prompt in (ids, [*ids[:2], PROMPTS[2]]):
    again = client.post(COMPLETIONS, json=body | {'prompt': prompt}).json()
    assert [x['text'] for x in again['choices']] == [
      x['text'] for x in want[::2]
    ]
  # A stream has the parts of all choices.
  body |= {'n': 2, 'stream': True, 'stream_options': {'include_usage': True}}
  *chunks, usage = _events(client.post(COMPLETIONS, json=body))
  assert usage['usage'] == answer['usage']
  for i, choice in enumerate(answer['choices']):
    parts = [x['choices'][0] for x in chunks if x['choices'][0]['index'] == i]
    assert ''.join(x['text'] for x in parts) == choice['text']
    assert parts[-1]['finish_reason'] == choice['finish_reason']
    log_probs = [x['logprobs'] for x in parts if x['logprobs']]
    for name, values in choice['logprobs'].items():
      assert sum((x[name] for x in log_probs), []) == values


def test_log_probs_are_the_models(loaded, client):
  want = _expected(loaded, 'The', max_tokens=9)
  # Penalties change which token is chosen, not the log-probabilities.
  for change in ({}, {'frequency_penalty': 2, 'presence_penalty': -1}):
    body = {'max_tokens': 9, 'temperature': 0, 'prompt': 'The', **change}
    answer = client.post(COMPLETIONS, json=body | {'logprobs': 3}).json()
    [choice] = answer['choices']
    columns = choice['logprobs']
    assert columns['text_offset'][0] == 0
    if not change:
      np.testing.assert_allclose(
        columns['token_logprobs'], want.log_probs, atol=1e-5
      )
    for i, top in enumerate(columns['top_logprobs']):
      assert top[columns['tokens'][i]] == columns['token_logprobs'][i]
      values = list(top.values())
      assert values == sorted(values, reverse=True)
      assert len(top) in (3, 4)
      if not change:
        assert top[columns['tokens'][i]] == max(values)
  body = {**CHAT, 'max_tokens': 4, 'temperature': 0, 'logprobs': True}
  for count in (0, 5):
    answer = client.post(CHATS, json=body | {'top_logprobs': count}).json()
    content = answer['choices'][0]['logprobs']['content']
    assert len(content) == answer['usage']['completion_tokens']
    for entry in content:
      top = entry['top_logprobs']
      assert len(top) == count
      assert top[:1] in ([], [{k: entry[k] for k in top[0]}] if top else [])
      values = [x['logprob'] for x in top]
      assert values == sorted(values, reverse=True)
  assert client.post(CHATS, json=body).json()['choices'][0]['logprobs']
  streamed = _events(client.post(CHATS, json=body | {'stream': True}))
  entries = [x['choices'][0]['logprobs'] for x in streamed]
  assert sum((x['content'] for x in entries if x), []) == [
    entry | {'top_logprobs': []} for entry in content
  ]


@pytest.mark.parametrize('family', ['gemma', 'qwen'])
def test_tokens_of_a_part_of_a_character(family, tmp_path):
  tiny_tokenizers.save(tmp_path / family, family, tiny_tokenizers.TEXTS, 400)
  vocabulary = vocabulary_pair.open_vocabulary(tmp_path / family)
  ids = vocabulary.encode('a \U0001f9ed b')
  offsets = log_probs.Offsets(vocabulary, start=True)
  tokens = engine_lib.Tokens(ids, np.zeros(len(ids), np.float32))
  scored = log_probs.read(vocabulary, tokens, 0)
  columns = log_probs.of_completion(scored, map(offsets.add, ids.tolist()))
  # Byte-level BPE (Qwen) has no byte pieces, and writes the space as U+0120.
  assert ''.join(columns['tokens']) == r'a \xf0\x9f\xa7\xad b'
  start = columns['tokens'].index(r'\x9f')
  assert columns['text_offset'][start : start + 4] == [2, 2, 2, 3]
  content = log_probs.of_chat(scored)['content']
  assert [x['token'] for x in content] == columns['tokens']
  sent = bytes(sum((x['bytes'] for x in content), []))
  assert sent.decode() == 'a \U0001f9ed b'


def test_the_prompt_is_echoed(client):
  body = {'prompt': 'Cats é', 'max_tokens': 5, 'temperature': 0}
  [plain] = client.post(COMPLETIONS, json=body).json()['choices']
  body |= {'echo': True}
  [choice] = client.post(COMPLETIONS, json=body).json()['choices']
  assert choice == plain | {'text': 'Cats é' + plain['text']}
  chunks = _events(client.post(COMPLETIONS, json=body | {'stream': True}))
  texts = [chunk['choices'][0]['text'] for chunk in chunks]
  assert ''.join(texts) == choice['text']
  # An encoder reads the prompt of a pair.
  answer = client.post(COMPLETIONS, json=body | {'logprobs': 0})
  assert answer.status_code == 400
  assert 'encdec_adapt.evaluate' in answer.json()['error']['message']
  assert client.get('/health').status_code == 200


def test_the_prompt_of_a_decoder_has_log_probs(decoder):
  vocabulary = decoder.stored.open_vocabularies().decoder
  text = 'The quick brown cat'
  ids = vocabulary.encode(text).tolist()
  framed = np.array([[vocabulary.bos, *ids]])
  want = np.array(jax.nn.log_softmax(decoder.logits(framed)))[0]
  values = np.take_along_axis(want[:-1], framed[0, 1:, None], axis=1)[:, 0]
  with _client(_service(decoder)) as client:
    body = {'max_tokens': 3, 'temperature': 0, 'logprobs': 2}
    [plain] = client.post(COMPLETIONS, json=body | {'prompt': text}).json()[
      'choices'
    ]
    body |= {'echo': True}
    answers = [
      client.post(COMPLETIONS, json=body | {'prompt': prompt}).json()
      for prompt in (text, ids, framed[0].tolist())
    ]
    [choice] = answers[0]['choices']
    assert choice == answers[1]['choices'][0]
    assert choice['text'] == text + plain['text']
    columns, count = choice['logprobs'], len(ids)
    assert len(columns['tokens']) == count + 3
    for name in ('tokens', 'token_logprobs', 'top_logprobs'):
      assert columns[name][count:] == plain['logprobs'][name]
    np.testing.assert_allclose(
      columns['token_logprobs'][:count], values, atol=1e-4
    )
    offsets = columns['text_offset']
    pieces = [
      text[a:b] for a, b in zip(offsets, offsets[1:count], strict=False)
    ]
    assert pieces == columns['tokens'][: count - 1]
    assert offsets[count] == len(text)
    for i, top in enumerate(columns['top_logprobs'][:count]):
      likeliest = want[i, : vocabulary.size].max()
      np.testing.assert_allclose(max(top.values()), likeliest, atol=1e-4)
    # With BOS, which has no predecessors.
    [with_bos] = answers[2]['choices']
    assert with_bos['text'] == choice['text']
    first, *rest = with_bos['logprobs']['token_logprobs']
    assert (first, rest) == (None, columns['token_logprobs'])
    assert with_bos['logprobs']['text_offset'][1:] == offsets
    chunks = _events(
      client.post(COMPLETIONS, json=body | {'prompt': text, 'stream': True})
    )
    parts = [x['choices'][0]['logprobs'] for x in chunks]
    for name, values in columns.items():
      assert sum((x[name] for x in parts if x), []) == values


def test_a_prompt_is_scored_once(decoder, capsys):
  service, prompts = _service(decoder), ['The quick', 'cats']
  engine, scored = service.thread.engine, []
  score = engine.score_prompt
  engine.score_prompt = lambda x: scored.append(x.tokens) or score(x)
  body = {'max_tokens': 3, 'logprobs': 0, 'echo': True, 'n': 2}
  with _client(service) as client:
    answer = client.post(COMPLETIONS, json=body | {'prompt': prompts}).json()
    assert len(scored) == 2
    columns = [choice['logprobs'] for choice in answer['choices']]
    for i, prompt in enumerate(prompts):
      for choice in columns[2 * i : 2 * i + 2]:
        assert ''.join(choice['tokens']).startswith(prompt)
    count = len(columns[0]['tokens']) - 3
    first, second = (x['token_logprobs'][:count] for x in columns[:2])
    assert first == second

    def fail(request):
      raise RuntimeError('out of memory')

    engine.score_prompt = fail
    answer = client.post(COMPLETIONS, json=body | {'prompt': prompts})
    assert answer.status_code == 500
    assert 'RuntimeError: out of memory' in capsys.readouterr().err
    # The engine's state is not lost.
    assert client.get('/health').json()['status'] == 'ok'
    body['echo'] = False
    answer = client.post(COMPLETIONS, json=body | {'prompt': prompts})
    assert answer.status_code == 200


def test_penalties_count_generated_tokens(client):
  body = {'max_tokens': 24, 'temperature': 0, 'logprobs': 0}
  body['prompt'] = 'The quick'  # Its most frequent token is not the only one.

  def most(change):
    answer = client.post(COMPLETIONS, json=body | change).json()
    tokens = answer['choices'][0]['logprobs']['tokens']
    return max(map(tokens.count, tokens))

  frequent = most({})
  assert most({'frequency_penalty': 2}) < frequent
  assert most({'presence_penalty': 2}) < frequent
  assert most({'presence_penalty': -2}) > frequent


def test_content_parts_and_the_role_developer(client):
  text = lambda *texts: [{'type': 'text', 'text': x} for x in texts]  # noqa: E731
  body = {'max_tokens': 6, 'temperature': 0}
  plain, spoken = (
    [
      {'role': first, 'content': wrap('x')},
      {'role': 'user', 'content': wrap('a', 'b')},
      {'role': 'assistant', 'content': wrap('y'), **extra},
      {'role': 'user', 'content': wrap('z')},
    ]
    for first, wrap, extra in (
      ('system', lambda *texts: ''.join(texts), {}),
      ('developer', text, {'refusal': None, 'tool_calls': None}),
    )
  )
  neutral = {'best_of': 1, 'tools': [], 'n': 1, 'presence_penalty': 0}
  neutral |= {'response_format': {'type': 'text'}, 'logprobs': False}
  answers = [
    client.post(CHATS, json={**body, 'messages': plain}).json(),
    client.post(CHATS, json={**body, 'messages': spoken, **neutral}).json(),
  ]
  assert answers[0]['choices'] == answers[1]['choices'], answers[0]
  assert answers[0]['usage'] == answers[1]['usage']
  image = {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,'}}
  message = {'role': 'user', 'content': [*text('see'), image]}
  answer = client.post(CHATS, json={**body, 'messages': [message]})
  assert answer.status_code == 400
  error = answer.json()['error']
  assert error['param'] == 'messages'
  assert 'message 1 has a part of type "image_url"' in error['message']


@pytest.mark.parametrize(
  'change, field',
  [
    ({'prompt': None}, 'prompt'),
    ({'prompt': ''}, 'prompt'),
    ({'prompt': ['a', '']}, 'prompt'),
    ({'prompt': [[5], 'a', []]}, 'prompt'),
    ({'prompt': [5, 10**6]}, None),
    ({'prompt': 'x ' * 400}, 'prompt'),
    ({'prompt': '\ud800'}, 'prompt'),
    ({'max_tokens': 0}, 'max_tokens'),
    ({'max_tokens': True}, 'max_tokens'),
    ({'max_tokens': 10**6}, 'max_tokens'),
    ({'temperature': -1}, 'temperature'),
    ({'temperature': '1'}, 'temperature'),
    ({'temperature': 10**400}, 'temperature'),
    ({'top_p': 2}, 'top_p'),
    ({'top_k': 2**40}, 'top_k'),
    ({'seed': -1}, 'seed'),
    ({'stop': ['']}, 'stop'),
    ({'n': 3}, 'n'),
    ({'logprobs': 6}, 'logprobs'),
    ({'logprobs': True}, 'logprobs'),
    ({'presence_penalty': 2.5}, 'presence_penalty'),
    ({'frequency_penalty': -3}, 'frequency_penalty'),
    ({'best_of': 2}, 'best_of'),
    ({'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'tools': [{}]}, 'tools'),
    ({'stream': 'yes'}, 'stream'),
    ({'something': 1}, 'something'),
    ({'\ud800': 1}, '\ud800'),
    ({'stop': ['x'] * 17}, 'stop'),
    ({'messages': []}, 'messages'),
  ],
)
def test_malformed_requests_are_refused(client, change, field):
  body = {'prompt': 'x', 'max_tokens': 2, **change}
  answer = client.post(COMPLETIONS, content=json.dumps(body))
  assert answer.status_code == 400
  error = answer.json()['error']
  assert error['type'] == 'invalid_request_error'
  assert error['param'] == field
  assert field is None or field in error['message']


@pytest.mark.parametrize(
  'content', [b'', b'{', b'[1]', b'\xff', b'{"prompt": NaN}', b'[' * 99999]
)
def test_bodies_that_are_no_json_object_are_refused(client, content):
  assert client.post(COMPLETIONS, content=content).status_code == 400


def test_top_log_probs_need_log_probs(client):
  answer = client.post(CHATS, json=CHAT | {'top_logprobs': 1})
  assert answer.status_code == 400
  assert answer.json()['error']['param'] == 'top_logprobs'


def test_conversations_are_checked(client):
  messages = [{'role': 'robot', 'content': 'x'}]
  answer = client.post(CHATS, json={'messages': messages})
  assert answer.status_code == 400
  assert 'message 1' in answer.json()['error']['message']


def test_the_queue_is_bounded_and_requests_end_in_time(loaded):
  service = _service(loaded, rows=1, max_queue=0, timeout=0.5)
  with _client(service) as client:
    body = {'prompt': 'x', 'max_tokens': 4000, 'temperature': 0}
    service.thread.jobs.add(None)  # A request in progress.
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 429
    assert answer.json()['error']['type'] == 'rate_limit_error'
    assert '1 are asked for' in answer.json()['error']['message']
    service.thread.jobs.clear()
    # More than will ever have room.
    answer = client.post(COMPLETIONS, json=body | {'prompt': ['x', 'y']})
    assert answer.status_code == 400
    error = answer.json()['error']
    assert error['param'] == 'prompt'
    assert 'at most 1 fit (--batch_size 1 + --max_queue 0)' in error['message']
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 504
    _wait(lambda: service.thread.engine.load == (0, 0))
    assert _metrics(client)['requests_total{status="504"}'] == 1
    service.draining = True
    assert client.post(COMPLETIONS, json=body).status_code == 503
    assert client.get('/health').status_code == 503


def test_a_client_that_leaves_frees_its_row(loaded):
  service = _service(loaded)

  async def leave(stream):
    """Leaves after the first text, or once the request is in progress."""
    left = asyncio.Event()

    async def receive():
      await left.wait()
      return {'type': 'http.disconnect'}

    async def send(message):
      if message.get('body') and stream:
        left.set()

    call = _begin(service, {'stream': stream}, receive, send)
    if not stream:
      while service.thread.engine.load[0] == 0:
        await asyncio.sleep(0.02)
      left.set()
    with contextlib.suppress(OSError):
      await asyncio.wait_for(call, 120)

  for stream in (True, False):
    asyncio.run(asyncio.wait_for(leave(stream), 120))
    _wait(lambda: service.thread.engine.load == (0, 0))
    assert not service.thread.jobs


def test_a_client_that_does_not_read_frees_its_row_in_time(loaded):
  service = _service(loaded, timeout=1.0)

  async def stall():
    """Reads nothing; looks at the jobs while the response is open."""
    stalled = asyncio.Event()

    async def send(message):
      if message.get('body'):
        stalled.set()
        await asyncio.Event().wait()

    call = _begin(service, {'stream': True}, asyncio.Event().wait, send)
    await stalled.wait()
    assert service.thread.jobs
    while service.thread.jobs or service.thread.engine.load != (0, 0):
      assert not call.done()
      await asyncio.sleep(0.02)
    call.cancel()

  asyncio.run(asyncio.wait_for(stall(), 60))


def test_a_request_names_its_adapters(loaded):
  client = _client(_service(loaded, adapters=('tuned',)))
  names = [x['id'] for x in client.get('/v1/models').json()['data']]
  assert names == ['pair', 'tuned']
  body = {'prompt': 'x', 'max_tokens': 1}
  for model, status in (('pair', 200), ('tuned', 400), ('other', 404)):
    answer = client.post(COMPLETIONS, json={**body, 'model': model})
    assert answer.status_code == status, answer.text
  assert 'of pair, tuned' in answer.json()['error']['message']
  # The engine of this test has no adapters, and has been asked for them.
  answer = client.post(COMPLETIONS, json={**body, 'model': 'tuned'})
  assert "adapters 'tuned'" in answer.json()['error']['message']


def test_models_health_and_metrics(client):
  assert client.get('/v1/models').json()['data'][0]['id'] == 'pair'
  health = client.get('/health').json()
  assert health == {
    'status': 'ok',
    'model': 'pair',
    'step': 7,
    'chat': True,
    'trained_on_chats': False,
  }
  before = _metrics(client)
  body = {'prompt': 'x', 'max_tokens': 1}
  assert client.post(COMPLETIONS, json=body).status_code == 200
  after = _metrics(client)
  name = 'tokens_total{kind="generated"}'
  assert after[name] == before[name] + 1
  assert after['rows'] == 2
  assert after['rows_active'] == after['queue_length'] == 0


def test_programs_are_compiled_between_requests(loaded):
  loads, may_begin, may_end = [], threading.Event(), threading.Event()

  def compile_programs():
    may_begin.wait(60)
    _wait(lambda: service.thread.jobs)  # A request arrives meanwhile.
    yield
    engine = service.thread.engine
    loads.append((engine._submitted, engine.load))
    yield
    may_end.wait(60)
    raise RuntimeError('out of memory')

  service = _service(loaded, warm_up=compile_programs())
  may_begin.set()
  with _client(service) as client:
    body = {'prompt': 'x', 'max_tokens': 40, 'temperature': 0}
    assert client.post(COMPLETIONS, json=body).status_code == 200
    _wait(lambda: loads)
    # The request was computed to its end before the next program.
    assert loads == [(1, (0, 0))]
    assert client.get('/health').json()['status'] == 'ok'
    # A program that does not compile ends the server, as a failed step does.
    may_end.set()
    _wait(lambda: client.get('/health').json()['status'] == 'failed')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait_for_the_engine(
  loaded, monkeypatch, number
):
  service, statuses = _service(loaded), []
  monkeypatch.setattr(http_app.os, '_exit', statuses.append)
  close = service.thread.close

  def close_while_compiling():
    # Otherwise, SIGTERM would end the tests.
    assert signal.getsignal(number) != signal.SIG_DFL
    signal.raise_signal(number)
    close()

  service.thread.close = close_while_compiling
  service.draining = True  # After a first signal.
  http_app.run(service, '127.0.0.1', tiny.free_port())
  assert statuses == [1]


def test_a_failed_engine_answers(loaded):
  service = _service(loaded)

  def fail(*arguments):
    raise RuntimeError('out of memory')

  service.thread.engine.step = fail
  with _client(service) as client:
    for _ in range(2):
      answer = client.post(COMPLETIONS, json={'prompt': 'x'})
      assert answer.status_code == 500
    assert client.get('/health').json()['status'] == 'failed'


@pytest.mark.parametrize('size', [1, 3])
def test_incomplete_characters_and_stop_strings_are_held_back(loaded, size):
  vocabulary = loaded.stored.open_vocabularies().decoder

  def decode(tokens):
    return vocabulary.decode(tokens, start=False)

  ids = vocabulary.encode('cats \U0001f9ed and é STOP more')
  stream = text_stream.TextStream(vocabulary, decode, ('STOP',))
  sent = ''
  for i in range(0, len(ids), size):
    sent += stream.add(ids[i : i + size])
    assert 'cats \U0001f9ed and é '.startswith(sent)
  assert sent + stream.send('cats \U0001f9ed and é ') == (
    'cats \U0001f9ed and é '
  )


@pytest.mark.parametrize('name', ['bytes', 'byt5'])
def test_bytes_are_sent_as_they_come(name):
  vocabulary = {
    'bytes': byte_vocabulary.ByteVocabulary,
    'byt5': byte_vocabulary.ByT5Vocabulary,
  }[name]()
  stream = text_stream.TextStream(vocabulary, vocabulary.decode, ())
  sent = [stream.add(vocabulary.encode('aé')[i : i + 1]) for i in range(3)]
  assert sent == ['a', '', 'é']


@pytest.mark.parametrize(
  'address, headers, status',
  [
    ('127.0.0.1', {'host': 'localhost:8000'}, 200),
    ('::1', {'host': '[::1]:8000'}, 200),
    ('localhost', {'host': '127.0.0.1'}, 200),
    ('127.0.0.1', {'host': 'site.example:8000'}, 403),
    ('127.0.0.1', {'host': 'localhost.site.example'}, 403),
    ('::1', {'host': ''}, 403),
    ('0.0.0.0', {'host': 'name.example'}, 200),
    ('127.0.0.1', {'origin': 'http://localhost'}, 200),
    ('0.0.0.0', {'host': 'a:8000', 'origin': 'http://a:8000'}, 200),
    ('0.0.0.0', {'host': 'a:8000', 'origin': 'http://a:8001'}, 403),
    ('127.0.0.1', {'origin': 'http://site.example'}, 403),
    ('127.0.0.1', {'origin': 'null'}, 403),
    ('127.0.0.1', {'sec-fetch-site': 'same-origin'}, 200),
    ('0.0.0.0', {'sec-fetch-site': 'cross-site'}, 403),
  ],
)
def test_pages_of_other_sites_are_refused(address, headers, status):
  async def answer(scope, receive, send):
    await http_app.responses.Response('answer')(scope, receive, send)

  guard = origins.Guard(answer, address)
  client = testclient.TestClient(guard, 'http://localhost')
  assert client.post('/', headers=headers).status_code == status
  # Any page may have a link to this one.
  is_refused = status == 403 and 'host' in headers and 'origin' not in headers
  assert client.get('/', headers=headers).status_code == (
    403 if is_refused and address != '0.0.0.0' else 200
  )


def test_requests_without_a_host_or_a_body(loaded, monkeypatch):
  monkeypatch.setattr(http_app, '_BODY_SECONDS', 0.5)
  service, port = _service(loaded), tiny.free_port()
  arguments = service, '127.0.0.1', port
  server = threading.Thread(target=http_app.run, args=arguments)
  server.start()

  def send(text):
    """Returns the answer, up to the end of the connection."""
    with socket.create_connection(arguments[1:], timeout=60) as connection:
      connection.sendall(text.replace('\n', '\r\n').encode())
      parts = iter(lambda: connection.recv(1 << 16), b'')
      return b''.join(parts).decode()

  def may_connect():
    with contextlib.suppress(OSError):
      return bool(socket.create_connection(arguments[1:]).close() or True)

  try:
    _wait(may_connect)
    head = f'POST {COMPLETIONS} HTTP/1.1\nHost: localhost\n'
    answer = send(f'{head}Content-Length: 100\n\n{{"prompt":')
    assert answer.startswith('HTTP/1.1 408')
    assert 'within 0.5 seconds' in answer
    answer = send('GET /health HTTP/1.1\n\n')
    assert answer.startswith('HTTP/1.1 400')
    assert 'Missing mandatory Host: header' in answer
    answer = send('GET /health HTTP/1.0\n\n')
    assert answer.startswith('HTTP/1.1 200')
  finally:
    service.draining = True
    server.join()
