"""Starts the processes of a job, synchronises them, and ends them together.

Everything runs over the client and service of jax's coordination service,
which this module alone holds (jax has no public names for them):

- Start: the service of process 0 waits until all processes have registered.
  If some have not in time, jax aborts the others with status 134
  (`exit_status.ABORT`) and a message that lists the missing process numbers. If
  process 0 is missing, or dies meanwhile, the others name it and exit with
  status 76 (`exit_status.HANG`). Then versions, flags and devices are compared
  before the first program runs.
- Barriers need no device, so that devices that wait for each other do not
  hold them up; each has a timeout.
- Failure: a process that fails publishes its error under a key. A thread of
  every other process polls that key and ends the process with the same error
  and status, even where it is blocked in a collective.
- Death: a process that is killed stops sending heartbeats, and jax aborts the
  others with status 134 after `_HEARTBEAT_TIMEOUT` seconds (at once if it was
  process 0).
- Delay: a backend gives up where a process is late for the first collective
  (Gloo after 30 s), as its program took longer to compile. All exit with
  status 76.
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

# Value of --coordinator for TPU slices: their metadata lists all hosts.
AUTO = 'auto'
# Seconds for process 0 to come up, and from then on for all others: machines
# differ in how fast they start and import packages from a shared disk.
START_TIMEOUT = 300
# Seconds to wait at a barrier. Heartbeats tell of a dead process; these limits
# are for a process that hangs: several times as long as the slowest process may
# need for the work before the barrier.
READ_TIMEOUT = 6 * 3600  # Reading or writing a model, checkpoint or records.
MAKE_TIMEOUT = 24 * 3600  # Making records.

_HEARTBEAT_TIMEOUT = 30  # Seconds.
# For all processes to leave together, in order or after a failure. Longer than
# the heartbeat's: an error that the death of another process has caused ends
# with jax's abort, on which launchers restart, and not with status 1.
_END_TIMEOUT = 45
_RETRY = 0.5  # Seconds between two attempts to reach process 0.
_ANSWER = 3  # Seconds for an answer of process 0.
# Seconds after `START_TIMEOUT` for the service to name the missing processes,
# and for the others to end if it does not.
_NAMING, _REGISTER_GRACE = 3, 15
_POLL = 1.0  # Seconds between two polls for a failure of another process.
_FAILURE = 'encdec_adapt/failure'
_MESSAGE_LENGTH = 4000

_count = 0  # Synchronisation points so far, the same in all processes.
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
    coordinator: `host:port` of process 0, the same on every process; or only
      'auto', on TPU slices, where jax detects the other arguments.
    processes: number of processes.
    process: 0-based index of this process.
    flags: nested mapping of this job's flags, which must be the same on all
      processes; JSON serialisable.
    timeout: seconds for process 0 to come up, and from then on for the others.

  Raises:
    UserError: only some of the three are given, they are out of range, or
      'auto' is used on machines that are not a TPU slice; the port is in use;
      or the processes differ in versions, flags or devices.
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
  # A thread that is inside the client when Python ends would abort it. Handlers
  # run in reverse order: the event ends the thread that is joined.
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
  """Refuses a port in use, which gRPC would share with the other job."""
  try:
    socket.create_server(('', port)).close()
  except OSError as error:
    raise errors.UserError(
      f'port {port} of the coordinator cannot be listened at'
      f' ({error.strerror}); if another job has it, give another port in'
      ' --coordinator, to all processes.'
    ) from error


def _wait_for_coordinator(host: str, port: int, timeout: float) -> None:
  """Waits until process 0 answers; jax would abort without naming it."""
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
  """Returns the reason that process 0 does not answer; '' if it does.

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
  """Ends this process if process 0 dies while it registers; a thread.

  Heartbeats begin after registration. Until then jax would retry for all of
  the timeout, also where process 0 dies while it tells the others that all
  have registered, and it would not name process 0.
  """
  deadline = time.monotonic() + timeout + _NAMING
  answered = time.monotonic()
  while not registered.wait(_POLL):
    now = time.monotonic()
    reason = _silence(host, port)
    if not reason:
      answered = now
    # This process may have registered during the probe.
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


def count_and_index() -> tuple[int, int]:
  """Returns the number of processes, and the 0-based index of this one."""
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
    AbsentError: some process did not come in time.
  """
  client = jax_distributed.global_state.client
  if client is not None:
    with _waiting(name, timeout):
      client.wait_at_barrier(_next_key(name), int(timeout * 1000))


def last_barrier() -> str:
  """Describes the last synchronisation point of this process, for reports."""
  return _last_barrier


def from_lead(compute: Callable[[], Any], name: str = 'from_lead') -> Any:
  """Computes a value on process 0 and returns it on every process.

  Args:
    compute: called on process 0 only; its result must be JSON serialisable.
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
  """Returns the values of all processes, in their order, on every process.

  Args:
    name: shown in errors.
    value: JSON serialisable.

  Raises:
    AbsentError: some process did not come in time.
  """
  state = jax_distributed.global_state
  if state.client is None:
    return [value]
  folder = _post(name, value)
  values = _posted(folder)
  # Deleted, as steps of a job gather values, but not before all have read it.
  barrier(name)
  state.client.key_value_delete(f'{folder}/{state.process_id}')
  return values


def _post(name: str, value: Any) -> str:
  """Posts values, on all processes together; returns the keys' folder."""
  folder, state = _next_key(name), jax_distributed.global_state
  key = f'{folder}/{state.process_id}'
  state.client.key_value_set(key, json.dumps(value))
  # `_posted` does not wait for keys that are not set yet.
  barrier(name)
  return folder


def _posted(folder: str) -> list[Any]:
  client = jax_distributed.global_state.client
  # Numbers, because keys are sorted as text: 10 before 2.
  entries = sorted(
    (int(key.rpartition('/')[2]), value)
    for key, value in client.key_value_dir_get(folder)
  )
  return [json.loads(value) for _, value in entries]


def require_same(name: str, facts: Mapping[str, Any]) -> None:
  """Refuses to continue where processes differ.

  Args:
    name: shown in errors.
    facts: must be the same in all processes, and JSON serialisable.

  Raises:
    UserError: they differ; all processes raise it, with fields, values and
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

  # Process 0 compares for all: on a pod, each would read the facts of all.
  if difference := from_lead(compare, name):
    raise errors.UserError(difference)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
  """Ends all other processes if this context is left by an exception.

  They print its message and exit with the status of this process, even if
  they are blocked in a collective.

  Raises:
    AbsentError: instead of jax's error that another process was late.
  """
  # The inner context renames the error before it is published.
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
    # Without peers, nobody was late. jax has no type for the error's status.
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
  # Refused if another process has published its failure before.
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
    # jax aborts the others as soon as the service of process 0 is gone.
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
  """Returns a new key, the same on all processes."""
  global _count
  _count += 1
  return f'encdec_adapt/{_count}/{name}'
