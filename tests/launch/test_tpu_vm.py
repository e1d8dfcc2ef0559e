"""Cloud TPU VMs on the fake cloud of fake_tools.py."""

import shlex
import time

import pytest

from tests.launch import cloud as cloud_lib


def _commands(output, prefix):
  """Returns the commands that were printed after a prefix."""
  lines = [line.partition(prefix) for line in output.splitlines()]
  return {tuple(shlex.split(after)) for _, found, after in lines if found}


def test_dry_run_prints_the_commands_of_a_run(cloud):
  records = cloud.put_records()
  variable = "--env=A=it's x"
  flags = (*cloud_lib.TPU_VM, records, variable)
  flags += (*cloud_lib.JOB, cloud_lib.RECORDS)
  printed = cloud.launch('tpu_vm', 'train', '--dry_run', *flags).stdout
  assert cloud.calls() == [] and not (cloud.root / 'runs').exists()
  done = cloud.train(['finish'], records, variable)
  cloud.launch('tpu_vm', 'delete', *cloud_lib.PAIR)
  called = {tuple(call[1:]) for call in cloud.calls()}
  assert called == _commands(printed, '$ gcloud ')
  (create,) = cloud.calls('create')
  assert shlex.join(create) == (
    'gcloud compute tpus queued-resources create pair'
    ' --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite'
    ' --node-count=2 --node-prefix=pair --spot --async --quiet'
    ' --zone=us-west4-a'
  )
  # Only the dry run shows how uv is installed.
  workers = _commands(printed, '[worker] $ ')
  ran = _commands(done.stdout, '[0.0] $ ')
  assert ran <= workers and len(ran) == len(workers) - 1
  train = ('env', "A=it's x", '.venv/bin/python', '-m', 'encdec_adapt.train')
  train += ('--coordinator=auto', *cloud_lib.JOB[1:], cloud_lib.RECORDS)
  assert train in ran


