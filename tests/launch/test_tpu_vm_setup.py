"""Cloud TPU VMs: what workers are set up with."""

import subprocess

import pytest

from tests.launch import cloud as clouds


def test_records_that_the_disk_has_no_room_for_are_not_copied(cloud):
  cloud.put('df', 'echo Avail; echo 2000000001')
  done = cloud.train(['finish'], f'--records={cloud.put_records()}')
  clouds.assert_ended(done, 2)
  assert (
    '[0.1] launch: the records gs://b/records are 0.0 GB, 0.0 GB of it here;'
    ' the disk has 2.0 GB left.' in done.stdout
  )
  assert '(--data_disk)' in done.stdout
  assert 'cannot be set up like this' in done.stdout
  # Once, and machines stay for another try.
  assert len(cloud.calls('scp')) == 1 and not cloud.calls('delete')
  assert not (cloud.folder / 'home-0-0' / 'encdec_adapt' / 'records').exists()

  # What is there already is not counted again.
  cloud.put('df', 'echo Avail; echo 2000000002')
  records = '--records=gs://b/records'
  clouds.assert_ended(cloud.train(['finish'], records), 0)
  cloud.put('df', 'echo Avail; echo 2000000000')
  (cloud.folder / 'step').unlink()
  clouds.assert_ended(cloud.train(['finish'], records), 0)


def test_records_of_a_data_disk_are_mounted(cloud):
  cloud.put(
    'sudo',
    '[ ! -e "$FAKE_CLOUD/no-disk" ] || exit 32\n'
    'echo "$*" >>"$HOME/sudo.log"; touch "${!#}/manifest.json"',
  )
  done = cloud.train(['finish'], f'--data_disk={clouds.DISK}')
  clouds.assert_ended(done, 0)
  assert f'--data-disk={clouds.DISK}' in cloud.calls('create')[0]
  for worker in ('0-0', '1-1'):
    home = cloud.folder / f'home-{worker}'
    assert (home / 'sudo.log').read_text() == (
      'mount -t ext4 -o ro -o noload LABEL=records encdec_adapt/records\n'
    )
    assert (home / 'encdec_adapt' / 'records' / 'manifest.json').exists()
  assert not [call for call in cloud.calls() if call[0] == 'storage']

  (cloud.folder / 'no-disk').touch()
  done = cloud.train(['finish'], f'--data_disk={clouds.DISK}')
  clouds.assert_ended(done, 2)
  assert '(mkfs.ext4 -L records)' in done.stdout


def test_a_worker_that_the_source_was_not_copied_to_does_not_run_another(cloud):
  clouds.assert_ended(cloud.train(['finish']), 0)
  train = cloud.root / 'encdec_adapt' / 'train.py'
  train.write_text(f"print('edited')\n{train.read_text()}")
  (cloud.folder / 'step').unlink()
  # gcloud says of neither scp nor setup that 0.1 was left out, or failed.
  blips = {'queued-resources scp': 1}
  done = cloud.train(['finish', 'finish'], blips=blips)
  clouds.assert_ended(done, 0)
  lines = done.stdout.splitlines()
  (said,) = [line for line in lines if line.endswith('not copied to here')]
  assert said.startswith('[0.1] launch: encdec_adapt.tar.gz is ')
  assert lines.count('[0.1] launch: ended with status 1') == 1
  assert 'this worker is not set up with the source' in done.stdout
  assert 'the job failed: 3 of 4 workers with status 0, 1 of 4' in done.stdout
  # Then it is copied again, and every start was of the edited source.
  assert [lines.count(f'[{w}] edited') for w in ('0.0', '0.1')] == [2, 1]
  assert len(cloud.calls('scp')) == 3


def test_a_process_that_has_the_number_of_the_job_is_another(cloud, request):
  clouds.assert_ended(cloud.train(['finish']), 0)
  other = subprocess.Popen(['sleep', '600'])
  request.addfinalizer(other.kill)
  for job in cloud.folder.glob('home-*/encdec_adapt.job'):
    (job / 'pid').write_text(str(other.pid))
    (job / 'status').unlink()
  done = cloud.launch('tpu_vm', 'stop', *clouds.WHERE, '--slices=2')
  clouds.assert_ended(done, 0)
  assert done.stdout.count('] launch: no job runs here') == 4
  assert other.poll() is None
  # The launcher looks for its job, which ended with the machine.
  (cloud.root / 'runs' / 'launch' / 'pair' / 'attempts').unlink()
  done = cloud.train(['finish', 'finish'])
  clouds.assert_ended(done, 0)
  assert '4 of 4 workers with status 137' in done.stdout
  assert '[0.0] continuing at step 6' in done.stdout


# Of the records, and of what else a job reads: flags before and after --.
RECORDS, COPIED = 'config.data.folder', ('--records=gs://b/r',)


@pytest.mark.parametrize(
  'own, key, value, said',
  [
    (COPIED, RECORDS, '', '--records=gs://b/r is the folder records of every'),
    (COPIED, RECORDS, '/data/records', 'give --config.data.folder=records, or'),
    (COPIED, RECORDS, 'gs://b/r', 'or leave --records out'),
    ((f'--data_disk={clouds.DISK}',), RECORDS, 'r', '--data_disk=source='),
    ((), RECORDS, 'records', 'give --records=gs://BUCKET/FOLDER before --'),
    ((), RECORDS, './records/', '--config.data.folder=gs://BUCKET/FOLDER'),
    ((), RECORDS, 'data/r', 'give one of a bucket'),
    ((), 'config.init.encoder', 'GEMMA2', 'the workers have no such file'),
    ((), 'config.init.decoder', '~/GEMMA2', '--config.init.decoder=~/GEMMA2'),
    ((), 'config.teacher.checkpoint', 'runs/x', 'gs://BUCKET/NAME, or the abs'),
    ((), 'config.teacher.checkpoint', 's3://b/x', 'the workers have no such'),
    (
      (),
      'config.data.vocabulary',
      'records/v',
      'data.vocabulary=records/v aft',
    ),
    (
      (),
      'config.data.encoder_vocabulary',
      'configs/no',
      '=configs/no after --',
    ),
  ],
)
def test_files_that_no_worker_has_are_refused(cloud, own, key, value, said):
  flags = (*clouds.WHERE, *clouds.CREATION, *own)
  done = cloud.launch(
    'tpu_vm', 'train', *flags, *clouds.JOB, f'--{key}={value}'
  )
  clouds.assert_ended(done, 2)
  assert said in done.stderr and done.stderr.startswith('Error: --')
  assert cloud.calls() == [] and not (cloud.root / 'runs').exists()


@pytest.mark.parametrize(
  'own, flags',
  [
    ((), ['--config.data.folder=', '--config.data.vocabulary=bytes']),
    ((), ['--config.data.folder=/disk/records', '--config.init.encoder=/g']),
    ((), ['--config.data.folder=gs://b/r', '--config.init.encoder=gs://b/g']),
    ((), ['--config.data.vocabulary={workdir}/../v', '--config.init.decoder=']),
    ((), ['--config.data.vocabulary=configs/base.py']),  # Goes with the source.
    (COPIED, [clouds.FOLDER, '--config.data.vocabulary=records/v.model']),
    (COPIED, ['--config.data.folder=./records/']),
  ],
)
def test_files_that_workers_have_are_taken(cloud, own, flags):
  own = (*clouds.WHERE, *clouds.CREATION, *own)
  done = cloud.launch('tpu_vm', 'train', '--dry_run', *own, *clouds.JOB, *flags)
  clouds.assert_ended(done, 0)
