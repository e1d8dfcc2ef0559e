"""SLURM: what is printed; and, on a real SLURM of one node, what happens.

The latter needs Debian's slurm-wlm and the right to start its daemons:
`python -m pytest -m slow tests/launch/test_slurm.py`.
"""

import json
import os
import pathlib
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests import tiny
from tests.launch import checkout

JOB = ('--', '--config=configs/base.py', "--workdir=/shared/it's")
HAVE_SLURM = all(shutil.which(name) for name in ('sbatch', 'srun', 'slurmctld'))


@pytest.fixture
def here(tmp_path):
  """A checkout whose sbatch notes how it was called, and succeeds."""
  found = checkout.Checkout(tmp_path)
  found.put_recorder('sbatch', 'squeue', 'scancel')
  return found


def test_dry_run_prints_what_is_run(here):
  flags = ('--name=pair', '--nodes=2', '--time=24:00:00')
  flags += ('--python=/bin/sh', '--sbatch_flag=--mem=0')
  done = here.launch('slurm', 'train', '--dry_run', *flags, *JOB)
  assert done.returncode == 0, done.stderr
  line = (
    'sbatch --job-name=pair --nodes=2 --ntasks-per-node=1 --gpus-per-node=8'
    ' --time=24:00:00 --requeue --signal=TERM@300'
    ' --open-mode=append --output=runs/launch/pair/%j.log --mem=0'
    ' launch/slurm/job.sh /bin/sh 2 300 runs/launch/pair'
    " --config=configs/base.py '--workdir=/shared/it'\"'\"'s'"
  )
  assert done.stdout.splitlines() == [
    '$ mkdir -p runs/launch/pair',
    f'$ {line}',
  ]
  assert not here.called.exists() and not (here.root / 'runs').exists()

  done = here.launch('slurm', 'train', *flags, *JOB)
  assert done.returncode == 0, done.stderr
  assert here.called.read_text().splitlines() == shlex.split(line)


def test_gpus_are_shared_between_the_processes_of_a_node(here):
  done = here.launch(
    *('slurm', 'train', '--dry_run', '--name=pair', '--nodes=1'),
    *('--gpus_per_node=8', '--processes_per_node=4', '--time=60', *JOB),
  )
  assert ' --ntasks-per-node=4 --gpus-per-node=8 --gpus-per-task=2 ' in (
    done.stdout
  )


@pytest.mark.parametrize('verb', ['status', 'delete'])
def test_one_sees_and_ends_ones_own_jobs(here, verb):
  done = here.launch('slurm', verb, '--name=pair')
  assert done.returncode == 0
  program = {'status': 'squeue', 'delete': 'scancel'}[verb]
  assert here.called.read_text().split() == [program, '--me', '--name=pair']


@pytest.mark.parametrize(
  'flags, said',
  [
    (['--nodes=0'], '--nodes=0: give 1 or more'),
    (['--processes_per_node=3'], '--processes_per_node=3 does not divide'),
    (['--python=no/python'], 'bash launch/install.sh --platform=gpu-cuda12'),
    (
      ['--', '--workdir=/shared/r']
      + ['--config=configs/gemma2.py:size=2b_2b,topology=h100:64'],
      'is for 1 x 64 h100 chips; --nodes=2 --gpus_per_node=8 requests',
    ),
  ],
)
def test_bad_flags_are_named(here, flags, said):
  given = ['--name=pair', '--nodes=2', '--time=60', '--python=/bin/sh']
  job = [] if '--' in flags else JOB
  done = here.launch('slurm', 'train', *given, *flags, *job)
  assert done.returncode == 2
  assert said in done.stderr and 'Traceback' not in done.stderr
  assert not here.called.exists()


