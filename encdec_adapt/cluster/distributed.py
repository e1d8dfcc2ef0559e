"""Starts the processes of a job, synchronises them, and ends them together.

Everything runs over the client and service of jax's coordination service,
which this module alone holds (jax has no public names for them):

- Start: the service of process 0 waits until all processes have registered.
  If some have not in time, jax aborts the others with status 134
  (`app.ABORT`) and a message that lists the missing process numbers. Then
  versions, flags and devices are compared before the first program runs.
- Barriers need no device, so that devices that wait for each other do not
  hold them up; every one has a timeout.
- Failure: a process that fails publishes its error under one key. A thread of
  every other process polls that key and ends the process with the same error
  and status, even where it is blocked in a collective.
- Death: a process that is killed stops sending heartbeats, and jax aborts the
  others with status 134 after `_HEARTBEAT_TIMEOUT` seconds (at once if it was
  process 0).
"""

import atexit
from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import jax

# jax has no public names for the client and service of its coordination
# service, and for how it detects the processes of a cluster.
from jax._src import clusters
from jax._src import distributed as jax_distributed
from jax._src.lib import _jax

from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import consistency
from encdec_adapt.telemetry import environment

# Value of --coordinator for TPU slices, whose metadata lists all hosts.
AUTO = 'auto'
# Seconds for all processes to come up: machines differ in how fast they start
# and import packages from a shared disk.
START_TIMEOUT = 300
# Seconds to wait at a barrier. A dead process is noticed by its heartbeat;
# these are for one that hangs, so they are several times what the slowest
# process may need for the work before the barrier.
READ_TIMEOUT = 6 * 3600  # Reading or writing a model, checkpoint or records.
MAKE_TIMEOUT = 24 * 3600  # Making records.

_HEARTBEAT_TIMEOUT = 30  # Seconds.
# For all processes to leave together, in order or after a failure. Longer than
# the one above: an error that the death of another process has caused ends
# with jax's abort, on which launchers restart, and not with status 1.
_END_TIMEOUT = 45
_RETRY = 0.5  # Seconds between two attempts to reach process 0.
_POLL = 1.0  # Seconds between two polls for a failure of another process.
_FAILURE = 'encdec_adapt/failure'
_MESSAGE_LENGTH = 4000

_count = 0  # Synchronisation points so far, the same in all processes.
_last_barrier = 'none'
_ending = threading.Event()  # Set when this process is ending.


@dataclasses.dataclass(frozen=True)
class _Address:
  """Which process this is, and where process 0 listens; one by default."""

  host: str = ''
  port: int = 0
  processes: int = 1
  process: int = 0
  devices: Any = None  # Numbers of the local devices to use; None for all.


def initialize(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  *,
  flags: Mapping[str, Any] | None = None,
  timeout: float = START_TIMEOUT,
) -> None:
  """Connects this process to the others of its job; call before using jax.

  Does nothing for a job of one process.

  Args:
    coordinator: `host:port` of process 0, the same on every process; or
      'auto', alone, on TPU slices, where jax finds the others.
    processes: number of processes.
    process: 0-based index of this process.
    flags: nested mapping of this job's flags, which must be the same on all
      processes; JSON serialisable.
    timeout: seconds for all processes to come up.

  Raises:
    UserError: only some of the three are given, they are out of range, or
      'auto' is used on machines that are no TPU slice; the port is taken; or
      the processes differ in versions, flags or devices.
    AbsentError: process 0 cannot be reached.
  """
  address = _find_address(coordinator, processes, process, timeout)
  if address.processes == 1:
    return
  _connect(address, timeout)
  watcher = threading.Thread(target=_end_with_failed_peer, daemon=True)
  watcher.start()
  # A thread that is inside the client when Python ends would abort it.
  atexit.register(watcher.join)
  atexit.register(_ending.set)
  facts = consistency.process_facts(flags or {})
  require_same('start', {'processes': address.processes, **facts})
  # Creating the backend waits for the devices of all processes.
  jax.devices()
  require_same('devices', environment.devices())


def _find_address(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  timeout: float,
) -> _Address:
  """Checks or detects the addresses; arguments as for `initialize`."""
  given = (coordinator, processes, process)
  if all(value is None for value in given):
    return _Address()
  devices = None
  if given == (AUTO, None, None):
    coordinator, processes, process, devices = _detect(timeout)
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
  return _Address(host, int(port), processes, process, devices)


