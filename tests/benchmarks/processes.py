"""The cost of several processes: two with one device each against one with two.

Both jobs train the same model on the same batch over a mesh of two devices of
the host, so that the work is the same; the ratio is what gloo between
processes, and a Python each, take over threads of one process. The jobs take
turns step by step, so that noise of the machine affects both.
"""

from collections.abc import Sequence
import functools
import sys
from typing import Any

from tests import tiny
from tests.benchmarks import results, training_step

DEVICES = 2
JOBS = (1, 2)  # Processes of a job.


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints; ratios are to one process."""
  flags = list(sys.argv[1:] if argv is None else argv)
  parser = results.parser(__doc__, **training_step.MODEL, dtype='float32')
  arguments = parser.parse_args(flags)
  jobs = {count: _start(count, arguments) for count in JOBS}
  found = results.take_turns(
    {count: functools.partial(_step, job) for count, job in jobs.items()},
    arguments.steps,
  )
  rows = []
  for count, (first, *rest) in found.items():
    for worker in jobs[count]:
      worker.close()
    seconds = results.median(rest, 'seconds')
    rows.append(
      {
        'processes': count,
        'devices each': DEVICES // count,
        'tokens/s': training_step.tokens_of(arguments) / seconds,
        'step s': seconds,
        'first step s': first['seconds'],
        'loss, last': rest[-1]['loss'],
      }
    )
  for row in rows:
    row['time ratio'] = row['step s'] / rows[0]['step s']
  return results.report('processes', rows, arguments)


def _start(count: int, arguments) -> list[training_step.Worker]:
  """Starts the processes of a job."""
  flags = [f'--{n}={getattr(arguments, n)}' for n in training_step.MODEL]
  flags.append(f'--coordinator=127.0.0.1:{tiny.free_port()}')
  flags.append(f'--processes={count}')
  environment = tiny.environment(DEVICES // count)
  return [
    training_step.Worker(
      'ours', arguments.dtype, [*flags, f'--process={index}'], environment
    )
    for index in range(count)
  ]


def _step(job: list[training_step.Worker]) -> dict[str, float]:
  """Runs a step, which takes as long as its slowest process."""
  for worker in job:
    worker.start()
  answers = [worker.finish() for worker in job]
  seconds = max(answer['seconds'] for answer in answers)
  return {**answers[0], 'seconds': seconds}


if __name__ == '__main__':
  main()
