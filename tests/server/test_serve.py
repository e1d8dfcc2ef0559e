"""The command `serve` as a real process: signals, replacement, the page."""

import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from encdec_adapt import serve
from encdec_adapt import server as server_lib
from encdec_adapt.base import errors
from encdec_adapt.stored import prompt_framing
from encdec_adapt.telemetry import environment
from tests import tiny, toy_models

pytest.importorskip('starlette', reason='needs pip install -e .[serve]')
pytest.importorskip('uvicorn', reason='needs pip install -e .[serve]')

CHROMIUM = '/usr/bin/chromium'
pytestmark = pytest.mark.multiproc


def _get(url, body=None):
  data = None if body is None else json.dumps(body).encode()
  with urllib.request.urlopen(url, data, timeout=120) as answer:
    return answer.read().decode()


@pytest.fixture
def pair(tmp_path):
  """The folder of a random T5Gemma."""
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE)
  config = toy_models.pair_and_decoder(stack)['encoder_decoder']
  toy_models.save(tmp_path / 'pair', config)
  # As an export of a run that was trained on chats.
  path = tmp_path / 'pair' / 'config.json'
  framing = prompt_framing.PromptFraming(chats=True)
  path.write_text(json.dumps(json.loads(path.read_text()) | framing.fields()))
  return tmp_path / 'pair'


@pytest.fixture
def server(pair, tmp_path):
  """A process that serves the model, its address and its folder."""
  port = tiny.free_port()
  log = tmp_path / 'log'
  flags = [f'--checkpoint={pair}', f'--port={port}']
  process = tiny.start('serve', *flags, '--max_prompt=256', log=log)
  url = f'http://127.0.0.1:{port}'
  try:
    for _ in range(600):
      assert process.poll() is None, log.read_text()
      try:
        _get(f'{url}/health')
        break
      except urllib.error.URLError:
        time.sleep(0.1)
    yield process, url, pair
  finally:
    process.kill()
    process.wait()


@pytest.mark.long
def test_a_signal_finishes_what_is_in_progress(server):
  process, url, folder = server
  body = {'prompt': 'x', 'max_tokens': 6, 'temperature': 0}
  before = json.loads(_get(f'{url}/v1/completions', body))['choices']
  # A checkpoint replaced while serving: the parameters are in memory.
  shutil.rmtree(folder)
  assert json.loads(_get(f'{url}/health'))['status'] == 'ok'
  again = json.loads(_get(f'{url}/v1/completions', body))['choices']
  assert again == before
  # A long one is finished; a new one is refused meanwhile.
  long = {'prompt': 'x', 'max_tokens': 1024, 'seed': 1, 'temperature': 5}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    answer = pool.submit(_get, f'{url}/v1/completions', long)
    while 'rows_active 1' not in _get(f'{url}/metrics'):
      assert not answer.done()
    process.send_signal(signal.SIGTERM)
    refused = []
    while not answer.done():
      try:
        _get(f'{url}/v1/completions', body)
      except urllib.error.HTTPError as error:
        refused.append(error.code)
      except OSError:
        break  # It has stopped listening.
    assert json.loads(answer.result())['choices'][0]['finish_reason']
  assert set(refused) == {503}
  assert process.wait(60) == 0