def _detect(timeout: float) -> tuple[str, int, int, Any]:
  """Detects the processes of a TPU slice from its metadata.

  Returns:
    Coordinator, number of processes, index of this process, and the numbers
    of the local devices that it is to use (None for all).

  Raises:
    AbsentError: the slice does not answer, or its first machine has no
      address yet.
    UserError: these are not the machines of a TPU slice.
  """
  try:
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
      None, None, None, None, None, int(timeout)
    )
  except (RuntimeError, OSError) as error:
    raise errors.AbsentError(
      f'the processes of this job cannot be found ({error}): the machines of'
      ' this TPU slice do not answer yet; start the job again.'
    ) from error
  except ValueError:
    found = (None,)
  if None in found[:3]:
    raise errors.UserError(
      'the processes of this job cannot be found; coordinator=auto needs the'
      ' machines of a TPU slice; elsewhere give host:port, processes and'
      ' process.'
    )
  return found


def _connect(address: _Address, timeout: float) -> None:
  """Starts the service on process 0 and registers this process with it.

  `jax.distributed.initialize` does the same, but gives the service an hour
  for registration: it must be shorter than the clients' for the service to
  say which process is missing.
  """
  state, seconds = jax_distributed.global_state, max(1, int(timeout))
  if address.process == 0:
    _require_free(address.port)
    state.service = _jax.get_distributed_runtime_service(
      f'[::]:{address.port}',
      address.processes,
      heartbeat_timeout=_HEARTBEAT_TIMEOUT,
      cluster_register_timeout=seconds,
      shutdown_timeout=_END_TIMEOUT,
    )
  else:
    _wait_for_coordinator(address, timeout)
  # Only the CPU backend reads the first; cluster/preemption.py uses the
  # second.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', True)
  if address.devices is not None:
    devices = ','.join(map(str, address.devices))
    jax.config.update('jax_cuda_visible_devices', devices)
    jax.config.update('jax_rocm_visible_devices', devices)
  client = _jax.get_distributed_runtime_client(
    f'{address.host}:{address.port}',
    address.process,
    init_timeout=seconds + _END_TIMEOUT,
    heartbeat_timeout=_HEARTBEAT_TIMEOUT,
    shutdown_timeout=_END_TIMEOUT,
    use_compression=True,
  )
  client.connect()
  state.client, state.process_id = client, address.process
  state.num_processes = address.processes
  state.coordinator_address = f'{address.host}:{address.port}'
  state.initialize_preemption_sync_manager()


def _require_free(port: int) -> None:
  """Refuses a port in use, which gRPC would share with the other job."""
  try:
    socket.create_server(('', port)).close()
  except OSError as error:
    raise errors.UserError(
      f'port {port} of the coordinator cannot be listened at'
      f' ({error.strerror}); if another job has it, give another port in'
      ' --coordinator, to all processes.'
    ) from error


def _wait_for_coordinator(address: _Address, timeout: float) -> None:
  """Waits until process 0 listens; jax would abort without naming it."""
  deadline = time.monotonic() + timeout
  while True:
    try:
      host = address.host.strip('[]')
      socket.create_connection((host, address.port), timeout).close()
      return
    except OSError as error:
      if time.monotonic() > deadline:
        raise errors.AbsentError(
          f'process 0 at {address.host}:{address.port} has not answered in'
          f' {timeout:g} s ({error}); see what it says, whether its machine is'
          ' up, and whether its port can be reached from here.'
        ) from error
      time.sleep(_RETRY)


def is_lead() -> bool:
  """Returns whether this is process 0, which writes logs and shared files."""
  return jax_distributed.global_state.process_id == 0


def barrier(name: str, timeout: float = READ_TIMEOUT) -> None:
  """Waits until every process has reached this barrier.

  All processes must reach the same barriers in the same order. Returns at
  once if there is only one process.

  Args:
    name: shown in errors.
    timeout: seconds to wait.

  Raises:
    AbsentError: some process did not come in time.
  """
  client = jax_distributed.global_state.client
  if client is not None:
    with _waiting(name, timeout):
      client.wait_at_barrier(_next_key(name), int(timeout * 1000))


def last_barrier() -> str:
  """Describes the last synchronisation point of this process, for reports."""
  return _last_barrier


