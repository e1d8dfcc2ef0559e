"""Cloud TPU VMs: refused flags, and the flags of gcloud."""

import subprocess

import pytest

from launch import commands
from tests.launch import cloud as clouds


@pytest.mark.parametrize(
  'change, said',
  [
    ({'--accelerator': 'v5e-16'}, '--accelerator=v5e-16 is unknown'),
    ({'--name': 'Pair'}, '--name=Pair: give 1 to 30 small letters'),
    ({'--slices': '0'}, '--slices=0: give 1 or more'),
    ({'--records': '/data'}, '--records=/data: give a folder of a bucket'),
    (
      {'--data_disk': clouds.DISK.replace('4-a', '4-b')},
      'give a disk of the zone',
    ),
    ({'--data_disk': clouds.DISK, '--records': 'gs://b/r'}, 'give one of'),
    ({'--poll_seconds': 'nan'}, '--poll_seconds=nan: give'),
    ({'--slice': '2'}, 'unrecognized arguments: --slice=2'),
    ({'-- --workdir': 'runs/x'}, '--workdir=runs/x after --'),
    ({'-- --workdir': 'gs://b'}, '--workdir=gs://b after --'),
    ({'-- --workdir': ''}, '--workdir= of encdec_adapt.train is missing'),
    ({'-- --config': 'configs/no.py'}, 'configs/no.py is not a file of this'),
    (
      {'-- --config': 'configs/gemma2.py:topology=v5e:8x8'},
      'is for 1 x 64 v5e chips; --accelerator=v5litepod-16 --slices=1 requests'
      ' 1 x 16 v5e',
    ),
    (
      {'-- --config': 'configs/gemma2.py:topology=v5e:4x4,slices=2'},
      'is for 2 x 16 v5e chips',
    ),
    ({'--records': 'gs://b/r'}, 'becomes the folder records of every worker'),
    ({'-- --config.data.folder': 'records'}, 'no worker has that folder'),
  ],
)
def test_bad_flags_are_named_before_anything_is_created(cloud, change, said):
  own = {
    '--name': 'pair',
    '--zone': 'us-west4-a',
    '--accelerator': 'v5litepod-16',
  }
  training = {'--config': 'configs/base.py', '--workdir': '/b/r'}
  for name, value in change.items():
    if name.startswith('-- '):
      training[name[3:]] = value
    else:
      own[name] = value
  done = cloud.launch(
    'tpu_vm',
    'train',
    *(f'{name}={value}' for name, value in own.items()),
    '--',
    *(f'{name}={value}' for name, value in training.items()),
  )
  assert done.returncode == commands.USER_ERROR
  assert said in done.stderr and done.stderr.startswith('Error: ')
  assert 'Traceback' not in done.stderr
  assert cloud.calls() == []
  assert not (cloud.root / 'runs').exists()


@pytest.mark.parametrize(
  'flag, created, replaced',
  [
    ('--tier=reserved', '--reserved', '--spot'),
    ('--create_flag=--network=n', '--network=n', ''),
    ('--service_account=a@p', '--service-account=a@p', ''),
  ],
)
def test_flags_become_those_of_gcloud(cloud, flag, created, replaced):
  done = cloud.train(['refuse'], flag, creations=[['FAILED']])
  clouds.assert_ended(done, 2)
  (create,) = (set(call) for call in cloud.calls('create'))
  usual = {
    *('compute', 'tpus', 'queued-resources', 'create', 'pair', '--async'),
    *('--accelerator-type=v5litepod-16', '--node-count=2', '--quiet'),
    *('--node-prefix=pair', '--zone=us-west4-a', '--spot'),
    '--runtime-version=v2-alpha-tpuv5-lite',
  }
  assert create == usual - {replaced} | {created}


def test_workers_are_reached_by_the_route(cloud):
  clouds.assert_ended(cloud.train(['refuse'], '--route=iap'), 2)
  assert '--internal-ips' in cloud.calls('create')[0]
  calls = cloud.calls('scp', 'ssh')
  assert len(calls) == 3
  assert all('--tunnel-through-iap' in call for call in calls)


def test_the_fake_refuses_flags_that_gcloud_does_not_have(cloud):
  done = subprocess.run(
    ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', '--forced'],
    env=cloud.environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert 'unrecognized arguments: --forced' in done.stderr