@pytest.mark.long
def test_the_readme_and_a_second_signal(server, tmp_path):
  process, url, _ = server
  readme = pathlib.Path(server_lib.__file__).with_name('README.md').read_text()
  [block] = re.findall('```\n(curl .*?)```', readme, re.DOTALL)
  block = block.replace(':8000', f':{url.rpartition(":")[2]}')
  command = ['bash', '-ec', block]
  output = subprocess.run(command, check=True, capture_output=True).stdout
  assert output.count(b'data: [DONE]') == 1
  # 'length', or 'stop': the draw of 32 tokens may end by EOS.
  assert output.count(b'"finish_reason": "') == 1
  assert output.count(b'"chat.completion"') == 1

  body = {'prompt': 'x', 'max_tokens': 1024, 'temperature': 5}
  statuses = []

  def send(stream):
    """Reads an answer to its end."""
    try:
      _get(f'{url}/v1/completions', body | {'stream': stream})
    except urllib.error.HTTPError as error:
      statuses.append(error.code)
    except (OSError, http.client.HTTPException):
      statuses.append('lost')

  # More than there are rows: some streams have not begun.
  clients = [threading.Thread(target=send, args=[i % 3 > 0]) for i in range(30)]
  for client in clients:
    client.start()
  log = (tmp_path / 'log').read_text
  active = lambda: 'rows_active 8' in _get(f'{url}/metrics')  # noqa: E731
  tiny.wait_until(active, process, text=log)
  process.send_signal(signal.SIGTERM)
  tiny.wait_until(lambda: 'stopping' in log(), process, text=log)
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 1
  for client in clients:
    client.join()
  assert set(statuses) <= {'lost', 503}
  assert 'lost' in statuses
  address, *lines = log().splitlines()
  assert address.startswith(url)
  lines = [line for line in lines if not re.match(r'compiled \d+/\d\d ', line)]
  assert [line.split(':')[0] for line in lines] == ['stopping', 'stopped']


