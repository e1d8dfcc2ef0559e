"""Cloud TPU VMs: flags that are refused, and what flags become."""

import subprocess

import pytest

from launch import commands
from tests.launch import checkout
from tests.launch import cloud as clouds


@pytest.mark.parametrize(
  'change, said',
  [
    ({'--accelerator': 'v5e-16'}, 'say v5litepod-16'),
    ({'--accelerator': 'v5p'}, '--accelerator=v5p is not known'),
    ({'--zone': 'us-west4'}, '--zone=us-west4: give a zone'),
    ({'--name': 'Pair'}, '--name=Pair: give 1 to 30 small letters'),
    ({'--slices': '0'}, '--slices=0: give 1 or more'),
    ({'--tier': 'cheap'}, "argument --tier: invalid choice: 'cheap'"),
    ({'--records': '/data'}, '--records=/data: give the folder of a bucket'),
    (
      {'--data_disk': 'source=d,mode=read-only'},
      '--data_disk=source=d,mode=read-only: give a disk of the zone',
    ),
    (
      {'--data_disk': clouds.DISK.replace('4-a', '4-b')},
      '/zones/us-west4-a/disks/',
    ),
    (
      {'--data_disk': clouds.DISK.replace('only', 'write')},
      'which all workers att',
    ),
    (
      {'--data_disk': clouds.DISK, '--records': 'gs://b/r'},
      ': give one; both are',
    ),
    ({'--poll_seconds': '-5'}, '--poll_seconds=-5.0: give 0.01 or more'),
    ({'--poll_seconds': 'nan'}, '--poll_seconds=nan: give'),
    ({'--grace_seconds': '-1'}, '--grace_seconds=-1.0: give 0 or more'),
    ({'--retries': '-1'}, '--retries=-1: give 0 or more'),
    ({'--max_restarts': '-1'}, '--max_restarts=-1: give 0 or more'),
    ({'--slice': '2'}, 'unrecognized arguments: --slice=2'),
    ({'-- --workdir': 'runs/x'}, '--workdir=runs/x after --'),
    ({'-- --workdir': 's3://b/r'}, 'give a folder of a bucket, gs://'),
    ({'-- --workdir': 'gs://b'}, '--workdir=gs://b after --'),
    ({'-- --workdir': ''}, '--workdir= of encdec_adapt.train is missing'),
    ({'-- --config': 'configs/no.py'}, 'configs/no.py is not a file of this'),
    ({'-- --process': '1'}, '--process=1 after --'),
    (
      {'-- --config': 'configs/gemma2.py:topology=v5e:8x8'},
      'is of 1 x 64 v5e chips; --accelerator=v5litepod-16 --slices=1 are'
      ' 1 x 16 of v5e',
    ),
    (
      {'-- --config': 'configs/gemma2.py:topology=v5e:4x4,slices=2'},
      'is of 2 x 16 v5e chips',
    ),
    (
      {
        '--accelerator': 'v5p-64',
        '-- --config': 'configs/gemma2.py:topology=v5p:4x4x4',
      },
      'is of 1 x 64 v5p chips; --accelerator=v5p-64 --slices=1 are 1 x 32',
    ),
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


# How the cloud, and the workers, are asked for with a flag.
GIVEN = {
  '--tier=reserved': ('--reserved', ''),
  '--tier=on_demand': ('', ''),
  '--runtime=tpu-x': ('--runtime-version=tpu-x', ''),
  '--network=n': ('--network=n', ''),
  '--subnetwork=s': ('--subnetwork=s', ''),
  '--service_account=a@p': ('--service-account=a@p', ''),
  '--valid_until=24h': ('--valid-until-duration=24h', ''),
  '--route=internal': ('--internal-ips', '--internal-ip'),
  '--route=iap': ('--internal-ips', '--tunnel-through-iap'),
}
# What is asked for without it.
REPLACED = {
  '--tier': '--spot',
  '--runtime': '--runtime-version=v2-alpha-tpuv5-lite',
}


@pytest.mark.parametrize('flag', GIVEN)
def test_flags_become_those_of_gcloud(cloud, flag):
  created, reached = GIVEN[flag]
  # Workers are asked for where there are some.
  states = [['ACTIVE' if reached else 'FAILED']]
  done = cloud.train(['refuse'], flag, creations=states)
  clouds.assert_ended(done, 2)
  (create,) = (set(call) for call in cloud.calls('create'))
  replaced = REPLACED.get(flag.partition('=')[0], '')
  usual = {
    *('compute', 'tpus', 'queued-resources', 'create', 'pair', '--async'),
    *('--accelerator-type=v5litepod-16', '--node-count=2', '--quiet'),
    *('--node-prefix=pair', '--zone=us-west4-a', *REPLACED.values()),
  }
  assert create == usual - {replaced} | {created} - {''}
  calls = cloud.calls('scp', 'ssh')
  assert len(calls) == (3 if reached else 0)
  assert all(reached in call for call in calls)


def test_a_recipe_without_chips_to_spread_it_over_is_warned_of(cloud):
  config = '--config=configs/gemma2.py:size=9b_2b'
  flags = ('--dry_run', *clouds.WHERE, *clouds.CREATION, '--', '--workdir=/b/r')
  done = cloud.launch('tpu_vm', 'train', *flags, config)
  clouds.assert_ended(done, 0)
  assert done.stderr.startswith(f'Warning: {config} names no topology')
  assert 'configs/gemma2.py:size=9b_2b,topology=v5e:4x4' in done.stderr
  done = cloud.launch(
    'tpu_vm', 'train', *flags, f'{config},topology=v5e:4x4,slices=2'
  )
  clouds.assert_ended(done, 0)
  assert not done.stderr


def test_without_gcloud_it_says_so(tmp_path):
  here = checkout.Checkout(tmp_path)
  here.environment['PATH'] = str(here.bin)
  done = here.launch('tpu_vm', 'delete', *clouds.WHERE)
  assert done.returncode == commands.USER_ERROR
  assert 'gcloud is not on PATH' in done.stderr


def test_the_fake_refuses_flags_that_gcloud_does_not_have(cloud):
  done = subprocess.run(
    ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', '--forced'],
    env=cloud.environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert 'unrecognized arguments: --forced' in done.stderr
