"""What several processes cost: two of a device each against one of two.

Both jobs train the same model on the same batch over a mesh of two devices of
the host, so that the work is the same; the ratio is what gloo between
processes, and a Python each, take over threads of one process. The jobs take
turns step by step, so that whatever else the machine does disturbs both.
"""

import argparse
from collections.abc import Sequence
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from tests.benchmarks import results, training_step

DEVICES = 2
# Processes of a job.
JOBS = (1, 2)


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
  """Measures and prints; ratios are to one process."""
  parser = results.parser(__doc__)
  training_step.add_model(parser)
  parser.add_argument('--dtype', default='float32')
  for flag in ('coordinator', 'processes', 'process'):
    parser.add_argument(f'--{flag}', help=argparse.SUPPRESS)
  flags = list(sys.argv[1:] if argv is None else argv)
  arguments = parser.parse_args(flags)
  if arguments.process:
    _work(arguments)
    return None
  jobs = {count: _Job(count, flags) for count in JOBS}
  for _ in range(1 + arguments.steps):
    for job in jobs.values():
      job.step()
  tokens = arguments.batch_size * (
    arguments.encoder_length + arguments.decoder_length
  )
  rows = []
  for count, job in jobs.items():
    job.close()
    seconds = statistics.median(job.seconds[1:])
    rows.append(
      {
        'processes': count,
        'devices each': DEVICES // count,
        'tokens/s': tokens / seconds,
        'step s': seconds,
        'first step s': job.seconds[0],
        'loss, last': job.loss,
      }
    )
  for row in rows:
    row['time ratio'] = row['step s'] / rows[0]['step s']
  for flag in ('coordinator', 'processes', 'process'):
    delattr(arguments, flag)
  return results.report('processes', rows, arguments)


class _Job:
  """A job of one or more processes."""

  def __init__(self, count: int, flags: Sequence[str]):
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      coordinator = f'127.0.0.1:{probe.getsockname()[1]}'
    devices = f'--xla_force_host_platform_device_count={DEVICES // count}'
    self._processes = [
      subprocess.Popen(
        [sys.executable, '-m', 'tests.benchmarks.processes', *flags]
        + [f'--coordinator={coordinator}', f'--processes={count}']
        + [f'--process={index}'],
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': devices},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      for index in range(count)
    ]
    self.seconds: list[float] = []
    self.loss = 0.0

  def step(self) -> None:
    """Runs one step, as long as its slowest process takes."""
    for process in self._processes:
      process.stdin.write('step\n')
      process.stdin.flush()
    found = [_answer(process) for process in self._processes]
    self.seconds.append(max(answer['seconds'] for answer in found))
    self.loss = found[0]['loss']

  def close(self) -> None:
    """Ends the processes."""
    for process in self._processes:
      process.stdin.close()
    for process in self._processes:
      process.wait()


def _answer(process: subprocess.Popen) -> dict[str, float]:
  """What a worker says next; gloo speaks on its standard output too."""
  for line in process.stdout:
    if line.startswith('{'):
      return json.loads(line)
  raise SystemExit('a worker of the benchmark failed; see its error above')


def _work(arguments: argparse.Namespace) -> None:
  """Runs one step per line of standard input; answers in JSON lines."""
  from encdec_adapt.cluster import distributed

  distributed.initialize(
    arguments.coordinator, int(arguments.processes), int(arguments.process)
  )
  arguments.dtypes = [arguments.dtype]
  runs, _ = training_step.make_ours(arguments)
  run = runs['step']
  for _ in sys.stdin:
    start = time.perf_counter()
    loss = run()
    answer = {'seconds': time.perf_counter() - start, 'loss': loss}
    print(json.dumps(answer), flush=True)


if __name__ == '__main__':
  main()