class _Browser:
  """Headless Chromium, driven by its debugging protocol over two pipes."""

  def __init__(self, profile, url):
    """Starts it and opens a page."""
    flags = 'headless no-sandbox disable-gpu disable-quic no-first-run'
    flags += ' disable-background-networking disable-component-update'
    flags += f' disable-sync user-data-dir={profile} remote-debugging-pipe'
    read, self._out = os.pipe()
    self._in, write = os.pipe()
    # It reads descriptor 3 and writes descriptor 4.
    shell = f'exec "$@" 3<&{read} 4>&{write}'
    command = [CHROMIUM, *(f'--{flag}' for flag in flags.split())]
    self.process = subprocess.Popen(
      ['bash', '-c', shell, 'bash', *command],
      pass_fds=(read, write),
      stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    self._rest, self._number, self._session = b'', 0, {}
    self.console = []
    target = self._call('Target.createTarget', url='about:blank')
    self._session = self._call('Target.attachToTarget', flatten=True, **target)
    self._call('Log.enable')
    self._call('Page.navigate', url=url)

  def _call(self, method, **params):
    """Calls a method; returns its result."""
    self._number += 1
    message = {'id': self._number, 'method': method, 'params': params}
    content = json.dumps(message | self._session).encode()
    os.write(self._out, content + b'\0')
    while True:
      while b'\0' not in self._rest:
        assert select.select([self._in], [], [], 60)[0], 'it does not answer'
        new = os.read(self._in, 1 << 16)
        assert new, 'the browser ended'
        self._rest += new
      part, _, self._rest = self._rest.partition(b'\0')
      answer = json.loads(part)
      if answer.get('method') == 'Log.entryAdded':
        self.console.append(answer['params']['entry'])
      if answer.get('id') == self._number:
        return answer['result']

  def value(self, expression):
    """Evaluates JavaScript in the page."""
    options = {'expression': expression, 'returnByValue': True}
    # Browsers copy for users only.
    options['userGesture'] = True
    return self._call('Runtime.evaluate', **options)['result'].get('value')

  def wait(self, expression):
    """Waits until JavaScript in the page gives true."""
    end = time.monotonic() + 60
    while not self.value(expression):
      assert time.monotonic() < end, self.value('document.body.innerText')
      time.sleep(0.05)


@pytest.mark.long
@pytest.mark.skipif(
  not pathlib.Path(CHROMIUM).exists(), reason=f'{CHROMIUM} is not installed'
)
def test_the_page_chats_and_completes(server, tmp_path):
  _, url, _ = server
  options = {'max_tokens': 64, 'temperature': 0}

  def answer_to(path, **body):
    return json.loads(_get(f'{url}/v1/{path}', body | options))

  messages, answers = [], []
  for question in ('cats', 'dogs'):
    messages.append({'role': 'user', 'content': question})
    answers.append(answer_to('chat/completions', messages=messages))
    messages.append(answers[-1]['choices'][0]['message'])
  browser = _Browser(tmp_path / 'profile', f'{url}/?prompt=cats')
  element = 'document.getElementById("{}")'.format
  status = f'{element("status")}.textContent'
  turns = '[...document.querySelectorAll("pre")].map(x => x.textContent)'

  def send(prompt):
    browser.value(f'{element("prompt")}.value = "{prompt}"')
    browser.value(f'{status} = ""')
    browser.value(f'{element("send")}.click()')

  def wait_for(answer):
    count = answer['usage']['completion_tokens']
    browser.wait(f'/^{count} tokens, [0-9]+ tokens\\/s$/.test({status})')
    browser.wait(f'!{element("send")}.disabled')

  try:
    # A run of chats: the box is ticked, and the history is sent.
    wait_for(answers[0])
    assert browser.value(f'{element("chat")}.checked')
    assert browser.value(f'{element("model")}.textContent') == 'pair'
    assert browser.value(f'{element("prompt")}.value') == ''
    send('dogs')
    wait_for(answers[1])
    assert browser.value(turns) == [x['content'] for x in messages]
    # What is copied can be pasted.
    copied = 'document.oncopy = () => window.copied = getSelection().toString()'
    browser.value(copied)
    browser.value('[...document.querySelectorAll(".copy")].pop().click()')
    text = messages[-1]['content']
    assert browser.value('window.copied').split() == text.split() != []
    # A refusal leaves history and prompt as they were.
    browser.value(f'{element("max_tokens")}.value = 10 ** 6')
    send('more')
    browser.wait(f'{status}.startsWith("max_tokens: 1000000 tokens")')
    browser.wait(f'!{element("send")}.disabled')
    assert browser.value(f'{element("prompt")}.value') == 'more'
    assert browser.value(turns) == [x['content'] for x in messages]
    assert [x['text'].split('(')[0] for x in browser.console] == [
      'Failed to load resource: the server responded with a status of 400 '
    ]
    # Completions have no history.
    browser.value(f'{element("max_tokens")}.value = 64')
    browser.value(f'{element("chat")}.click()')
    answer = answer_to('completions', prompt='cats')
    send('cats')
    wait_for(answer)
    assert browser.value(turns) == [answer['choices'][0]['text']]
  finally:
    browser.process.kill()
    browser.process.wait()


@pytest.mark.parametrize('flag', ['--checkpoint=', '--timeout=0', '--port=0'])
def test_flags_are_checked(flag, tmp_path):
  with pytest.raises(errors.UserError, match=flag[2:6]):
    tiny.call(serve, f'--checkpoint={tmp_path}', flag)


def test_a_port_in_use_is_status_1(tmp_path, capsys):
  with socket.create_server(('127.0.0.1', 0)) as holder:
    port = holder.getsockname()[1]
    flags = [f'--checkpoint={tmp_path}', f'--port={port}']
    assert tiny.call(serve, *flags) == 1
  output, error_text = capsys.readouterr()
  assert not output
  assert f'--port={port} cannot be listened on' in error_text


def test_states_that_memory_does_not_hold_are_refused(pair, monkeypatch):
  monkeypatch.setattr(environment, 'memory_free', lambda: 1 << 20)
  flags = [f'--checkpoint={pair}', f'--port={tiny.free_port()}']
  with pytest.raises(
    errors.UserError, match=r'the 1.0 MiB .* 64 \+ 256 tokens: [\d.]+ KiB, '
  ):
    tiny.call(serve, *flags)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  monkeypatch.delitem(sys.modules, 'encdec_adapt.server.http_app', False)
  monkeypatch.delattr(server_lib, 'http_app', raising=False)
  with pytest.raises(errors.UserError, match='serving needs uvicorn'):
    tiny.call(serve, f'--checkpoint={tmp_path}')
