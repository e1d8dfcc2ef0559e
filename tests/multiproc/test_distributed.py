"""Processes meet, and fail as one: whichever fails, both say why, at once.

One that is missing, or told something else, or gone, ends the others too.
"""

import pathlib
import platform
import subprocess
import sys
import time

import pytest

from encdec_adapt.cli import app
from encdec_adapt.cluster import lock, watchdog
from tests import tiny

pytestmark = pytest.mark.multiproc

# Both processes go through the same places; at each, one may fail.
_MEMBER = """
import json, pathlib, sys
from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
coordinator, me = sys.argv[1], int(sys.argv[2])
distributed.initialize(coordinator, 2, me)
said = []

def attempt(work):
  try:
    with distributed.failing_as_one():
      said.append(work())
  except (Exception, SystemExit) as error:
    said.append(f'{type(error).__name__}: {error}')

def refuse(*who, error=errors.UserError('no room')):
  if me in who:
    raise error
  return distributed.barrier('the door')

attempt(lambda: distributed.from_lead(lambda: {'step': 7}))
attempt(lambda: refuse())
attempt(lambda: refuse(0))
attempt(lambda: refuse(1))
attempt(lambda: refuse(0, 1))
attempt(lambda: refuse(1, error=ValueError('a defect')))
attempt(lambda: refuse(0, error=SystemExit(2)))
attempt(lambda: distributed.from_lead(lambda: {}['damaged']))
attempt(lambda: distributed.from_lead(lambda: None))
attempt(lambda: refuse())
attempt(lambda: distributed.agree('data', {'rows': 8}))
attempt(lambda: distributed.agree('data', {'rows': 8, 'shards': me}))
if me == 0:  # The other never comes.
  try:
    distributed.barrier('the gate', distributed.Patience('a nap', 0.5))
  except errors.UserError as error:
    said.append(str(error))
pathlib.Path(sys.argv[3]).write_text(json.dumps(said))
"""

_OWN = 'UserError: no room'


def _peer(process: int, message: str) -> str:
  return (
    f'PeerError: process {process} of 2 failed, and this one stops with it:'
    f' {message}'
  )


# One fails while the other waits for it somewhere else than at a meeting.
_ALONE = """
import sys, time
from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import distributed
coordinator, me, roles = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed._PARTING = 2
ERRORS = {
  'bad input': errors.UserError('no room'),
  'defect': ValueError('a defect'),
  'absent': errors.AbsentError('a machine is gone'),
}

def main(_):
  with distributed.failing_as_one():
    distributed.initialize(coordinator, len(roles), me)
    distributed.barrier('the start')
    if roles[me] == 'F':
      raise ERRORS[sys.argv[4]]
    if roles[me] == 'M':
      distributed.barrier('the end')
    print('busy', flush=True)
    time.sleep(600)

app.guard(main, None)
"""


@pytest.mark.parametrize(
  'roles, error, status, said',
  [
    ('FS', 'bad input', app.USER_ERROR, 'no room'),
    ('SF', 'bad input', app.USER_ERROR, 'no room'),
    ('SF', 'defect', 1, 'ValueError: a defect'),
    ('FS', 'absent', app.HANG, 'a machine is gone'),
    ('MFS', 'bad input', app.USER_ERROR, 'no room'),
    ('SMF', 'bad input', app.USER_ERROR, 'no room'),
  ],
)
def test_one_that_fails_ends_the_others_wherever_they_are(
  tmp_path, roles, error, status, said
):
  """F fails, S sleeps elsewhere, M comes to the next meeting."""
  coordinator = f'127.0.0.1:{tiny.free_port()}'
  logs = [tmp_path / f'process_{index}.log' for index in range(len(roles))]
  members = []
  for index, log in enumerate(logs):
    command = [sys.executable, '-c', _ALONE, coordinator, str(index)]
    with open(log, 'w') as file:
      members.append(
        subprocess.Popen(
          [*command, roles, error],
          cwd=tiny.ROOT,
          env=tiny.environment(),
          stdout=file,
          stderr=subprocess.STDOUT,
        )
      )
  codes = tiny.wait_all(members, 120)
  texts = [log.read_text() for log in logs]
  assert codes == [status] * len(roles), texts
  failing = roles.index('F')
  assert said in texts.pop(failing)
  told = f'process {failing} of {len(roles)} failed, and this one stops with it'
  assert all(f'Error: {told}: {said}' in text for text in texts), texts


