"""Starts the processes of a job, synchronizes them, and ends them together.

Everything uses the client and service of jax's coordination service. Only this
module holds them (jax has no public names for them):

- Start: the service of process 0 waits until all processes have registered. On
  timeout, jax aborts all processes with status 134 (`exit_status.ABORT`) and
  lists the indices of the missing processes. If process 0 is missing or dies,
  the others name it and exit with status 76 (`exit_status.HANG`). Versions,
  flags and devices are compared before the first program runs.
- Barriers use no device, so that a device deadlock does not block them; each
  has a timeout.
- Failure: a failing process publishes its error under a key. A thread of every
  other process polls this key and ends its process with the same error and
  status, even if it is blocked in a collective.
- Death: a killed process stops sending heartbeats, and jax aborts the others
  with status 134 after `_HEARTBEAT_TIMEOUT` seconds (immediately for process
  0).
- Delay: a backend times out if a process is late for the first collective
  (Gloo after 30 s), due to a longer compilation. All exit with status 76.
"""

import atexit
from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import platform
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

from encdec_adapt.base import errors, exit_status
from encdec_adapt.cluster import consistency
from encdec_adapt.telemetry import environment

# Value of --coordinator for TPU slices, with all hosts in their metadata.
AUTO = 'auto'
# Seconds for process 0 to start, and again for all others: startup and imports
# from a shared disk vary between machines.
START_TIMEOUT = 300
# Barrier timeouts in seconds. Heartbeats detect dead processes; these limits
# are for hangs: several times the slowest process's time for the work before
# the barrier.
READ_TIMEOUT = 6 * 3600  # Reading or writing a model, checkpoint or records.
MAKE_TIMEOUT = 24 * 3600  # Making records.

_HEARTBEAT_TIMEOUT = 30  # Seconds.
# Seconds for all processes to exit together, normally or after a failure.
# Longer than the heartbeat's: an error caused by the death of a peer then ends
# with jax's abort, which makes launchers restart, instead of status 1.
_END_TIMEOUT = 45
_RETRY = 0.5  # Seconds between two attempts to reach process 0.
_ANSWER = 3  # Seconds for an answer of process 0.
# Additional seconds after `START_TIMEOUT` for the service to name missing
# processes, and for the others to exit if it does not.
_NAMING, _REGISTER_GRACE = 3, 15
_POLL = 1.0  # Seconds between two polls for a failure of another process.
_FAILURE = 'encdec_adapt/failure'
_MESSAGE_LENGTH = 4000

_count = 0  # Synchronization points so far, equal on all processes.
_last_barrier = 'none'
_ending = threading.Event()  # Set when this process is ending.


def initialize(
  coordinator: str | None,
  processes: int | None,
  process: int | None,
  *,
  flags: Mapping[str, Any] | None = None,
  timeout: float = START_TIMEOUT,
) -> None:
  """Connects this process to the others of its job; call before using jax.

  Does nothing for a job of a single process.

  Args:
    coordinator: `host:port` of process 0, equal on all processes; or 'auto'
      alone on TPU slices, to detect the other arguments.
    processes: number of processes.
    process: 0-based index of this process.
    flags: nested mapping of this job's flags, JSON serializable; must be equal
      on all processes.
    timeout: seconds for process 0 to start, and again for the others.

  Raises:
    UserError: only some of the three are given, they are out of range, or
      'auto' is used outside of a TPU slice; the port is in use; or the
      processes differ in versions, flags or devices.
    AbsentError: process 0 cannot be reached.
  """
  if (coordinator, processes, process) == (AUTO, None, None):
    coordinator, processes, process = _detect(timeout)
  arguments = (coordinator, processes, process)
  if arguments == (None, None, None):
    return
  if None in arguments:
    raise errors.UserError(
      f'coordinator is {coordinator}, processes {processes} and process'
      f' {process}: give all three for a job of several processes,'
      ' --coordinator=auto alone on TPU slices, or none.'
    )
  if not 0 <= process < processes:
    raise errors.UserError(
      f'process is {process} of {processes}; processes count from 0.'
    )
  host, _, port = coordinator.rpartition(':')
  if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
    raise errors.UserError(
      f'coordinator is {coordinator!r}; give host:port of process 0.'
    )
  if processes == 1:
    return
  _connect(host, int(port), processes, process, timeout)
  watcher = threading.Thread(target=_end_with_failed_peer, daemon=True)
  watcher.start()
  # A thread inside the client at Python's exit would abort it. Handlers run in
  # reverse order: the event ends the thread, which is then joined.
  atexit.register(watcher.join)
  atexit.register(_ending.set)
  facts = consistency.process_facts(flags or {})
  require_same('start', {'processes': processes, **facts})
  # Creating the backend waits for the devices of all processes.
  jax.devices()
  require_same('devices', environment.devices())


