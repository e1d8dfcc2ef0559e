"""Real processes start, synchronise and end together."""

import pathlib
import platform
import signal
import time

import pytest

from encdec_adapt.base import exit_status
from tests import tiny

pytestmark = pytest.mark.multiproc

_HEADER = """
import sys, time
from encdec_adapt.base import errors, exit_status
from encdec_adapt.cluster import distributed
coordinator, count, me = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
"""


def _start(program, *arguments, **options):
  """Starts a program that follows `_HEADER`, see `tiny.start_programs`."""
  return tiny.start_programs(_HEADER + program, *arguments, **options)


def _logs(folder: pathlib.Path) -> list[str]:
  return [path.read_text() for path in sorted(folder.glob('*.log'))]


_SYNCHRONISE = """
distributed.initialize(coordinator, 2, me, flags={'steps': 3})
print('from lead:', distributed.from_lead(lambda: {'step': 7 + me}))
distributed.barrier('first')
distributed.require_same('data', {'rows': 8})
if me == 1:
  time.sleep(2)
else:  # The other process does not reach this barrier.
  try:
    distributed.barrier('second', timeout=0.5)
  except errors.AbsentError as error:
    print(error)
"""


def test_processes_synchronise(tmp_path):
  codes = tiny.wait_all(_start(_SYNCHRONISE, tmp_path, 2), 120)
  zero, one = _logs(tmp_path)
  assert codes == [0, 0], (zero, one)
  assert "from lead: {'step': 7}\n" in zero and "from lead: {'step': 7}" in one
  assert "process 0 waited at 'second' for the other" in zero
  assert 'timed out task names:\n1' in zero


# F fails, S sleeps, B waits at the next barrier; T waits for a key until jax's
# timeout, and G in Gloo for the other process, which starts no collective.
_FAIL = """
from jax.experimental import multihost_utils
ERRORS = {'bad input': errors.UserError('no room'), 'bug': ValueError('a bug')}

def main():
  with distributed.fail_together():
    distributed.initialize(coordinator, count, me)
    distributed.barrier('start')
    role = sys.argv[4][me]
    if role == 'F':
      raise ERRORS[sys.argv[5]]
    if role == 'B':
      distributed.barrier('end')
    if role == 'T':
      client = distributed.jax_distributed.global_state.client
      client.blocking_key_value_get('absent', 500)
    if role == 'G':
      multihost_utils.process_allgather(me)
    time.sleep(600)

exit_status.guard(main)
"""


@pytest.mark.parametrize(
  'roles, error, status, message',
  [
    ('FS', 'bad input', exit_status.USER_ERROR, 'no room'),
    ('BSF', 'bug', 1, 'ValueError: a bug'),
    ('TS', '', exit_status.HANG, 'another process of this job was late'),
    # Gloo's 30 s cannot be changed.
    pytest.param(
      *('SG', '', exit_status.HANG, 'another process of this job was late'),
      marks=pytest.mark.long,
    ),
  ],
)
def test_a_failure_ends_all_processes_with_its_message_and_status(
  tmp_path, roles, error, status, message
):
  count = len(roles)
  codes = tiny.wait_all(_start(_FAIL, tmp_path, count, roles, error), 120)
  logs = _logs(tmp_path)
  assert codes == [status] * count, logs
  failing = next(i for i, role in enumerate(roles) if role in 'FTG')
  assert message in logs.pop(failing)
  prefix = f'process {failing} of {count} failed, and this one ends with it'
  assert all(f'Error: {prefix}: {message}' in log for log in logs), logs


@pytest.mark.long
def test_a_process_missing_at_the_start_is_named(tmp_path):
  program = 'distributed.initialize(coordinator, count, me, timeout=8)'
  codes = tiny.wait_all(_start(program, tmp_path, 3, missing=1), 120)
  logs = _logs(tmp_path)
  assert codes == [-signal.SIGABRT] * 2, logs
  assert all('timed out task names:\n1\n' in log for log in logs), logs