@pytest.mark.parametrize(
  'given, seen',
  [
    ({}, '- 0.9'),
    ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.5'}, '- .5'),
    ({'XLA_CLIENT_MEM_FRACTION': '.8'}, '.8 -'),
  ],
)
def test_processes_get_the_memory_that_plans_count_on(here, given, seen):
  here.put('scontrol', 'echo host')
  here.put(
    'srun',
    'echo "$*" >args\n'
    'echo "${XLA_CLIENT_MEM_FRACTION:--} ${XLA_PYTHON_CLIENT_MEM_FRACTION:--}"',
  )
  slurm_sets = {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '1'}
  slurm_sets['SLURM_JOB_NODELIST'] = 'host'
  done = subprocess.run(
    ['bash', 'launch/slurm/job.sh', 'python', '2', '300', 'folder', '--x=1'],
    cwd=here.root,
    env={**here.environment, **slurm_sets, **given},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[1] == seen
  # A process that has saved does not end the others before they have.
  assert ' --wait=300 ' in (here.root / 'args').read_text()


class Cluster:
  """A SLURM of this machine, with ports and folders of its own."""

  def __init__(self, folder: pathlib.Path):
    """Starts it; `folder` is for its files."""
    self.folder = folder
    folder.mkdir()
    host = socket.gethostname().partition('.')[0]
    (folder / 'slurm.conf').write_text(
      f'ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\n'
      f'SlurmctldPort={tiny.free_port()}\nSlurmdPort={tiny.free_port()}\n'
      'AuthType=auth/none\nCredType=cred/none\n'
      f'SlurmUser={pwd.getpwuid(os.getuid()).pw_name}\n'
      f'SlurmdUser={pwd.getpwuid(os.getuid()).pw_name}\n'
      f'StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n'
      f'SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/d.pid\n'
      f'SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/d.log\n'
      'ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n'
      'SwitchType=switch/none\nMpiDefault=none\nReturnToService=2\n'
      'SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n'
      'JobAcctGatherType=jobacct_gather/none\n'
      f'NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN\n'
      'PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n'
    )
    self.environment = {'SLURM_CONF': str(folder / 'slurm.conf')}
    self.daemons = [
      subprocess.Popen(
        [name, '-D'], env={**os.environ, **self.environment}, stderr=log
      )
      for name, log in (
        ('slurmctld', open(folder / 'ctld.err', 'w')),
        ('slurmd', open(folder / 'd.err', 'w')),
      )
    ]

  def run(self, *command: str) -> str:
    """Runs a client of SLURM; returns what it prints."""
    return subprocess.run(
      command,
      env={**os.environ, **self.environment},
      capture_output=True,
      text=True,
    ).stdout

  def close(self) -> None:
    """Ends every job and the daemons."""
    me = pwd.getpwuid(os.getuid()).pw_name
    self.run('scancel', f'--user={me}')
    try:
      _wait(lambda: not self.run('squeue', '--noheader'), 90)
    finally:
      for daemon in self.daemons:
        daemon.terminate()
      for daemon in self.daemons:
        daemon.wait(60)


@pytest.fixture
def cluster(tmp_path):
  """A SLURM whose node is ready."""
  if not HAVE_SLURM:
    pytest.skip('sbatch is not installed; apt-get install slurm-wlm')
  found = Cluster(tmp_path / 'slurm')
  try:
    _wait(lambda: 'idle' in found.run('sinfo', '--noheader', '-o', '%t'), 60)
    yield found
  finally:
    found.close()


def _wait(reached, seconds, show=lambda: ''):
  deadline = time.monotonic() + seconds
  while not reached():
    assert time.monotonic() < deadline, show()
    time.sleep(0.3)


class Job:
  """A tiny training job of two processes on a real SLURM."""

  def __init__(self, cluster: Cluster, folder: pathlib.Path):
    """Puts it in line."""
    self.cluster = cluster
    self.here = checkout.Checkout(folder)
    shutil.rmtree(self.here.root / 'encdec_adapt')
    package = tiny.ROOT / 'encdec_adapt'
    (self.here.root / 'encdec_adapt').symlink_to(package)
    self.here.environment |= tiny.environment() | cluster.environment
    for name in ('PYTHONPATH', 'PYTHONUNBUFFERED'):
      self.here.environment.pop(name, None)
    flags = tiny.make_records(folder / 'records')
    self.workdir = folder / 'work'
    done = self.here.launch(
      *('slurm', 'train', '--name=pair', '--nodes=1', '--gpus_per_node=0'),
      *('--processes_per_node=2', '--time=30', f'--python={sys.executable}'),
      *('--', *flags, f'--workdir={self.workdir}'),
      *('--config.train.steps=300', '--config.train.eval_every=300'),
      *('--config.data.repeat=True', '--config.checkpoint.every=20'),
    )
    assert done.returncode == 0, done.stderr
    self.number = int(re.search(r'Submitted batch job (\d+)', done.stdout)[1])
    self.log = self.here.root / 'runs/launch/pair' / f'{self.number}.log'

  def text(self) -> str:
    """What it has printed."""
    return self.log.read_text() if self.log.exists() else ''

  def step(self) -> int:
    """The last step that it has printed."""
    return max(map(int, re.findall(r'0: step +(\d+)/', self.text())), default=0)

  def wait(self, reached, seconds: float) -> None:
    """Waits for something that shows in what the job prints."""
    _wait(reached, seconds, self.text)

  def hurry(self) -> None:
    """Shortens the two minutes that a job waits which was put back.

    Not to nothing: the end of the last start must have come to all daemons.
    """
    look = ('squeue', '--noheader', f'--job={self.number}', '--format=%T')
    self.wait(lambda: 'PENDING' in self.cluster.run(*look), 60)
    time.sleep(10)
    update = ('scontrol', 'update', f'JobId={self.number}', 'StartTime=now')
    self.cluster.run(*update)


@pytest.mark.slow
def test_a_real_job_is_put_back_in_line_and_continues(cluster, tmp_path):
  job = Job(cluster, tmp_path)
  job.wait(lambda: job.step() >= 4, 120)
  # A preemption's notice to the processes.
  cluster.run('scancel', '--signal=TERM', str(job.number))
  job.wait(lambda: 'launch: ended with status 75' in job.text(), 90)
  stopped = job.step()
  job.hurry()
  job.wait(lambda: f'0: resuming at step {stopped}' in job.text(), 240)
  job.wait(lambda: job.step() >= stopped + 20, 60)

  # A process that is killed takes the other with it.
  listing = subprocess.run(
    ['ps', '-ewwo', 'pid,args'], capture_output=True, text=True
  ).stdout
  victims = [
    int(line.split()[0])
    for line in listing.splitlines()
    if f'--workdir={job.workdir} ' in line
    and line.split()[1] == sys.executable
    and '--process=1' in line.split()
  ]
  assert len(victims) == 1, listing
  os.kill(victims[0], signal.SIGKILL)
  job.wait(lambda: job.text().count('launch: ended with status') == 2, 180)
  job.hurry()
  job.wait(lambda: 'launch: ended with status 0' in job.text(), 300)
  summary = json.loads((job.workdir / 'summary.json').read_text())
  assert summary['steps'] == 300
  starts = re.findall(r'launch: job \d+, start (\d), 2 processes', job.text())
  assert starts == ['0', '1', '2']
  assert job.text().count('0: resuming at step') == 2