def test_processes_meet_and_fail_as_one(tmp_path):
  zero, one = tiny.run_pair(_MEMBER, tmp_path)
  ended = 'it ended with status 2 and has said why.'
  host = platform.node()
  differ = (
    'UserError: the processes of this job differ: shards is 0 on process 0'
    f' ({host}), 1 on process 1 ({host}). Start every process with the same'
    ' source, packages, environment and flags.'
  )
  assert list(zip(zero, one, strict=False)) == [
    ({'step': 7}, {'step': 7}),
    (None, None),
    (_OWN, _peer(0, 'no room')),
    (_peer(1, 'no room'), _OWN),
    (_OWN, _OWN),
    (_peer(1, 'ValueError: a defect'), 'ValueError: a defect'),
    ('SystemExit: 2', _peer(0, ended)),
    ("KeyError: 'damaged'", _peer(0, "KeyError: 'damaged'")),
    (None, None),
    (None, None),
    (None, None),
    (differ, differ),
  ]
  assert len(one) == len(zero) - 1
  assert zero[-1].startswith(
    "process 0 waited 0.5 seconds at 'the gate' for the other 1, the limit"
    ' where a nap comes before it'
  )


def test_a_refusal_of_process_0_ends_its_peer(tmp_path):
  """The command: the work directory is another job's."""
  flags = tiny.make_records(tmp_path)
  with lock.WorkdirLock(tmp_path / 'taken'):
    processes = tiny.start_several(
      2, 'train', *flags, f'--workdir={tmp_path}/taken', logs=tmp_path
    )
    began = time.monotonic()
    codes = tiny.wait_all(processes, 240)
  print(f'ended after {time.monotonic() - began:.1f} s')
  zero, one = ((tmp_path / f'process_{i}.log').read_text() for i in range(2))
  assert codes == [app.USER_ERROR] * 2, zero + one
  reason = f'The work directory {tmp_path}/taken is in use by another job'
  assert f'\nError: {reason}' in '\n' + zero
  paragraph = one.strip().splitlines()[-1]
  assert paragraph.startswith('Error: process 0 of 2 failed')
  assert reason in paragraph
  assert 'Traceback' not in one


def test_processes_that_were_told_otherwise_are_refused(tmp_path):
  """The command: one of two has another number of steps."""
  flags = [
    *tiny.flags(tmp_path, 'prefix_lm'),
    f'--workdir={tmp_path}/run',
    f'--coordinator=127.0.0.1:{tiny.free_port()}',
    '--processes=2',
  ]
  logs = [tmp_path / f'process_{index}.log' for index in range(2)]
  processes = [
    tiny.start(
      'train',
      *flags,
      f'--process={index}',
      f'--config.train.steps={12 + index}',
      log=log,
    )
    for index, log in enumerate(logs)
  ]
  assert tiny.wait_all(processes, 240) == [app.USER_ERROR] * 2
  host = platform.node()
  for log in logs:
    assert (
      'Error: the processes of this job differ: config.train.steps is 12 on'
      f' process 0 ({host}), 13 on process 1 ({host}). Start every process'
    ) in log.read_text()
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('present', [0, 1])
def test_a_process_that_does_not_come_is_named(tmp_path, present):
  """The command: one of two, which waits for a second."""
  address = f'127.0.0.1:{tiny.free_port()}'
  done = tiny.run(
    'train',
    *tiny.flags(tmp_path, 'prefix_lm'),
    f'--workdir={tmp_path}/run',
    f'--coordinator={address}',
    '--processes=2',
    f'--process={present}',
    '--start_seconds=1',
  )
  assert done.returncode == app.HANG, done.stderr
  paragraph = done.stderr.strip().splitlines()[-1]
  assert paragraph.startswith(
    'Error: after 1 s, 1 of 2 processes are here; missing: process 1.'
    if present == 0
    else f'Error: process 0 at {address} has not answered in 1 s'
  )
  assert 'Traceback' not in done.stderr