def _detect(timeout: float) -> tuple[str, int, int]:
  """Detects the processes of a TPU slice from its metadata.

  Returns:
    Coordinator, number of processes, and index of this process.

  Raises:
    AbsentError: the slice does not answer, or its first machine has no
      address yet.
    UserError: these machines form no TPU slice.
  """
  try:
    arguments = clusters.ClusterEnv.auto_detect_unset_distributed_params(
      None, None, None, None, None, int(timeout)
    )[:3]
  except (RuntimeError, OSError) as error:
    raise errors.AbsentError(
      f'the processes of this job cannot be found ({error}): the machines of'
      ' this TPU slice do not answer yet; start the job again.'
    ) from error
  except ValueError:
    arguments = (None,)
  if None in arguments:
    raise errors.UserError(
      'the processes of this job cannot be found; coordinator=auto needs the'
      ' machines of a TPU slice; elsewhere give host:port, processes and'
      ' process.'
    )
  return arguments


def _connect(
  host: str, port: int, processes: int, process: int, timeout: float
) -> None:
  """Starts the service on process 0 and registers this process with it.

  `jax.distributed.initialize` gives the service an hour for registration. The
  service names the missing processes only if its timeout is shorter than the
  clients'.
  """
  state, seconds = jax_distributed.global_state, max(1, int(timeout))
  if process == 0:
    _require_free(port)
    state.service = _jax.get_distributed_runtime_service(
      f'[::]:{port}',
      processes,
      heartbeat_timeout=_HEARTBEAT_TIMEOUT,
      cluster_register_timeout=seconds,
      shutdown_timeout=_END_TIMEOUT,
    )
  else:
    _wait_for_coordinator(host, port, timeout)
  # Only the CPU backend reads the first option; `preemption` needs the second.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', True)
  address = f'{host}:{port}'
  client = _jax.get_distributed_runtime_client(
    address,
    process,
    init_timeout=seconds + _REGISTER_GRACE,
    heartbeat_timeout=_HEARTBEAT_TIMEOUT,
    shutdown_timeout=_END_TIMEOUT,
    use_compression=True,
  )
  registered = threading.Event()
  if process:
    threading.Thread(
      target=_end_without_coordinator,
      args=(host, port, timeout, registered),
      daemon=True,
    ).start()
  client.connect()
  registered.set()
  state.client, state.process_id = client, process
  state.num_processes, state.coordinator_address = processes, address
  state.initialize_preemption_sync_manager()


def _require_free(port: int) -> None:
  """Checks that a port is free, as gRPC would share it with another job."""
  try:
    socket.create_server(('', port)).close()
  except OSError as error:
    raise errors.UserError(
      f'port {port} of the coordinator cannot be listened at'
      f' ({error.strerror}); if another job has it, give another port in'
      ' --coordinator, to all processes.'
    ) from error


def _wait_for_coordinator(host: str, port: int, timeout: float) -> None:
  """Waits for process 0 to answer; jax would abort without naming it."""
  deadline = time.monotonic() + timeout
  while reason := _silence(host, port):
    if time.monotonic() > deadline:
      raise errors.AbsentError(
        f'process 0 at {host}:{port} has not answered in {timeout:g} s'
        f' ({reason}); read its log, and check that its machine is up and its'
        ' port can be reached from here.'
      )
    time.sleep(_RETRY)


