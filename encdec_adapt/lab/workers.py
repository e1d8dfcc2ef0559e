"""Workers of a study: each runs ready stages until none is left.

Workers are processes on one machine with the same command and folder. The lock
of a stage is released when its worker dies; the next worker of the stage
resumes it.
"""

from collections.abc import Callable, Sequence
import datetime
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback

import jax

from encdec_adapt.base import errors, exit_status
from encdec_adapt.cluster import lock
from encdec_adapt.lab import pages, stage_states, stages
from encdec_adapt.telemetry import environment, progress

# Polling interval for stages of other workers, in seconds.
_POLL = 2.0
# Interval of repeated SIGTERMs, in seconds: a training past its last step drops
# the signal, and its worker would start the next stage.
_SIGNAL_INTERVAL = 10.0
# Commands without a model on a device.
_WITHOUT_DEVICES = ('materialize', 'convert')
# Runs a stage with its arguments; returns an exit status, and the rate chosen
# by a sweep.
Run = Callable[[stages.Stage, Sequence[str]], tuple[int, float | None]]


class _StoppedError(Exception):
  """A stage was interrupted; its exit status is the argument."""


def work(
  study: pages.Study, states: stage_states.States, run: Run, only: str = ''
) -> int:
  """Runs stages until no ready stage is left.

  A failed stage is marked as failed; stages independent of it still run.

  Args:
    study: the study.
    states: states of its stages.
    run: runs a stage.
    only: name of a single stage to run, even if it failed before; '' for all.

  Returns:
    0, 1 if a stage has failed, or the status of an interrupted stage.

  Raises:
    UserError: a stage needs devices missing on this worker, or `only` reads
      unfinished stages.
    InUseError: another worker runs `only`.
  """
  chosen = list(states.stages.values())
  if only:
    chosen = [states.stages[only]]
    if missing := states.missing(chosen[0]):
      raise errors.UserError(
        f'--stage={only} reads {", ".join(missing)}, not finished yet; run'
        ' these first, or the study without --stage.'
      )
  try:
    while chosen:
      waiting = []
      for stage in chosen:
        if only or not (
          states.status(stage) == 'finished' or states.failed(stage)
        ):
          if states.missing(stage) or not _take(
            study, states, stage, run, bool(only)
          ):
            waiting.append(stage)
      if len(waiting) == len(chosen):
        time.sleep(_POLL)
      chosen = waiting
  except _StoppedError as error:
    return error.args[0]
  ended = [states.stages[only]] if only else states.stages.values()
  return int(any(map(states.failed, ended)))


def _take(
  study: pages.Study,
  states: stage_states.States,
  stage: stages.Stage,
  run: Run,
  only: bool,
) -> bool:
  """Runs a stage unless another worker does; returns whether it has ended."""
  if study.platform and stage.module not in _WITHOUT_DEVICES:
    if jax.default_backend() != study.platform:
      raise errors.UserError(
        f'stage {stage.name} of study {study.name} needs a {study.platform},'
        f' and the devices of this worker are {jax.default_backend()}; start it'
        f' where a {study.platform} is, or choose another size.'
      )
  values = states.values(stage)
  arguments = [pages.fill(text, values) for text in stage.arguments]
  line = command_line(stage.module, arguments)
  try:
    with states.start(stage, line, again=only) as state:
      if state is None:
        return True
      resumed = f', start {state.starts}' if state.starts > 1 else ''
      print(f'\n[{stage.name}{resumed}]\n$ {line}', flush=True)
      date = datetime.date.today().isoformat()
      state.environment = environment.report() | {'date': date}
      try:
        status, state.rate = run(stage, arguments)
        state.error = f'exit status {status}' if status else ''
      except errors.AbsentError:
        raise  # The input is right: the same command resumes.
      except Exception as error:  # A failure is a result.
        if not isinstance(error, errors.UserError):
          traceback.print_exc()
        status = 1
        state.error = f'{type(error).__name__}: {error}'
      if status in stage_states.STOPPED:
        raise _StoppedError(status)
      state.status = 'failed' if state.error else 'finished'
  except lock.InUseError:
    if only:
      raise
    return False
  took = progress.format_seconds(state.seconds)
  if state.error:
    error = ' '.join(state.error.split())
    print(f'[{stage.name}] failed after {took}: {error}', flush=True)
  else:
    print(f'[{stage.name}] took {took}', flush=True)
  return True


