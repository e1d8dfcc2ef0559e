"""Runs functions in fresh processes.

`run_jobs` distributes jobs over worker processes. `run_in_subprocess` makes a
single call, so that its memory and imports (TensorFlow, for sources `tfds:` and
`seqio:`) end with its process.

Neither re-imports the main module, so scripts and notebooks need no
`if __name__ == '__main__'`.

This module imports neither TensorFlow nor SeqIO; the functions may.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import process as process_pool
import contextlib
import multiprocessing
from multiprocessing import connection
import sys
import types
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.cluster import parent_death


def run_jobs(
  function: Callable[[Any], Any], jobs: Sequence[Any], workers: int
) -> Iterator[tuple[Any, Any]]:
  """Calls `function(job)` for every job; yields (job, result) on completion.

  If a job raises, pending jobs are cancelled, and the error is raised after
  running jobs have ended.

  Args:
    function: function to call, importable by name.
    jobs: picklable arguments, in start order.
    workers: number of processes; with 1, or a single job, this process.

  Raises:
    UserError: a worker process died.
  """
  workers = min(workers, len(jobs))
  if workers <= 1:
    for job in jobs:
      yield job, function(job)
    return
  with futures.ProcessPoolExecutor(
    workers,
    # A fork of a multi-threaded process may deadlock.
    multiprocessing.get_context('spawn'),
    # Orphans would write the same shards as the next run.
    initializer=parent_death.end_with_parent,
  ) as pool:
    with _main_hidden(function):
      pending = {pool.submit(function, job): job for job in jobs}
    try:
      for future in futures.as_completed(pending):
        yield pending[future], future.result()
    except process_pool.BrokenProcessPool:
      # The pool names neither the dead process nor its job.
      raise errors.UserError(
        f'a worker of {len(jobs)} jobs such as {jobs[0]} died; if it was'
        ' killed for lack of memory, use fewer workers. Run the same command'
        ' again: finished shards are kept'
      ) from None
    finally:
      pool.shutdown(cancel_futures=True)


def run_in_subprocess(function: Callable[..., Any], *args: Any) -> None:
  """Calls `function(*args)` in a fresh process and waits for it.

  The subprocess ends with this process, even if this process is killed.

  Args:
    function: function to call, importable by name; its result is discarded.
    *args: picklable arguments.

  Raises:
    UserError: the function raised it, or the process died.
  """
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_call, args=(sender, function, *args))
  with _main_hidden(function):
    process.start()
  sender.close()  # Otherwise `recv` would not detect the process's end.
  try:
    with contextlib.suppress(EOFError):
      raise receiver.recv()
    process.join()
  except BaseException:  # Also Ctrl-C and SystemExit of signal handlers.
    process.terminate()
    process.join()
    raise
  if process.exitcode:
    raise errors.UserError(
      f'the process of {function.__module__}.{function.__name__} ended with'
      f' status {process.exitcode}; see its output above.'
    )


@contextlib.contextmanager
def _main_hidden(function: Callable[..., Any]) -> Iterator[None]:
  """Keeps processes started in the context from importing the main module.

  Args:
    function: function called by the processes.
  """
  main = sys.modules['__main__']
  # A function defined in the main module needs it.
  if function.__module__ != main.__name__:
    sys.modules['__main__'] = types.ModuleType(main.__name__)
  try:
    yield
  finally:
    sys.modules['__main__'] = main


def _call(
  sender: connection.Connection, function: Callable[..., Any], *args: Any
) -> None:
  parent_death.end_with_parent()  # An orphan would hold the records' locks.
  try:
    sys.exit(function(*args))
  except (errors.UserError, KeyboardInterrupt) as error:
    sender.send(error)