def _silence(host: str, port: int) -> str:
  """Returns why process 0 does not answer; '' if it does.

  Reads gRPC's greeting: the kernel of a stopped process still accepts
  connections.
  """
  try:
    with socket.create_connection((host.strip('[]'), port), _ANSWER) as link:
      return '' if link.recv(1) else 'it has closed the connection'
  except OSError as error:
    return str(error)


def _end_without_coordinator(
  host: str, port: int, timeout: float, registered: threading.Event
) -> None:
  """Ends this process if process 0 dies during registration; runs in a thread.

  Heartbeats begin after registration. Until then, jax would retry for the full
  timeout, even if process 0 dies while it confirms the registration, and would
  not name process 0.
  """
  deadline = time.monotonic() + timeout + _NAMING
  answered = time.monotonic()
  while not registered.wait(_POLL):
    now = time.monotonic()
    reason = _silence(host, port)
    if not reason:
      answered = now
    # This process may have registered during the probe above.
    elif registered.is_set():
      return
    elif now > min(deadline, answered + _HEARTBEAT_TIMEOUT):
      print(
        f'Error: process 0 at {host}:{port} ended or hangs before all processes'
        f' of this job had registered ({reason}); read its log, and start the'
        ' job again.',
        file=sys.stderr,
      )
      _exit_at_once(exit_status.HANG)


def is_lead() -> bool:
  """Returns whether this is process 0, which writes logs and shared files."""
  return jax_distributed.global_state.process_id == 0


def log(text: str) -> None:
  """Prints a text on process 0."""
  if is_lead():
    print(text)


def count_and_index() -> tuple[int, int]:
  """Returns the number of processes, and this process's 0-based index."""
  state = jax_distributed.global_state
  return state.num_processes or 1, state.process_id


def barrier(name: str, timeout: float = READ_TIMEOUT) -> None:
  """Waits until every process has reached this barrier.

  All processes must reach the same barriers in the same order. Returns at
  once in a job of a single process.

  Args:
    name: shown in errors.
    timeout: seconds to wait.

  Raises:
    AbsentError: a process did not arrive in time.
  """
  client = jax_distributed.global_state.client
  if client is not None:
    with _waiting(name, timeout):
      client.wait_at_barrier(_next_key(name), int(timeout * 1000))


def last_barrier() -> str:
  """Returns the last synchronization point of this process, for reports."""
  return _last_barrier


