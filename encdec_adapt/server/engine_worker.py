"""Runs the engine in a thread, for requests from asyncio.

`EngineThread` is used from the event loop; only its thread calls the engine.
Calls go to the thread through a queue, and results to the loop through
`call_soon_threadsafe`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
import contextlib
import dataclasses
import functools
import queue
import sys
import threading
import traceback
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.inference import engine as engine_lib

# New tokens, the completion, or a final error.
Event = engine_lib.Tokens | engine_lib.Completion | Exception


# Compared by identity, as `EngineThread.jobs` is a set.
@dataclasses.dataclass(eq=False)
class Job:
  """A request in the engine.

  Attributes:
    index: index of its choice in a call.
    request: the request.
    wants_tokens: whether to also send new tokens as events.
    span: slice of the prompt to score; None for none.
    loop: the event loop.
    events: the job and an event, of all jobs of the call.
    prompt: the scored slice, from the first event on; choices of a prompt share
      the list.
    number: number of the request; only the engine's thread uses it.
  """

  index: int
  request: engine_lib.Request
  wants_tokens: bool
  span: slice | None
  loop: asyncio.AbstractEventLoop
  events: asyncio.Queue[tuple['Job', Event]]
  prompt: list[engine_lib.Tokens]
  number: int | None = None

  def post(self, event: Event) -> None:
    """Sends an event from the thread to the loop."""
    with contextlib.suppress(RuntimeError):  # The loop is closed.
      self.loop.call_soon_threadsafe(self.events.put_nowait, (self, event))


class EngineThread:
  """Runs an engine in a thread; see the module.

  Attributes:
    engine: the engine; other threads use only `rows` and `load`, which do not
      change its state.
    jobs: unfinished requests.
    failed: fatal error of the engine; None while it works.
  """

  def __init__(self, engine: engine_lib.Engine, warm_up: Iterable[Any] = ()):
    """Starts a daemon thread.

    Args:
      engine: the engine.
      warm_up: steps of a preparation that are taken while no request is in
        progress.
    """
    self.engine, self.jobs = engine, set()
    self.failed: Exception | None = None
    self._calls: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._running: dict[int, Job] = {}
    self._warm_up = iter(warm_up)
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def submit(
    self,
    requests: Sequence[engine_lib.Request],
    spans: Sequence[slice | None],
    *,
    n: int,
    wants_tokens: bool,
  ) -> list[Job]:
    """Queues the requests of a call.

    Args:
      requests: the requests.
      spans: `span` of the job of each request.
      n: number of successive requests with the same prompt.
      wants_tokens: whether to also send new tokens as events.

    Returns:
      The jobs, to be passed to `release`. The last event of each is a
      completion or an exception.
    """
    shared = asyncio.get_running_loop(), asyncio.Queue()
    prompts: list[list[engine_lib.Tokens]] = [[] for _ in requests[::n]]
    jobs = [
      Job(i, request, wants_tokens, span, *shared, prompts[i // n])
      for i, (request, span) in enumerate(zip(requests, spans, strict=True))
    ]
    self.jobs.update(jobs)
    for job in jobs:
      self._calls.put(functools.partial(self._submit, job))
    return jobs

  def release(self, jobs: Sequence[Job]) -> None:
    """Releases jobs; cancels those that are unfinished."""
    # Safe for finished jobs and repeated calls: the row may have another
    # request by then, but numbers are never reused.
    self.jobs.difference_update(jobs)
    for job in jobs:
      self._calls.put(functools.partial(self._cancel, job))

  def close(self) -> None:
    """Ends the thread, as the process would abort while it computes."""
    self._calls.put(None)
    self._thread.join()

  def _submit(self, job: Job) -> None:
    if self.failed is not None:
      job.post(self.failed)
      return
    try:
      if job.span and not job.prompt:
        scored = self.engine.score_prompt(job.request)
        job.prompt.append(scored.part(job.span.start, job.span.stop))
      job.number = self.engine.submit(job.request)
      self._running[job.number] = job
    except Exception as error:
      # The state is intact: other requests continue.
      if not isinstance(error, errors.UserError):
        traceback.print_exc(file=sys.stderr)
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
          is_idle = self._calls.empty()
          if is_idle and next(self._warm_up, self) is not self:
            continue
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

  def _on_tokens(self, number: int, tokens: engine_lib.Tokens) -> None:
    job = self._running[number]
    if job.wants_tokens:
      job.post(tokens)
