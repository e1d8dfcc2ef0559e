"""Bad flags of every launcher are named before anything is created."""

import shlex

import pytest

from launch import commands
from tests.launch import cloud as cloud_lib

BASE = {
  'tpu_vm': (*cloud_lib.PAIR, '--accelerator=v5litepod-16'),
  'gke': (
    *(*cloud_lib.PAIR, '--cluster=pod', '--accelerator=v5litepod-16'),
    '--image=europe-docker.pkg.dev/p/r/encdec_adapt:1',
  ),
  'slurm': ('--name=pair', '--nodes=2', '--time=60', '--python=/bin/sh'),
}
GEMMA = '--config=configs/gemma2.py:size=2b_2b,topology='
OTHER_DISK = cloud_lib.DISK.replace('4-a', '4-b')


@pytest.mark.parametrize(
  'launcher, flags, training, message',
  [
    ('tpu_vm', '--accelerator=v5e-16', '', '--accelerator=v5e-16 is unknown'),
    ('tpu_vm', '--slices=0', '', '--slices=0: give 1 or more'),
    ('tpu_vm', '--poll_seconds=nan', '', '--poll_seconds=nan: give'),
    ('tpu_vm', '--slice=2', '', 'unrecognized arguments: --slice=2'),
    ('tpu_vm', '--records=/data', '', '--records=/data: give a folder of a'),
    ('tpu_vm', '--records=gs://b/r', '', 'becomes the folder records'),
    ('tpu_vm', f'--data_disk={OTHER_DISK}', '', 'give a disk of the zone'),
    (
      *('tpu_vm', f'--data_disk={cloud_lib.DISK} --records=gs://b/r', ''),
      'give one of them',
    ),
    ('tpu_vm', '', cloud_lib.RECORDS, 'no worker has that folder'),
    ('tpu_vm', '', '--workdir=runs/x', '--workdir=runs/x after --'),
    ('tpu_vm', '', '--workdir=', '--workdir= of encdec_adapt.train is missing'),
    ('tpu_vm', '', '--config=configs/no.py', 'is not a file of this repo'),
    ('tpu_vm', '', f'{GEMMA}v5e:8x8', 'is for 1 x 64 v5e chips'),
    ('tpu_vm', '', f'{GEMMA}v5e:4x4,slices=2', 'is for 2 x 16 v5e chips'),
    ('tpu_vm', '--accelerator=tpu7x-128', '', 'use python3 -m launch.gke'),
    ('tpu_vm', '--env A', '', '--env=A must be NAME=VALUE'),
    ('gke', '--env =1', '', '--env==1 must be NAME=VALUE'),
    ('slurm', '--env', '', '--env: expected one argument'),
    ('slurm', '--container_mounts=/a:/a', '', 'needs --container_image'),
    ('gke', '--name=a_b', '', '--name=a_b: give 1 to 30 small letters'),
    ('gke', '--image=localhost:5000/b', '', 'has no tag'),
    ('gke', '--accelerator=v5p-4x4x4', f'{GEMMA}v5e:4x4', '1 x 64 v5p'),
    ('slurm', '--nodes=0', '', '--nodes=0: give 1 or more'),
    ('slurm', '--processes_per_node=3', '', 'does not divide --gpus_per_node'),
    ('slurm', '--python=no/python', '', 'launch/install.sh --platform=gpu-cud'),
    ('slurm', '', f'{GEMMA}h100:64', 'is for 1 x 64 h100 chips; --nodes=2'),
  ],
)
def test_bad_flags(cloud, launcher, flags, training, message):
  done = cloud.launch(
    *(launcher, 'train', *BASE[launcher], *shlex.split(flags), '--'),
    *('--config=configs/base.py', '--workdir=/b/r', *shlex.split(training)),
    status=commands.USER_ERROR,
  )
  assert message in done.stderr and done.stderr.startswith('Error: ')
  assert cloud.calls() == []
  assert not (cloud.root / 'runs').exists()


def test_only_training_takes_flags_of_a_job(cloud):
  done = cloud.launch(
    *('slurm', 'status', '--name=pair', *cloud_lib.JOB), status=2
  )
  assert 'this verb starts no training job' in done.stderr


@pytest.mark.parametrize('flags', ['', ' --reservation='])
def test_a_reserved_cluster_needs_its_reservation(cloud, flags):
  done = cloud.launch(
    *('gke', 'create', '--cluster=pod', '--zone=us-west4-a'),
    *('--accelerator=v5p-64', '--tier=reserved', *flags.split()),
    status=commands.USER_ERROR,
  )
  assert '--reservation is empty' in done.stderr and cloud.calls() == []
