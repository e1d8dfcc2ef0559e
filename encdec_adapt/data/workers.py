"""Runs functions in fresh processes.

`run_jobs` distributes jobs over worker processes. `concurrent.futures` does
not tell which job a worker had when it was killed (most often for memory),
so it is not used. `run_in_subprocess` makes a single call in a process of its
own, which keeps TensorFlow out of this one.

This module imports neither TensorFlow nor SeqIO; the functions may.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import multiprocessing
from multiprocessing import connection
import os
import sys
import time
import traceback
from typing import Any

from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import parent_death

# A job's function: (job, report) -> result, where report takes counts.
Report = Callable[[Mapping[str, int]], None]
Function = Callable[[Any, Report], Any]
_REPORT_SECONDS = 1.0


@dataclasses.dataclass
class _Worker:
  """A process, our end of its pipe, and the job it is at (None: idle)."""

  process: multiprocessing.process.BaseProcess
  pipe: connection.Connection
  job: Any = None


def run_jobs(
  function: Function,
  jobs: Sequence[Any],
  workers: int,
  *,
  on_report: Report,
  on_result: Callable[[Any, Any], None],
) -> None:
  """Runs every job once.

  Args:
    function: makes the result of a job and may `report` counts on the way,
      each since the one before; importable by name.
    jobs: in the order in which they are started; their names are in errors.
    workers: processes; 1 runs the jobs in this one.
    on_report: called here with reported counts.
    on_result: called here with a job and its result.

  Raises:
    UserError: a job raised one, or a worker died; names the job.
    RuntimeError: a job raised anything else; has its traceback.
  """
  if workers == 1:
    for job in jobs:
      on_result(job, function(job, on_report))
    return
  context = multiprocessing.get_context('spawn')
  started: list[_Worker] = []
  try:
    for _ in range(min(workers, len(jobs))):
      ours, theirs = context.Pipe()
      process = context.Process(
        target=_serve, args=(function, theirs), daemon=True
      )
      process.start()
      theirs.close()
      started.append(_Worker(process, ours))
    _distribute(list(jobs), started, on_report, on_result)
  finally:
    for worker in started:
      # Closing the pipe ends an idle worker; one at work is stopped.
      worker.pipe.close()
      if worker.job is not None:
        worker.process.terminate()
      worker.process.join()


def _distribute(jobs, workers, on_report, on_result) -> None:
  """Hands out jobs until all have results."""
  waiting = jobs[::-1]
  for worker in workers:
    worker.job = waiting.pop()
    worker.pipe.send(worker.job)
  by_pipe = {worker.pipe: worker for worker in workers}
  while any(worker.job is not None for worker in workers):
    busy = [w.pipe for w in workers if w.job is not None]
    for pipe in connection.wait(busy):
      worker = by_pipe[pipe]
      kind, value = _receive(worker)
      if kind == 'report':
        on_report(value)
      elif kind == 'user_error':
        raise errors.UserError(value)
      elif kind == 'error':
        raise RuntimeError(f'{worker.job} failed in a worker:\n{value}')
      else:
        on_result(worker.job, value)
        worker.job = waiting.pop() if waiting else None
        if worker.job is not None:
          worker.pipe.send(worker.job)


def _receive(worker: _Worker) -> tuple[str, Any]:
  """The next message of a busy worker."""
  try:
    return worker.pipe.recv()
  except (EOFError, ConnectionResetError):
    worker.process.join()
    code = worker.process.exitcode
    how = f'signal {-code}' if code < 0 else f'status {code}'
    raise errors.UserError(
      f'the worker that made {worker.job} died ({how}); if it was killed for'
      ' want of memory, use fewer workers. Run the same command again:'
      ' finished shards are kept'
    ) from None


def _serve(function: Function, pipe: connection.Connection) -> None:
  """A worker: takes jobs until the pipe closes."""
  # Closing it stops an idle worker only; two at one shard would spoil it.
  parent_death.end_with_parent()
  pending: dict[str, int] = {}
  last = time.monotonic()

  def report(counts: Mapping[str, int]) -> None:
    nonlocal last
    for key, value in counts.items():
      pending[key] = pending.get(key, 0) + value
    if time.monotonic() - last >= _REPORT_SECONDS:
      flush()
      last = time.monotonic()

  def flush() -> None:
    pipe.send(('report', dict(pending)))
    pending.clear()

  # The parent's death closes the pipe; its interrupt reaches us as well.
  with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
    while True:
      job = pipe.recv()
      try:
        result = ('result', function(job, report))
        flush()
      except errors.UserError as error:
        result = ('user_error', str(error))
      except BrokenPipeError:  # From `report`.
        raise
      except Exception:
        result = ('error', traceback.format_exc())
      pipe.send(result)


def run_in_subprocess(function: Callable[..., Any], *args: Any) -> None:
  """Calls `function(*args)` in a fresh process and waits for its end.

  The process dies with this one, even if this one is killed.

  Args:
    function: must be importable by name; its result is discarded.
    *args: arguments that can be pickled.

  Raises:
    UserError: the process died.
    SystemExit: the function raised a UserError, which the process printed.
  """
  # TensorFlow reads it when it is loaded, before any code of ours runs.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  context = multiprocessing.get_context('spawn')
  process = context.Process(target=_call_and_exit, args=(function, *args))
  process.start()
  try:
    process.join()
  except BaseException:
    process.terminate()
    process.join()
    raise
  if process.exitcode == app.USER_ERROR:
    sys.exit(app.USER_ERROR)  # The error is printed already.
  if process.exitcode:
    raise errors.UserError(
      f'the process of {function.__module__}.{function.__name__} ended with'
      f' status {process.exitcode}; see its output above.'
    )


def _call_and_exit(function: Callable[..., Any], *args: Any) -> None:
  """Calls the function and exits with its status; see `run_in_subprocess`."""
  parent_death.end_with_parent()  # An orphan would hold the records' locks.
  sys.exit(app.guard(lambda _: function(*args), None))
