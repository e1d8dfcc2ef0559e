"""Several processes of one job: starting, meeting, agreeing, failing as one.

They report to process 0 first (`cluster.rendezvous`), which says who is missing
and what differs between them, and which notices later when one is gone.

Processes meet at points that all of them come to in the same order. One that
fails goes to the next of them as well, with its error, wherever it was: the
others stop there with that error and its status instead of waiting for it.
Those that do not come, because their devices wait for the one that failed,
are told by the connections of the roll call, and end at once. Meetings are
barriers of the coordination service that `jax.distributed` starts, so they
need no device, and devices that wait for each other do not hold them up.
"""

import atexit
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import sys
import threading
import time
from typing import Any

import jax

# jax has no public names for the client of its coordination service, and for
# how it finds out who is who.
from jax._src import clusters
from jax._src import distributed as jax_distributed

from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import agreement, rendezvous
from encdec_adapt.telemetry import environment


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long processes wait for each other at a meeting.

  A dead process is noticed otherwise. This is for one that hangs, so it is
  several times what the slowest may need for what it does before it comes.

  Attributes:
    before: what that is, for the message.
    seconds: to wait.
  """

  before: str
  seconds: float


PROMPT = Patience('nothing long', 1800)
READING = Patience(
  'reading or writing a model, checkpoint or records', 6 * 3600
)
MAKING = Patience('making records', 24 * 3600)
# Seconds for all processes to come at the start: machines are not equally
# fast in starting, and in importing packages from a shared disk.
START = 300
# For the others to come to the next meeting when this process has failed, and
# for all to have left at the end: they come from a meeting.
_PARTING = 60
_NEEDS = (
  'coordinator=auto needs the machines of a TPU slice; elsewhere give'
  ' host:port, processes and process.'
)
_MESSAGE_LENGTH = 4000
# Value of --coordinator where the machines themselves say who is who.
AUTO = 'auto'

_met = 0  # How many meetings this process has been at.
_last = 'none'  # The last of them, and whether it is over.


@dataclasses.dataclass(frozen=True)
class _Place:
  """Which process this is, and where process 0 is; by default it is alone."""

  host: str = ''
  port: int = 0
  processes: int = 1
  process: int = 0
  devices: Any = None  # Of this process; None for all that it sees.


def _end(lost: str) -> None:
  """Ends this process because another one is gone."""
  print(f'{lost}; this process ends too.', file=sys.stderr, flush=True)
  faulthandler.dump_traceback(all_threads=True)
  os._exit(app.HANG)


def _end_with_peer(message: str, status: int) -> None:
  """Ends this process, wherever it is, as another one ended."""
  print(f'Error: {" ".join(message.split())}', file=sys.stderr, flush=True)
  os._exit(status)


_when_lost: Callable[[str], None] = _end
_line: rendezvous.Line | None = None


def initialize(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  *,
  told: Mapping[str, Any] | None = None,
  seconds: float = START,
) -> None:
  """Joins the other processes of the job; one process needs nothing.

  Call before any other use of jax.

  Args:
    coordinator: `host:port` of process 0, the same on every process; or
      'auto', alone, on TPU slices, where jax finds the others.
    processes: how many there are.
    process: which this is, from 0.
    told: nested mapping of what this process was told to do; refused where
      another one was told otherwise.
    seconds: to wait for all to come.

  Raises:
    UserError: only some of the three are given, they are out of range, or
      with 'auto' the machines do not say who is who; or the processes differ
      in versions, flags, `told`, clocks or devices.
    AbsentError: some process did not come.
  """
  place = _find_place(coordinator, processes, process, seconds)
  if place.processes == 1:
    return
  _call_roll(place, told or {}, seconds)
  # Only the CPU backend reads the first; cluster/preemption.py has use for
  # the second.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', True)
  jax.distributed.initialize(
    coordinator_address=f'{place.host}:{place.port}',
    num_processes=place.processes,
    process_id=place.process,
    local_device_ids=place.devices,
    # Under SLURM jax would leave each process the GPU of its number only.
    cluster_detection_method='deactivate',
    shutdown_timeout_seconds=_PARTING,
  )
  # Processes wait for each other's devices; from here on, they only meet.
  jax.devices()
  agree('devices', environment.devices(), PROMPT)


def _find_place(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  seconds: float,
) -> _Place:
  """Checks who is who, or finds it out; arguments as of `initialize`."""
  given = (coordinator, processes, process)
  if all(value is None for value in given):
    return _Place()
  devices = None
  if given == (AUTO, None, None):
    coordinator, processes, process, devices = _ask_machines(seconds)
  elif any(value is None for value in given):
    raise errors.UserError(
      f'coordinator is {coordinator}, processes {processes} and process'
      f' {process}: give all three for a job of several processes,'
      ' --coordinator=auto alone on TPU slices, or none.'
    )
  if processes < 1 or not 0 <= process < processes:
    raise errors.UserError(
      f'process is {process} of {processes}; processes count from 0.'
    )
  host, _, port = coordinator.rpartition(':')
  if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
    raise errors.UserError(
      f'coordinator is {coordinator!r}; give host:port of process 0.'
    )
  return _Place(host, int(port), processes, process, devices)


def _ask_machines(seconds: float) -> tuple[str, int, int, Any]:
  """Asks the machines of a TPU slice who is who.

  Returns:
    As jax has them: coordinator, processes, process, and the devices that
    this process is to use; None for all.

  Raises:
    AbsentError: the slice does not say, or its first machine has no address
      yet.
    UserError: these are not the machines of a TPU slice.
  """
  try:
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
      None, None, None, None, None, int(seconds)
    )
  except (RuntimeError, OSError) as error:
    raise errors.AbsentError(
      f'the processes of this job cannot be found ({error}): the machines of'
      ' this TPU slice do not answer yet; start the job again.'
    ) from error
  except ValueError as error:
    raise errors.UserError(
      f'the processes of this job cannot be found ({error}); {_NEEDS}'
    ) from error
  if None in found[:3]:
    raise errors.UserError(
      f'the processes of this job cannot be found; {_NEEDS}'
    )
  return found


def _call_roll(place: _Place, told: Mapping[str, Any], seconds: float) -> None:
  """Meets the others before jax does; see `cluster.rendezvous`."""
  own = agreement.Member(
    place.process, environment.host(), agreement.facts(told)
  )
  say = functools.partial(print, file=sys.stderr, flush=True)
  wait = dict(seconds=seconds, say=say)
  if place.process == 0:
    line = rendezvous.gather(place.port, place.processes, own, **wait)
  else:
    line = rendezvous.join(
      place.host.strip('[]'), place.port, place.processes, own, **wait
    )
  # Whatever ends this process in order runs this.
  atexit.register(line.leave)
  line.watch(lambda lost: _when_lost(lost), _end_with_peer)
  global _line
  _line = line


def when_lost(end: Callable[[str], None]) -> None:
  """Says what is to be called when another process is gone.

  Args:
    end: called in a thread, with a line that names the process; does not
      return. Before any is given, the process ends with `app.HANG`.
  """
  global _when_lost
  _when_lost = end


def is_lead() -> bool:
  """Whether this process writes what is written once: logs, metrics, seals."""
  return jax.process_index() == 0


def barrier(name: str, patience: Patience = READING) -> None:
  """Waits until every process is here; at once if there is only one.

  Args:
    name: of the place, for the message.
    patience: by what a process may be doing before it comes.

  Raises:
    PeerError: another process failed on its way here.
    AbsentError: somebody did not come in time, or process 0 is gone.
  """
  state = jax_distributed.global_state
  client = state.client
  if client is None:
    return
  global _met, _last
  here = _met = _met + 1
  _last = f'waiting at {name!r}, number {here}'
  late, began, failed = None, time.monotonic(), []
  try:
    client.wait_at_barrier(_key(here), int(patience.seconds * 1000))
    _last = f'left {name!r}, number {here}'
  except jax.errors.JaxRuntimeError as error:
    late = error
  waited = time.monotonic() - began
  try:
    failed = client.key_value_dir_get(_key(here, 'failed'))
  except jax.errors.JaxRuntimeError as error:
    late = late or error  # Process 0 is gone.
  if failed:
    _, text = min(failed, key=lambda item: _process(item[0]))
    said = json.loads(text)
    if late:  # Not all are here.
      _end_all(**said)
    raise errors.PeerError(**said) from late
  if late:
    others = f'at {name!r} for the other {state.num_processes - 1}'
    me = f'process {state.process_id} waited'
    if waited < patience.seconds:
      raise errors.AbsentError(
        f'{me} {waited:.1f} seconds {others}, and may not wait longer: {late}'
      ) from late
    raise errors.AbsentError(
      f'{me} {patience.seconds:g} seconds {others}, the limit where'
      f' {patience.before} comes before it; see what they say.'
    ) from late


def last_meeting() -> str:
  """The last meeting that this process came to, for reports."""
  return _last


def from_lead(
  find: Callable[[], Any],
  name: str = 'from_lead',
  patience: Patience = READING,
) -> Any:
  """Process 0 looks, every process is told.

  Args:
    find: called on process 0 only; returns what JSON can hold.
    name: of the meeting.
    patience: by what `find` does, and what was done before.

  Returns:
    What process 0 found.

  Raises:
    PeerError: process 0 failed to find it.
  """
  client = jax_distributed.global_state.client
  if client is None:
    return find()
  key = _key(_met + 1, 'found')
  if is_lead():
    client.key_value_set(key, json.dumps(find()))
  barrier(name, patience)
  return json.loads(client.key_value_try_get(key))


def agree(
  name: str, facts: Mapping[str, Any], patience: Patience = READING
) -> None:
  """Refuses to go on where processes differ.

  Args:
    name: of the meeting.
    facts: what has to be the same in all processes; JSON can hold it.
    patience: by what a process may be doing before it comes.

  Raises:
    UserError: they differ; all processes raise it, with fields, hosts and
      values.
  """
  state = jax_distributed.global_state
  client = state.client
  if client is None:
    return
  here = _met + 1
  own = {'host': environment.host(), 'facts': dict(facts)}
  client.key_value_set(
    _key(here, 'facts', str(state.process_id)), json.dumps(own)
  )
  barrier(name, patience)

  def compare():
    """On process 0, what everybody handed in."""
    handed_in = client.key_value_dir_get(_key(here, 'facts'))
    members = [
      agreement.Member(_process(key), **json.loads(value))
      for key, value in handed_in
    ]
    return agreement.problem(sorted(members, key=lambda m: m.process))

  problem = from_lead(compare, f'{name}, compared', PROMPT)
  if problem:
    raise errors.UserError(problem)


@contextlib.contextmanager
def failing_as_one() -> Iterator[None]:
  """Tells the other processes of an error that leaves this context.

  They raise `PeerError` where they next meet. If that is not soon, because
  they wait for this process's devices, they are ended where they are. All
  have the status that this process ends with.
  """
  try:
    yield
  except errors.PeerError:
    raise
  except errors.UserError as error:
    _tell(str(error), app.status(error))
    raise
  except Exception as error:
    _tell(f'{type(error).__name__}: {error}', app.status(error))
    raise
  except SystemExit as end:
    status = app.status(end)
    if status:
      _tell(f'it ended with status {status} and has said why.', status)
    raise


def _tell(message: str, status: int) -> None:
  """Goes to the next meeting with an error, and from there to all others."""
  state = jax_distributed.global_state
  client, me = state.client, state.process_id
  if client is None:
    return
  global _met
  here = _met = _met + 1
  said = {
    'message': (
      f'process {me} of {state.num_processes} failed, and this one stops with'
      f' it: {message[:_MESSAGE_LENGTH]}'
    ),
    'status': status,
  }
  all_met = threading.Event()

  def meet():
    """As long as who came first will wait, whatever is asked for here."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      client.key_value_set(_key(here, 'failed', str(me)), json.dumps(said))
      client.wait_at_barrier(_key(here), _PARTING * 1000)
      all_met.set()

  thread = threading.Thread(target=meet, daemon=True)
  thread.start()
  thread.join(_PARTING)
  if not all_met.is_set():
    _end_all(**said)


def _end_all(message: str, status: int) -> None:
  """Ends the others where they are, and lets this process end by itself."""
  _line.fail(message, status)
  # Before jax's, which would wait for all, and abort without them.
  atexit.register(_exit_at_once, status)


def _exit_at_once(status: int) -> None:
  """Ends this process, which has said why, without what jax does then."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def _key(meeting: int, *parts: str) -> str:
  return '/'.join(['encdec_adapt', 'meeting', str(meeting), *parts])


def _process(key: str) -> int:
  """The process that a key of a failure ends in."""
  return int(key.rsplit('/', 1)[1])
