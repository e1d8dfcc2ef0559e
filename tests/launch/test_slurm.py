"""SLURM: the commands, and the batch job on stand-ins of srun and scontrol."""

import os
import shlex

import pytest

from encdec_adapt.base import exit_status
from tests.launch import cloud as cloud_lib


def test_dry_run_prints_what_is_run(cloud):
  flags = ('--name=pair', '--nodes=2', '--time=24:00:00', '--python=/bin/sh')
  flags += ('--processes_per_node=4', '--sbatch_flag=--mem=0', *cloud_lib.JOB)
  done = cloud.launch('slurm', 'train', '--dry_run', *flags)
  command = (
    'sbatch --job-name=pair --nodes=2 --ntasks-per-node=4 --gpus-per-node=8'
    ' --gpus-per-task=2 --time=24:00:00 --requeue --signal=TERM@300'
    ' --open-mode=append --output=runs/launch/pair/%j.log --mem=0'
    ' launch/slurm/job.sh /bin/sh 2 300 runs/launch/pair -- '
    + shlex.join(cloud_lib.JOB[1:])
  )
  assert done.stdout == f'$ mkdir -p runs/launch/pair\n$ {command}\n'
  assert cloud.calls() == [] and not (cloud.root / 'runs').exists()
  cloud.launch('slurm', 'train', *flags)
  assert cloud.calls() == [shlex.split(command)]


def test_processes_run_in_a_container(cloud):
  flags = ('--name=pair', '--nodes=2', '--time=60', '--cpus_per_process=12')
  flags += ('--memory=200G', '--container_image=host#p/encdec_adapt:1')
  flags += ('--container_mounts=/shared:/shared', '--env', 'NCCL_DEBUG=INFO')
  done = cloud.launch('slurm', 'train', '--dry_run', *flags, *cloud_lib.JOB)
  submission = shlex.split(done.stdout.splitlines()[1])
  assert submission[1:4] == ['env', 'NCCL_DEBUG=INFO', 'sbatch']
  script = submission.index('launch/slurm/job.sh')
  assert {'--cpus-per-task=12', '--mem=200G'} < set(submission[:script])
  assert submission[script + 1 : script + 10] == [
    *('python', '2', '300', 'runs/launch/pair', '--cpus-per-task=12'),
    '--container-image=host#p/encdec_adapt:1',
    '--container-mounts=/shared:/shared',
    *('--container-env=NCCL_DEBUG', '--'),
  ]
  assert submission[script + 10 :] == list(cloud_lib.JOB[1:])
  cloud.launch('slurm', 'train', *flags, *cloud_lib.JOB)
  assert cloud.calls() == [submission[3:]]


def test_verbs_concern_the_users_own_jobs(cloud):
  signal = ['scancel', '--me', '--name=pair', '--state=RUNNING']
  calls = {
    'status': ['squeue', '--me', '--name=pair'],
    'delete': ['scancel', '--me', '--name=pair'],
    'stop': [*signal, '--signal=TERM'],
    'profile': [*signal, '--signal=USR1'],
  }
  for verb in calls:
    cloud.launch('slurm', verb, '--name=pair')
  assert cloud.calls() == list(calls.values())


def test_logs_are_those_of_the_latest_submission(cloud):
  done = cloud.launch('slurm', 'logs', '--name=pair', status=2)
  assert 'no log yet' in done.stderr
  folder = cloud.root / 'runs' / 'launch' / 'pair'
  folder.mkdir(parents=True)
  for seconds, name in enumerate(('10.log', '9.log')):
    (folder / name).touch()
    os.utime(folder / name, (seconds, seconds))
  done = cloud.launch('slurm', 'logs', '--name=pair', '--dry_run')
  assert done.stdout.endswith(' runs/launch/pair/9.log\n')


@pytest.fixture
def run_job(cloud):
  """Runs the batch job; its step ends with a status."""
  cloud.put(
    'scontrol',
    'case $1 in show) echo "${HOSTS:-node7}"; echo "JobState=$STATE" ;;'
    ' requeue) echo "requeue $2" ;; esac',
  )
  cloud.put(
    'srun',
    'echo "srun $*"\n'
    'echo "memory ${XLA_CLIENT_MEM_FRACTION:--}'
    ' ${XLA_PYTHON_CLIENT_MEM_FRACTION:--}"\nexit $STATUS',
  )
  cloud.put('sleep', 'exit 0')

  def run(status, state='RUNNING', **environment):
    """Returns what it printed; checks that it ends with this status."""
    done = cloud.bash(
      *('launch/slurm/job.sh', 'python', '2', '300', '.', '--mpi=none'),
      *('--', '--x=1'),
      **dict(STATUS=str(status), STATE=state, **environment),
      **dict(SLURM_JOB_ID='7', SLURM_NTASKS='1', SLURM_JOB_NODELIST='nodes'),
    )
    assert done.returncode == status, done.stderr
    return done.stdout

  return run


@pytest.mark.parametrize(
  'given, memory',
  [
    ({}, '- 0.9'),
    ({'XLA_PYTHON_CLIENT_MEM_FRACTION': '.5'}, '- .5'),
    ({'XLA_CLIENT_MEM_FRACTION': '.8'}, '.8 -'),
  ],
)
def test_processes_get_the_memory_that_plans_assume(run_job, given, memory):
  output = run_job(0, **given)
  assert f'memory {memory}\n' in output
  assert '-m encdec_adapt.train --coordinator=node7:20007 --x=1\n' in output
  # After one process has saved and ended, the others have as long.
  assert ' --wait=300 ' in output and ' --mpi=none bash ' in output


@pytest.mark.parametrize(
  'status, state, is_requeued',
  [
    (0, 'RUNNING', False),
    (exit_status.USER_ERROR, 'RUNNING', False),
    (exit_status.DIVERGED, 'RUNNING', False),
    (exit_status.RESTART, 'RUNNING', True),
    (exit_status.RESTART, 'CANCELLED', False),
    (exit_status.ABORT, 'RUNNING', True),
  ],
)
def test_a_stopped_or_killed_job_is_requeued(
  run_job, status, state, is_requeued
):
  assert ('requeue 7' in run_job(status, state)) == is_requeued


def test_consecutive_failures_end_the_job(run_job):
  # A restart resets the count.
  for status in (1, exit_status.HANG, exit_status.RESTART, exit_status.HANG, 1):
    assert 'requeue 7' in run_job(status)
  assert 'failed 3 times in a row; not requeued' in run_job(1)