# A loop that sums over the devices of both processes, as training does.
_LOOP = """
import sys, time
import jax
from jax.experimental import multihost_utils
from encdec_adapt.cluster import distributed, watchdog
coordinator, me, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with distributed.failing_as_one():
  distributed.initialize(coordinator, 2, me)
  distributed.barrier('the start')
  least = {'least': 600, 'least_step': 60}
  with watchdog.Watchdog(folder, me, 2, factor=20, **least) as watch:
    for step in range(10**6):
      watch.beat(step)
      multihost_utils.process_allgather(step)
      print(step, flush=True)
      time.sleep(0.01)
"""


@pytest.mark.parametrize('killed', [1, 0])
def test_the_other_of_one_that_is_killed_ends_and_reports(tmp_path, killed):
  coordinator = f'127.0.0.1:{tiny.free_port()}'
  members = []
  for index in range(2):
    with open(tmp_path / f'process_{index}.log', 'w') as log:
      members.append(
        subprocess.Popen(
          [sys.executable, '-c', _LOOP, coordinator, str(index), tmp_path],
          cwd=tiny.ROOT,
          env=tiny.environment(),
          stdout=subprocess.PIPE,
          stderr=log,
          text=True,
        )
      )
  other = members[1 - killed]
  said = tmp_path / f'process_{1 - killed}.log'
  try:
    for line in other.stdout:
      if line == '3\n':
        break
    members[killed].kill()
    began = time.monotonic()
    other.communicate(timeout=120)
  finally:
    for member in members:
      member.kill()
      member.wait()
  print(f'ended after {time.monotonic() - began:.1f} s')
  assert other.returncode == app.HANG, said.read_text()
  where = f'{tmp_path}/{watchdog.REPORTS}/{1 - killed}.txt'
  report = pathlib.Path(where).read_text()
  assert report.startswith(f'process {killed} (')
  assert 'is gone: its connection is closed; process' in report
  assert "last meeting of this process: left 'the start', number 3" in report
  for index in range(2):
    assert f'\nprocess {index}: step at step ' in report
  # The stacks, with at least the frames of the thread that writes them.
  assert '\nThread 0x' in report and 'watchdog.py", line' in report
  assert where in said.read_text()


@pytest.mark.parametrize('coordinator', ['auto', 'given'])
def test_who_is_who_is_found_or_given(coordinator):
  """SLURM's variables stand in for a TPU slice's machines, also for jax."""
  port = tiny.free_port()
  code = (
    'import sys, jax\n'
    'from encdec_adapt.cluster import distributed\n'
    'me = int(sys.argv[1])\n'
    "given = ('auto', None, None)\n"
    "if sys.argv[2] == 'given':\n"
    f"  given = ('localhost:{port}', 2, 1 - me)\n"
    'distributed.initialize(*given)\n'
    'print(jax.process_index(), jax.process_count(), len(jax.devices()),'
    ' jax.config.values["jax_cuda_visible_devices"])\n'
    "distributed.barrier('the end')\n"
  )
  slurm = {
    'JAX_COORDINATOR_PORT': str(port),
    'SLURM_JOB_ID': '7',
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_NTASKS': '2',
  }
  members = [
    subprocess.Popen(
      [sys.executable, '-c', code, str(me), coordinator],
      cwd=tiny.ROOT,
      env=tiny.environment()
      | slurm
      | {'SLURM_PROCID': str(me), 'SLURM_LOCALID': str(me)},
      stdout=subprocess.PIPE,
      text=True,
    )
    for me in range(2)
  ]
  try:
    outputs = [member.communicate(timeout=120)[0] for member in members]
  finally:
    for member in members:
      member.kill()
  # Found: one device to a process, which is right on no TPU but here. Given:
  # all that it sees, under SLURM too.
  assert [output.split() for output in outputs] == (
    [['0', '2', '2', '0'], ['1', '2', '2', '1']]
    if coordinator == 'auto'
    else [['1', '2', '2', 'all'], ['0', '2', '2', 'all']]
  )