def from_lead(
  compute: Callable[[], Any],
  name: str = 'from_lead',
  timeout: float = READ_TIMEOUT,
) -> Any:
  """Computes a value on process 0 and returns it on every process.

  Args:
    compute: called on process 0 only; its result must be JSON serialisable.
    name: shown in errors.
    timeout: seconds that the other processes wait.

  Raises:
    AbsentError: process 0 did not answer in time.
  """
  client = jax_distributed.global_state.client
  if client is None:
    return compute()
  key = _next_key(name)
  if is_lead():
    value = json.dumps(compute())
    client.key_value_set(key, value)
  else:
    with _waiting(name, timeout):
      value = client.blocking_key_value_get(key, int(timeout * 1000))
  return json.loads(value)


def require_same(
  name: str, facts: Mapping[str, Any], timeout: float = READ_TIMEOUT
) -> None:
  """Refuses to continue where processes differ.

  Args:
    name: shown in errors.
    facts: must be the same in all processes, and JSON serialisable.
    timeout: seconds to wait for the others.

  Raises:
    UserError: they differ; all processes raise it, with fields, values and
      hosts.
  """
  state = jax_distributed.global_state
  if state.client is None:
    return
  folder = _next_key(name)
  own = json.dumps([f'({environment.host()})', dict(facts)])
  state.client.key_value_set(f'{folder}/{state.process_id}', own)
  barrier(name, timeout)

  def compare() -> str:
    """Describes how the processes differ, on process 0."""
    found = {
      int(key.rpartition('/')[2]): json.loads(value)
      for key, value in state.client.key_value_dir_get(folder)
    }
    return consistency.describe_differences(
      {
        f'process {p} {host}': facts
        for p, (host, facts) in sorted(found.items())
      }
    )

  if difference := from_lead(compare, name, timeout):
    raise errors.UserError(difference)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """Ends all other processes if this context is left by an exception.

  They print its message and exit with the status of this process, even if
  they are blocked in a collective.
  """
  try:
    yield
  except BaseException as error:
    if status := app.status(error):
      text = str(error)
      if isinstance(error, SystemExit):
        text = f'it exited with status {status} after saying why.'
      elif not isinstance(error, errors.UserError):
        text = f'{type(error).__name__}: {error}'
      _publish_failure(text, status)
    raise


def _publish_failure(message: str, status: int) -> None:
  """Tells the other processes that this one fails, and waits for them."""
  state = jax_distributed.global_state
  if state.client is None:
    return
  _ending.set()
  failure = {
    'message': (
      f'process {state.process_id} of {state.num_processes} failed, and this'
      f' one ends with it: {message[:_MESSAGE_LENGTH]}'
    ),
    'status': status,
  }
  # Refused where another process has failed before this one.
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    state.client.key_value_set(_FAILURE, json.dumps(failure))
  _leave_together(state.client)
  # Runs before jax's own handler, which would wait for the other processes
  # and abort without them.
  atexit.register(_exit_at_once, status)


def _end_with_failed_peer() -> None:
  """Ends this process when another one publishes a failure; a thread."""
  client = jax_distributed.global_state.client
  while not _ending.wait(_POLL):
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # No such key.
      failure = json.loads(client.key_value_try_get(_FAILURE))
      message = ' '.join(failure['message'].split())
      print(f'Error: {message}', file=sys.stderr, flush=True)
      _leave_together(client)
      _exit_at_once(failure['status'])


def _leave_together(client: Any) -> None:
  """Waits until all processes have read the failure."""
  try:
    client.wait_at_barrier(_FAILURE, _END_TIMEOUT * 1000)
    # jax aborts the others as soon as the service of process 0 is gone.
    time.sleep(1 if is_lead() else 0)
  except jax.errors.JaxRuntimeError:
    time.sleep(5)  # A process is dead, and jax is about to abort this one.


def _exit_at_once(status: int) -> None:
  """Ends this process without jax's shutdown."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


@contextlib.contextmanager
def _waiting(name: str, timeout: float) -> Iterator[None]:
  """Notes a synchronisation point, and names it where the wait fails."""
  global _last_barrier
  _last_barrier = f'waiting at {name!r}'
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    process = jax_distributed.global_state.process_id
    raise errors.AbsentError(
      f'process {process} waited at {name!r} for the other processes, for at'
      f' most {timeout:g} s: {error}'
    ) from error
  _last_barrier = f'passed {name!r}'


def _next_key(name: str) -> str:
  """Returns a new key, the same in all processes."""
  global _count
  _count += 1
  return f'encdec_adapt/{_count}/{name}'