@pytest.mark.long
def test_a_job_runs_on_all_workers_of_all_slices(cloud):
  done = cloud.train(['finish'], cloud.put_records())
  lines = done.stdout.splitlines()
  assert (
    '[0.0] resuming at step 0; --coordinator=auto --config=configs/base.py'
    " --workdir=gs://b/it's --x=a b --config.data.folder=records" in lines
  )
  for worker in ('0.0', '0.1', '1.0', '1.1'):
    assert f'[{worker}] launch: ended with status 0' in lines
    home = cloud.folder / f'home-{worker.replace(".", "-")}'
    assert (home / 'encdec_adapt' / 'records' / 'manifest.json').exists()
    assert 'launch/locks/tpu.txt' in (home / 'uv.log').read_text()
  log = (cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt').read_text()
  assert '[0.0] step 6\n' in log
  assert cloud.requests() == 'create'
  assert 'still exist and cost' in done.stdout

  # The same command again creates and installs nothing.
  done = cloud.train(['finish'], '--delete_when_done')
  assert '[0.0] resuming at step 6' in done.stdout
  assert '.venv is up to date with the locks of tpu' in done.stdout
  assert cloud.requests() == 'create delete'


@pytest.mark.long
@pytest.mark.parametrize('event', ['preempt', 'vanish', 'lose_slice'])
def test_a_preempted_resource_is_created_again_and_the_job_resumes(
  cloud, event
):
  failures = {'queued-resources delete': 2, 'queued-resources create': 2}
  if event != 'preempt':
    failures = {}
  done = cloud.train([event, 'finish'], **failures)
  assert 'preempted: created again and resumed' in done.stdout
  assert '[0.0] resuming at step 2' in done.stdout
  # The last lines of machines that vanish may not arrive.
  for step in (3, 4, 5, 6):
    assert done.stdout.count(f'[0.0] step {step}\n') == 1
  if failures:
    assert '# request failed with status 2 (2 of 30 tolerated)' in done.stdout
    assert cloud.requests() == 'create' + ' delete' * 3 + ' create' * 3
  else:
    assert cloud.requests() == 'create delete create'


@pytest.mark.long
def test_stop_and_profile_reach_the_job_on_every_worker(cloud):
  log = cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt'
  deadline = time.monotonic() + 60

  def wait_for(line):
    """Waits until all workers have printed a line."""
    while not log.exists() or log.read_text().count(line) < 4:
      assert time.monotonic() < deadline
      time.sleep(0.1)

  cloud.set_scenario(['wait'])
  flags = (*cloud_lib.TPU_VM, *cloud_lib.FAST, *cloud_lib.JOB)
  launcher = cloud.start('tpu_vm', 'train', *flags, '--max_restarts=0')
  try:
    wait_for('waiting')
    where = (*cloud_lib.PAIR, '--slices=2')
    traced = cloud.launch('tpu_vm', 'profile', *where)
    wait_for('] tracing')
    done = cloud.launch('tpu_vm', 'stop', *where)
    output, _ = launcher.communicate(timeout=60)
  finally:
    launcher.kill()
  assert traced.stdout.count('] launch: sent SIGUSR1') == 4
  assert done.stdout.count('] launch: sent SIGTERM') == 4
  assert 'the job was stopped after a save: 4 of 4 workers' in output


@pytest.mark.long
def test_a_broken_connection_and_failed_queries_do_not_end_the_job(cloud):
  failures = {'queued-resources describe': 3, 'tpu-vm describe': 4}
  done = cloud.train(['drop', 'finish'], **failures)
  assert 'the job lost its connection' in done.stdout
  assert done.stdout.count('# status query failed (') == 7
  assert 'preempted' not in done.stdout and cloud.requests() == 'create'
  # All lines were printed; a line that was under way may come twice.
  lines = done.stdout.splitlines()
  assert {f'[0.0] step {step}' for step in range(3, 7)} <= set(lines)
  logs = cloud.folder.glob('home-*/encdec_adapt.job/log')
  (log,) = [t for p in logs if 'resuming at' in (t := p.read_text())]
  assert log.count('resuming at') == 1 and 'resuming at step 0' in log


def test_flags_reach_gcloud_and_refused_input_is_not_retried(cloud):
  flags = ('--tier=reserved', '--route=iap', '--service_account=a@p')
  done = cloud.train(['refuse'], *flags, '--create_flag=--network=n', status=2)
  assert done.stdout.count('[0.1] Error: config.data') == 1
  assert 'refused its input: 4 of 4 workers with status 2' in done.stdout
  (create,) = cloud.calls('create')
  wanted = {'--reserved', '--service-account=a@p', '--network=n'}
  assert wanted | {'--internal-ips'} <= set(create) - {'--spot'}
  connections = cloud.calls('scp', 'ssh')
  assert len(connections) == 3
  assert all('--tunnel-through-iap' in call for call in connections)


def test_the_reason_of_a_failed_request_is_shown(cloud):
  done = cloud.train([], creations=[['FAILED']], status=2)
  assert 'could not fill the request pair' in done.stderr


@pytest.mark.long
def test_records_are_copied_only_if_the_disk_has_room(cloud):
  records = cloud.put_records()
  cloud.put('df', 'echo Avail; echo 2000000001')
  done = cloud.train(['finish'], records, status=2)
  assert (
    '[0.1] launch: the records gs://b/records have 0.0 GB, 0.0 GB of them on'
    ' this disk, which has 2.0 GB left' in done.stdout
  )
  assert 'cannot be set up with these flags' in done.stdout
  # One try; the machines are kept for the next command.
  assert len(cloud.calls('scp')) == 1 and cloud.requests() == 'create'
  assert not (cloud.folder / 'home-0-0' / 'encdec_adapt' / 'records').exists()

  # Records that are on the disk already need no more room.
  for free in (2000000002, 2000000000):
    cloud.put('df', f'echo Avail; echo {free}')
    cloud.train(['finish'], records)
    (cloud.folder / 'step').unlink()


@pytest.mark.long
def test_records_on_a_data_disk_are_mounted(cloud):
  cloud.put(
    'sudo',
    '[ ! -e "$FAKE_CLOUD/no-disk" ] || exit 32\n'
    'echo "$*" >>"$HOME/sudo.log"; touch "${!#}/manifest.json"',
  )
  flag = f'--data_disk={cloud_lib.DISK}'
  cloud.train(['finish'], flag)
  assert f'--data-disk={cloud_lib.DISK}' in cloud.calls('create')[0]
  for worker in ('0-0', '1-1'):
    assert (cloud.folder / f'home-{worker}' / 'sudo.log').read_text() == (
      'mount -t ext4 -o ro -o noload LABEL=records encdec_adapt/records\n'
    )
  assert not [call for call in cloud.calls() if call[1] == 'storage']

  (cloud.folder / 'no-disk').touch()
  done = cloud.train(['finish'], flag, status=2)
  assert '(mkfs.ext4 -L records)' in done.stdout


@pytest.mark.long
def test_a_worker_without_the_new_source_does_not_run_the_old_one(cloud):
  cloud.train(['finish'])
  train = cloud.root / 'encdec_adapt' / 'train.py'
  train.write_text(f"print('edited')\n{train.read_text()}")
  (cloud.folder / 'step').unlink()
  # Neither scp nor setup reports that worker 0.1 was skipped.
  done = cloud.train(['finish', 'finish'], **{'queued-resources scp': 1})
  lines = done.stdout.splitlines()
  (line,) = [line for line in lines if line.endswith('was not copied here')]
  assert line.startswith('[0.1] launch: encdec_adapt.tar.gz is ')
  assert lines.count('[0.1] launch: ended with status 1') == 1
  assert 'the job failed: 3 of 4 workers with status 0, 1 of 4' in done.stdout
  # The second attempt copies it again.
  assert [lines.count(f'[{w}] edited') for w in ('0.0', '0.1')] == [2, 1]
  assert len(cloud.calls('scp')) == 3
