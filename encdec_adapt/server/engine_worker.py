"""Runs the engine in a thread, for requests from asyncio.

`EngineThread` is used from the event loop; only its thread calls the engine.
Calls go to the thread through a queue, and results to the loop through
`call_soon_threadsafe`.
"""

import asyncio
from collections.abc import Callable
import contextlib
import dataclasses
import queue
import sys
import threading
import traceback

import numpy as np

from encdec_adapt.inference import engine as engine_lib

# New tokens, the completion, or a final error.
Event = np.ndarray | engine_lib.Completion | Exception


# Compared by identity, as `EngineThread.jobs` is a set.
@dataclasses.dataclass(eq=False)
class Job:
  """A request in the engine; only its thread uses `number`."""

  request: engine_lib.Request
  wants_tokens: bool
  loop: asyncio.AbstractEventLoop
  events: asyncio.Queue[Event] = dataclasses.field(
    default_factory=asyncio.Queue
  )
  number: int | None = None

  def post(self, event: Event) -> None:
    """Sends an event from the thread to the loop."""
    with contextlib.suppress(RuntimeError):  # The loop is closed.
      self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class EngineThread:
  """Runs an engine in a thread; see the module.

  Attributes:
    engine: the engine; other threads use only `rows`, `load` and `complete`,
      which do not change its state.
    jobs: unfinished requests.
    failed: fatal error of the engine; None while it works.
  """

  def __init__(self, engine: engine_lib.Engine):
    """Starts a daemon thread."""
    self.engine, self.jobs = engine, set()
    self.failed: Exception | None = None
    self._calls: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._running: dict[int, Job] = {}
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def submit(self, request: engine_lib.Request, *, wants_tokens: bool) -> Job:
    """Queues a request.

    Args:
      request: the request.
      wants_tokens: whether to also send new tokens as events.

    Returns:
      The job, to be passed to `release`. Its last event is a completion or an
      exception.
    """
    job = Job(request, wants_tokens, asyncio.get_running_loop())
    self.jobs.add(job)
    self._calls.put(lambda: self._submit(job))
    return job

  def release(self, job: Job) -> None:
    """Releases a job; cancels it if unfinished."""
    # Safe for finished jobs and repeated calls: the row may have another
    # request by then, but numbers are never reused.
    self.jobs.discard(job)
    self._calls.put(lambda: self._cancel(job))

  def close(self) -> None:
    """Ends the thread, as the process would abort while it computes."""
    self._calls.put(None)
    self._thread.join()

  def _submit(self, job: Job) -> None:
    try:
      if self.failed is not None:
        raise self.failed
      job.number = self.engine.submit(job.request)
      self._running[job.number] = job
    except Exception as error:
      job.post(error)

  def _cancel(self, job: Job) -> None:
    if self._running.pop(job.number, None) is not None:
      self.engine.cancel(job.number)

  def _run(self) -> None:
    while True:
      try:
        # Block for calls only when idle; otherwise take the queued calls, so
        # that new requests fill free rows at the next step.
        while not (self._running and self._calls.empty()):
          call = self._calls.get()
          if call is None:
            return
          call()
        for number, completion in self.engine.step(self._on_tokens):
          self._running.pop(number).post(completion)
      except Exception as error:
        # The donated device state may be lost: later requests fail with the
        # same error, and the server stops.
        traceback.print_exc(file=sys.stderr)
        self.failed = error
        for job in self._running.values():
          job.post(error)
        self._running.clear()

  def _on_tokens(self, number: int, tokens: np.ndarray) -> None:
    job = self._running[number]
    if job.wants_tokens:
      # Copy, as a view would keep the tokens of all rows in memory.
      job.post(tokens.copy())
