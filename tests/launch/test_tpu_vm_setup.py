"""Cloud TPU VMs: setting up the workers."""

import subprocess

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
  assert 'cannot be set up with these flags' in done.stdout
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
  assert '[0.0] resuming at step 6' in done.stdout
