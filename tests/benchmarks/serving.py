"""The HTTP server under load against the bare engine on the same prompts.

A process serves a random encoder-decoder; `--clients` connections send
`--requests` prompts of mixed lengths, each the next one once the last is
answered, half of them streamed. The bare engine runs the same requests in this
process: all at once, as `Engine.run` orders them, reporting tokens as often as
the server does ('ratio'), and only at the end of a text ('ratio, no reports').
Both generate the same greedy texts (checked), in turn, so the server's answers
are complete: 'lost' counts requests without one. Compiling is left out.
"""

from collections.abc import Sequence
import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from encdec_adapt import serve
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import model_config as configs
from tests import tiny, toy_models
from tests.benchmarks import generation, results

# The vocabulary is that of the toy tokenizer.
SIZES = {k: v for k, v in generation.SIZES.items() if k != 'vocab_size'}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    **SIZES,
    requests=128,
    clients=[1, 8, 32],
    longest=256,
    tokens=64,
    batch_size=8,
    turns=3,
  ).parse_args(argv)
  rng = np.random.default_rng(0)
  lengths = rng.integers(8, arguments.longest, arguments.requests)
  most = rng.integers(arguments.tokens // 4, arguments.tokens + 1, len(lengths))
  # Ids of the toy vocabulary that are text.
  prompts = [rng.integers(370, 400, n).tolist() for n in lengths]
  bodies = [
    {'prompt': p, 'max_tokens': int(m), 'temperature': 0, 'stream': i % 2 == 0}
    for i, (p, m) in enumerate(zip(prompts, most, strict=True))
  ]
  with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
    folder = pathlib.Path(name)
    sizes = {name: getattr(arguments, name) for name in SIZES}
    side = configs.StackConfig(
      **sizes,
      vocab_size=toy_models.GEMMA_SIZE,
      query_scale=float(arguments.head_dim),
    )
    loaded = toy_models.save(
      folder / 'model', configs.encoder_decoder(side, side), scale=0.1
    )
    bos = loaded.special_ids.bos
    requests = [
      engine_lib.Request(np.array([bos, *p], np.int32), int(m))
      for p, m in zip(prompts, most, strict=True)
    ]
    engine = loaded.engine(rows=arguments.batch_size, steps=serve.STEPS)
    port = stack.enter_context(_server(folder, arguments.batch_size))
    rows = []
    for _ in range(2):  # Compiles for the lengths that come together.
      for clients in arguments.clients:
        _load(port, bodies, clients)
    for clients in arguments.clients:
      runs = {
        'engine': lambda: _bare(engine, requests, report=True),
        'no reports': lambda: _bare(engine, requests, report=False),
        'server': lambda clients=clients: _load(port, bodies, clients),
      }
      found = results.take_turns(runs, arguments.turns)
      rows.append(_row(clients, found))
  return results.report('serving', rows, arguments)


def _row(clients: int, found: dict[str, list[Any]]) -> dict[str, Any]:
  """Returns the line of a number of clients; the first turn compiled."""
  texts = [text for text, _ in found['engine'][0][1]]
  lost = sum(text is None for _, run in found['server'] for text, _ in run)
  same = sum(
    text == want
    for _, run in found['server'][1:]
    for (text, _), want in zip(run, texts, strict=True)
  )
  latencies = [s for _, run in found['server'][1:] for _, s in run]
  seconds = {
    name: statistics.median(took for took, _ in turns[1:])
    for name, turns in found.items()
  }
  return {
    'clients': clients,
    'requests/s': len(texts) / seconds['server'],
    'engine, requests/s': len(texts) / seconds['engine'],
    'ratio': seconds['engine'] / seconds['server'],
    'ratio, no reports': seconds['no reports'] / seconds['server'],
    'p50 s': float(np.quantile(latencies, 0.5)),
    'p99 s': float(np.quantile(latencies, 0.99)),
    'lost': lost,
    'equal texts': f'{same} of {len(texts) * (len(found["server"]) - 1)}',
  }


def _bare(
  engine: engine_lib.Engine,
  requests: Sequence[engine_lib.Request],
  *,
  report: bool,
) -> tuple[float, list[tuple[str | None, float]]]:
  """Runs the requests; returns seconds, and texts with their seconds."""
  start, texts = time.perf_counter(), {}
  ignore = (lambda number, tokens: None) if report else None
  for i, completion in engine.run(requests, ignore):
    texts[i] = completion.text, time.perf_counter() - start
  return time.perf_counter() - start, [texts[i] for i in range(len(requests))]


@contextlib.contextmanager
def _server(folder: pathlib.Path, rows: int):
  """Serves the model; yields the port."""
  port, log = tiny.free_port(), folder / 'log'
  flags = [f'--checkpoint={folder / "model"}', f'--port={port}']
  # The first loads compile: nothing may compile while others are timed.
  flags += [f'--batch_size={rows}', '--nowarm_up']
  # Not `tiny.start`, whose programs are compiled without optimisations.
  with open(log, 'ab') as file:
    process = subprocess.Popen(
      [sys.executable, '-m', 'encdec_adapt.serve', *flags],
      cwd=tiny.ROOT,
      stdout=file,
      stderr=file,
    )
  try:
    for _ in range(1200):
      assert process.poll() is None, log.read_text()
      with contextlib.suppress(OSError):
        http.client.HTTPConnection('127.0.0.1', port).connect()
        break
      time.sleep(0.1)
    yield port
  finally:
    process.terminate()
    process.wait()


def _load(
  port: int, bodies: Sequence[dict[str, Any]], clients: int
) -> tuple[float, list[tuple[str | None, float]]]:
  """Sends the requests; returns as `_bare`, None for the text of a lost one."""

  def answer(body: dict[str, Any]) -> tuple[str | None, float]:
    """Sends one request."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=600)
    text = None
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
      connection.request('POST', '/v1/completions', json.dumps(body))
      reply = connection.getresponse()
      content = reply.read().decode()
      if reply.status == 200:
        text = _text(content, body['stream'])
    connection.close()
    return text, time.perf_counter() - begun

  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(clients) as pool:
    answers = list(pool.map(answer, bodies))
  return time.perf_counter() - start, answers


def _text(content: str, streamed: bool) -> str | None:
  """Returns the text of a response, None of one that is not complete."""
  if not streamed:
    return json.loads(content)['choices'][0]['text']
  *events, last = content.strip().split('\n\n')
  if last != 'data: [DONE]':
    return None
  choices = [
    json.loads(event.removeprefix('data: '))['choices'][0] for event in events
  ]
  if not choices[-1]['finish_reason']:
    return None
  return ''.join(choice['text'] for choice in choices)


if __name__ == '__main__':
  main()