_REGISTER = """
distributed._HEARTBEAT_TIMEOUT = 3
wait = distributed._wait_for_coordinator
def reach(*arguments):
  wait(*arguments)
  print('reached', flush=True)
distributed._wait_for_coordinator = reach
with distributed.fail_together():
  distributed.initialize(coordinator, count, me, timeout=float(sys.argv[4]))
"""


# A process that is killed just after registration looks the same to the others
# as long as they have not heard that all have registered.
@pytest.mark.long
@pytest.mark.parametrize(
  'how, timeout, limit',
  [(signal.SIGSTOP, 4, 4 + 15), (signal.SIGKILL, 300, 15)],
)
def test_process_0_that_dies_during_registration_is_named(
  tmp_path, how, timeout, limit
):
  lead, other = _start(_REGISTER, tmp_path, 3, timeout, missing=2)
  try:
    deadline = time.monotonic() + 120
    while 'reached' not in _logs(tmp_path)[1]:
      assert time.monotonic() < deadline, _logs(tmp_path)
      time.sleep(0.1)
    lead.send_signal(how)
    status = other.wait(limit)
  finally:
    for process in (lead, other):
      process.kill()
      process.wait()
  log = _logs(tmp_path)[1]
  assert status == exit_status.HANG, log
  assert 'Error: process 0 at 127.0.0.1:' in log


def test_processes_with_different_flags_are_refused(tmp_path):
  """One process of the command has another number of steps."""
  flags = [*tiny.flags(tmp_path, 'prefix_lm'), f'--workdir={tmp_path}/run']
  flags.append(f'--coordinator=127.0.0.1:{tiny.free_port()}')
  processes = [
    tiny.start(
      *('train', *flags, '--processes=2', f'--process={index}'),
      f'--config.train.steps={12 + index}',
      log=tmp_path / f'{index}.log',
    )
    for index in range(2)
  ]
  codes, logs = tiny.wait_all(processes, 240), _logs(tmp_path)
  assert codes == [exit_status.USER_ERROR] * 2, logs
  host = platform.node()
  for log in logs:
    assert (
      'the processes of this job differ: config.train.steps is 12 on'
      f' process 0 ({host}), 13 on process 1 ({host}). Start every process'
    ) in log
  assert not (tmp_path / 'run').exists()


# A loop that sums over the devices of both processes, as training does.
_LOOP = """
from jax.experimental import multihost_utils
distributed._HEARTBEAT_TIMEOUT = 5
with distributed.fail_together():
  distributed.initialize(coordinator, 2, me)
  for step in range(10**6):
    multihost_utils.process_allgather(step)
    print(f'step {step}', flush=True)
    time.sleep(0.01)
"""


@pytest.mark.long
# A stopped process is like a lost machine: no connection is closed.
@pytest.mark.parametrize(
  'dead, how', [(1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_a_dead_process_ends_the_other(tmp_path, dead, how):
  processes = _start(_LOOP, tmp_path, 2)
  try:
    deadline = time.monotonic() + 120
    while not all('step 3' in log for log in _logs(tmp_path)):
      assert time.monotonic() < deadline, _logs(tmp_path)
      time.sleep(0.1)
    processes[dead].send_signal(how)
    status = processes[1 - dead].wait(60)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  assert status == -signal.SIGABRT, _logs(tmp_path)


_DETECTED = """
import jax
distributed.initialize('auto', None, None)
print('found', jax.process_index(), jax.process_count(), len(jax.devices()))
distributed.barrier('end')
"""


def test_processes_of_a_slice_are_detected(tmp_path):
  """SLURM's variables stand in for a TPU slice's machines."""
  processes = _start(
    *(_DETECTED, tmp_path, 2),
    JAX_COORDINATOR_PORT=str(tiny.free_port()),
    SLURM_JOB_ID='7',
    SLURM_STEP_NODELIST='localhost',
    SLURM_NTASKS='2',
    SLURM_PROCID='{}',
    SLURM_LOCALID='{}',
  )
  codes, logs = tiny.wait_all(processes, 120), _logs(tmp_path)
  assert codes == [0, 0], logs
  for index, log in enumerate(logs):
    assert f'found {index} 2 2\n' in log