def command_line(module: str, arguments: Sequence[str]) -> str:
  """Returns the command line for a shell, with this interpreter."""
  # Short and relative inside the repository, such as .venv/bin/python.
  python = os.path.relpath(sys.executable)
  python = sys.executable if python.startswith('..') else python
  return shlex.join([python, '-m', f'encdec_adapt.{module}', *arguments])


def default_jobs() -> int:
  """Returns the default number of workers: one per GPU, or per two cores."""
  return len(_gpus()) or max(len(cores()) // 2, 1)


def start(arguments: Sequence[str], jobs: int) -> list[int]:
  """Starts workers on this machine, each with a share of its cores or GPUs.

  Output lines are prefixed with the number of the worker. SIGTERM stops them
  all, and is repeated until they end; training saves its step.

  Args:
    arguments: arguments of `encdec_adapt.study` for a worker.
    jobs: number of workers.

  Returns:
    The exit status of each, after SIGTERM `exit_status.RESTART`.

  Raises:
    UserError: there are fewer cores, or GPUs, than workers.
  """
  gpus, shared = _gpus(), cores()
  if jobs > len(gpus or shared):
    raise errors.UserError(
      f'--jobs={jobs} workers cannot share {len(gpus)} GPUs and {len(shared)}'
      ' cores; give at most one for each.'
    )
  workers, threads, signals = [], [], []

  def stop(*signal_and_frame):
    signals.extend(signal_and_frame[:1])
    for worker in workers:
      worker.terminate()  # No effect if finished.

  previous = signal.signal(signal.SIGTERM, stop)
  try:
    for i in range(jobs):
      if signals:
        break
      variables = dict(os.environ)
      if gpus:
        variables['CUDA_VISIBLE_DEVICES'] = ','.join(gpus[i::jobs])
      # A child inherits the CPU affinity of this process.
      _set_cores(
        shared[i * len(shared) // jobs : (i + 1) * len(shared) // jobs]
      )
      workers.append(
        subprocess.Popen(
          [sys.executable, '-m', 'encdec_adapt.study', *arguments],
          env=variables,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
        )
      )
      thread = threading.Thread(target=_print_lines, args=(i, workers[-1]))
      thread.start()
      threads.append(thread)
    _set_cores(shared)
    if signals:
      stop()  # A worker that was starting.
    for worker in workers:
      while not _has_ended(worker):
        if signals:
          stop()
    statuses = [worker.returncode for worker in workers]
    return [exit_status.RESTART] * jobs if signals else statuses
  finally:
    _set_cores(shared)
    signal.signal(signal.SIGTERM, previous)
    stop()
    for thread in threads:
      thread.join()


def _has_ended(worker: subprocess.Popen) -> bool:
  try:
    worker.wait(_SIGNAL_INTERVAL)
  except subprocess.TimeoutExpired:
    return False
  return True


def _print_lines(number: int, worker: subprocess.Popen) -> None:
  for line in worker.stdout:
    print(f'[worker {number}] {line}', end='', flush=True)


def cores() -> list[int]:
  """Returns the cores available to this process."""
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS.
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def _set_cores(numbers: Sequence[int]) -> None:
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, numbers)


def _gpus() -> list[str]:
  # jax would reserve GPU memory in this process, which needs none.
  visible = os.environ.get('CUDA_VISIBLE_DEVICES')
  if os.environ.get('JAX_PLATFORMS', 'cuda').startswith('cpu'):
    return []
  if visible is not None:
    return [x for x in visible.split(',') if x]
  devices = pathlib.Path('/dev').glob('nvidia[0-9]*')
  return [str(i) for i in range(len(list(devices)))]