def from_lead(compute: Callable[[], Any], name: str = 'from_lead') -> Any:
  """Computes a value on process 0 and returns it on every process.

  Args:
    compute: called only on process 0; its result must be JSON serializable.
    name: shown in errors.

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
    with _waiting(name, READ_TIMEOUT):
      value = client.blocking_key_value_get(key, READ_TIMEOUT * 1000)
  return json.loads(value)


def gather(name: str, value: Any) -> list[Any]:
  """Returns the values of all processes, by index, on every process.

  Args:
    name: shown in errors.
    value: JSON serializable.

  Raises:
    AbsentError: a process did not arrive in time.
  """
  state = jax_distributed.global_state
  if state.client is None:
    return [value]
  folder = _post(name, value)
  values = _posted(folder)
  # Delete the values, as each step of a job may gather, but only after all
  # processes have read them.
  barrier(name)
  state.client.key_value_delete(f'{folder}/{state.process_id}')
  return values


def _post(name: str, value: Any) -> str:
  """Posts the values of all processes; returns the folder of their keys."""
  folder, state = _next_key(name), jax_distributed.global_state
  key = f'{folder}/{state.process_id}'
  state.client.key_value_set(key, json.dumps(value))
  # `_posted` does not wait for keys that are not set yet.
  barrier(name)
  return folder


def _posted(folder: str) -> list[Any]:
  client = jax_distributed.global_state.client
  # Sort by number, as keys are sorted as text: 10 before 2.
  entries = sorted(
    (int(key.rpartition('/')[2]), value)
    for key, value in client.key_value_dir_get(folder)
  )
  return [json.loads(value) for _, value in entries]


def require_same(name: str, facts: Mapping[str, Any]) -> None:
  """Checks that facts are equal on all processes.

  Args:
    name: shown in errors.
    facts: the facts, JSON serializable.

  Raises:
    UserError: they differ; raised on all processes, with fields, values and
      hosts.
  """
  if jax_distributed.global_state.client is None:
    return
  folder = _post(name, [platform.node(), dict(facts)])

  def compare() -> str:
    return consistency.describe_differences(
      {
        f'process {process} ({host})': facts
        for process, (host, facts) in enumerate(_posted(folder))
      }
    )

  # Compared only by process 0: on a pod, reading all facts on every process
  # would be slow.
  if difference := from_lead(compare, name):
    raise errors.UserError(difference)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """Ends all other processes if this context exits with an exception.

  They print its message and exit with the status of this process, even if
  blocked in a collective.

  Raises:
    AbsentError: replaces jax's error about a late process.
  """
  # The inner context converts the error before it is published.
  try:
    with _naming_delays():
      yield
  except BaseException as error:
    if (
      exit_status.status(error)
      and jax_distributed.global_state.client is not None
    ):
      _publish_failure(error)
    raise


@contextlib.contextmanager
def _naming_delays() -> Iterator[None]:
  """Raises AbsentError (restartable) for a backend's timeout."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    # A single process waits for no peer. jax has no type for this status.
    has_peers = jax_distributed.global_state.client is not None
    if not has_peers or 'DEADLINE_EXCEEDED' not in str(error):
      raise
    raise errors.AbsentError(
      f'another process of this job was late ({error}): its program took longer'
      ' to compile, or it hangs; start the job again. A folder of compiled'
      ' programs that all processes share, config.compute.compile_cache of'
      ' train, makes starts more even.'
    ) from error


def _publish_failure(error: BaseException) -> None:
  state, status = jax_distributed.global_state, exit_status.status(error)
  text = str(error)
  if isinstance(error, SystemExit):
    text = f'it exited with status {status} after an error message.'
  elif not isinstance(error, errors.UserError):
    text = f'{type(error).__name__}: {error}'
  _ending.set()
  message = (
    f'process {state.process_id} of {state.num_processes} failed, and this'
    f' one ends with it: {text[:_MESSAGE_LENGTH]}'
  )
  # Fails if another process has already published its failure.
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    failure = json.dumps({'message': message, 'status': status})
    state.client.key_value_set(_FAILURE, failure)
  _leave_together(state.client)
  # Runs before jax's handler, which would wait for the other processes
  # and abort without them.
  atexit.register(_exit_at_once, status)


def _end_with_failed_peer() -> None:
  client = jax_distributed.global_state.client
  while not _ending.wait(_POLL):
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # No such key.
      failure = json.loads(client.key_value_try_get(_FAILURE))
      message = ' '.join(failure['message'].split())
      print(f'Error: {message}', file=sys.stderr, flush=True)
      _leave_together(client)
      _exit_at_once(failure['status'])


def _leave_together(client: Any) -> None:
  try:
    client.wait_at_barrier(_FAILURE, _END_TIMEOUT * 1000)
    # jax aborts the others as soon as the service of process 0 ends.
    time.sleep(1 if is_lead() else 0)
  except jax.errors.JaxRuntimeError:
    time.sleep(5)  # A process is dead, and jax is about to abort the others.


def _exit_at_once(status: int) -> None:
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


@contextlib.contextmanager
def _waiting(name: str, timeout: float) -> Iterator[None]:
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
  """Returns a new key, equal on all processes."""
  global _count
  _count += 1
  return f'encdec_adapt/{_count}/{name}'
