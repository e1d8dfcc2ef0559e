"""Cloud TPU VMs on a fake cloud; what it is: fake_gcloud.py."""

import shlex
import time

import pytest

from tests.launch import cloud as clouds


def test_dry_run_prints_every_command_and_runs_none(cloud):
  done = cloud.launch(
    *(
      'tpu_vm',
      'train',
      '--dry_run',
      *clouds.WHERE,
      *clouds.CREATION,
      '--project=p',
    ),
    *('--records=gs://b/records', *clouds.JOB, clouds.FOLDER),
  )
  clouds.assert_ended(done, 0)
  gcloud = 'gcloud compute tpus queued-resources'
  where = '--zone=us-west4-a --project=p'
  everywhere = '--node=all --worker=all --batch-size=all'
  alive = (
    '--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4'
  )
  archive = 'tar --exclude=__pycache__ -czf {} setup.py pyproject.toml'
  archive += ' encdec_adapt configs launch'
  source = cloud.checksum(archive.format('-'))
  run = shlex.quote(
    f'--command=bash worker.sh run {source} attempt-1 --config=configs/base.py'
    " '--workdir=gs://b/it'\"'\"'s' '--x=a b' --config.data.folder=records"
  )
  look = f"$ {gcloud} describe pair '--format=value(state.state)' {where}"
  install = '[worker] $ uv pip install --quiet --python .venv/bin/python'
  assert done.stdout.splitlines() == [
    look,
    '# if it does not exist',
    f'$ {gcloud} create pair --accelerator-type=v5litepod-16'
    ' --runtime-version=v2-alpha-tpuv5-lite --node-count=2 --node-prefix=pair'
    f' --spot --async --quiet {where}',
    '# until it prints ACTIVE',
    look,
    '$ mkdir -p runs/launch/pair',
    f'$ {archive.format("runs/launch/pair/encdec_adapt.tar.gz")}',
    f'$ {gcloud} scp runs/launch/pair/encdec_adapt.tar.gz'
    f' launch/tpu_vm/worker.sh pair: {everywhere} --quiet {where}',
    f"$ {gcloud} ssh pair '--command=bash worker.sh setup {source}"
    f" gs://b/records' {everywhere} {alive} --quiet {where}",
    '[worker] $ cksum encdec_adapt.tar.gz',
    '[worker] $ rm -f encdec_adapt.source',
    '[worker] $ mkdir -p encdec_adapt',
    '[worker] $ rm -rf encdec_adapt/encdec_adapt encdec_adapt/configs'
    ' encdec_adapt/launch',
    '[worker] $ tar -xzf encdec_adapt.tar.gz -C encdec_adapt',
    '[worker] $ bash encdec_adapt/launch/install.sh --platform=tpu',
    '[worker] # where there is no uv',
    '[worker] $ python3 -m pip install --quiet --target .venv-uv-0.13.8'
    ' uv==0.13.8',
    '[worker] $ uv venv --quiet --clear --python 3.12 .venv',
    f'{install} --requirement launch/locks/tpu.txt',
    f'{install} --no-deps --editable .',
    '[worker] $ gcloud storage du --summarize gs://b/records',
    '[worker] $ gcloud storage rsync --recursive --checksums-only'
    ' --delete-unmatched-destination-objects gs://b/records'
    ' encdec_adapt/records',
    f'$ {gcloud} ssh pair {run} {everywhere} {alive} --quiet {where}',
    '[worker] $ cd encdec_adapt',
    '[worker] $ .venv/bin/python -m encdec_adapt.train --coordinator=auto'
    " --config=configs/base.py --workdir=gs://b/it\\'s --x=a\\ b"
    ' --config.data.folder=records',
    '# every 60 s while it runs',
    look,
    *(
      f'$ gcloud compute tpus tpu-vm describe pair-{slice_} {where}'
      " '--format=value(state)'"
      for slice_ in (0, 1)
    ),
    '# after a preemption, then from the beginning',
    f'$ {gcloud} delete pair --force --quiet {where}',
  ]
  assert cloud.calls() == []
  assert not (cloud.root / 'runs').exists()


def test_what_dry_run_prints_is_what_is_run(cloud):
  records = f'--records={cloud.put_records()}'
  flags = ('--dry_run', *clouds.WHERE, *clouds.CREATION, records)
  printed = cloud.launch('tpu_vm', 'train', *flags, *clouds.JOB, clouds.FOLDER)
  printed = printed.stdout
  done = cloud.train(['finish'], records)
  clouds.assert_ended(done, 0)
  clouds.assert_ended(cloud.launch('tpu_vm', 'delete', *clouds.WHERE), 0)
  shown = {
    tuple(shlex.split(line.partition('$ gcloud ')[2]))
    for line in printed.splitlines()
    if '$ gcloud ' in line
  }
  called = {tuple(call) for call in cloud.calls()}
  assert called == shown
  # So is what the workers run.
  ran = {
    line.partition('] ')[2]
    for line in done.stdout.splitlines()
    if line.startswith('[0.0] $ ')
  }
  shown = {
    line.partition('] ')[2]
    for line in printed.splitlines()
    if line.startswith('[worker] $ ')
  }
  assert ran <= shown and len(ran) == len(shown) - 1  # uv is there.


def test_a_job_runs_on_all_workers_of_all_slices(cloud):
  done = cloud.train(['finish'], f'--records={cloud.put_records()}')
  clouds.assert_ended(done, 0)
  lines = done.stdout.splitlines()
  assert (
    '[0.0] resuming at step 0; --coordinator=auto --config=configs/base.py'
    " --workdir=gs://b/it's --x=a b --config.data.folder=records" in lines
  )
  for worker in ('0.0', '0.1', '1.0', '1.1'):
    assert f'[{worker}] launch: ended with status 0' in lines
    home = cloud.folder / f'home-{worker.replace(".", "-")}'
    assert (home / 'encdec_adapt' / 'records' / 'manifest.json').exists()
    assert 'launch/locks/tpu.txt' in cloud.installed(home.name[5:])[1]
  log = (cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt').read_text()
  assert '[0.0] step 6\n' in log
  assert [call[3] for call in cloud.calls('create', 'delete')] == ['create']
  assert 'still exist and cost' in done.stdout

  # Given again, nothing is created, and nothing is installed again.
  installed = cloud.installed('0-0')
  done = cloud.train(['finish'], '--delete_when_done')
  clouds.assert_ended(done, 0)
  assert '[0.0] resuming at step 6' in done.stdout
  assert len(installed) == 3
  assert '.venv is as launch/locks/tpu.txt has it' in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
  ]


@pytest.mark.parametrize('event', ['preempt', 'vanish', 'lose_slice'])
def test_a_preempted_resource_is_made_anew_and_the_job_continues(cloud, event):
  done = cloud.train([event, 'finish'])
  clouds.assert_ended(done, 0)
  assert 'preempted: created again and resumed' in done.stdout
  assert '[0.0] resuming at step 2' in done.stdout
  # Of machines that vanish, the last lines may not arrive.
  for step in (3, 4, 5, 6):
    assert done.stdout.count(f'[0.0] step {step}\n') == 1
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
    'create',
  ]


@pytest.mark.long
def test_one_preempted_while_it_is_made_is_made_anew(cloud):
  creations = [['SUSPENDING', 'SUSPENDED'], ['ACTIVE']]
  done = cloud.train(['finish'], creations=creations)
  clouds.assert_ended(done, 0)
  assert '# pair: SUSPENDED' in done.stdout
  assert '[0.0] step 6' in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
    'create',
  ]


def test_the_job_on_every_worker_is_told_to_trace_and_to_stop(cloud):
  log = cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt'
  launcher = cloud.start_training(['wait', 'finish'])
  try:
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count('waiting') < 4:
      assert time.monotonic() < deadline
      time.sleep(0.1)
    traced = cloud.launch('tpu_vm', 'profile', *clouds.WHERE, '--slices=2')
    while log.read_text().count('] tracing') < 4:
      assert time.monotonic() < deadline
      time.sleep(0.1)
    done = cloud.launch('tpu_vm', 'stop', *clouds.WHERE, '--slices=2')
    output, _ = launcher.communicate(timeout=60)
  finally:
    launcher.kill()
  assert traced.stdout.count('] launch: sent SIGUSR1') == 4
  assert done.stdout.count('] launch: sent SIGTERM') == 4
  assert 'the job was stopped after a save: 4 of 4 workers' in output
  assert launcher.returncode == 0


def test_a_connection_that_breaks_does_not_end_the_job(cloud):
  done = cloud.train(['drop', 'finish'])
  clouds.assert_ended(done, 0)
  lines = done.stdout.splitlines()
  assert 'the job lost its connection' in done.stdout
  # Every line of it was shown; one that was on its way may come twice.
  assert clouds.starts(cloud) == 1
  assert {f'[0.0] step {step}' for step in range(3, 7)} <= set(lines)


@pytest.mark.long
def test_failures_in_a_row_end_it(cloud):
  done = cloud.train(['crash', 'crash'], '--retries=1')
  clouds.assert_ended(done, 2)
  assert 'failed 2 times in a row' in done.stderr
  assert '--retries=1' in done.stderr
  assert 'Traceback' in done.stdout
  assert not cloud.calls('delete')


def test_bad_input_is_not_tried_again(cloud):
  done = cloud.train(['refuse'])
  clouds.assert_ended(done, 2)
  assert done.stdout.count('[0.1] Error: config.data') == 1
  assert 'refused its input: 4 of 4 workers with status 2' in done.stdout


def test_a_request_that_fails_says_why(cloud):
  done = cloud.train([], creations=[['FAILED']])
  clouds.assert_ended(done, 2)
  assert 'could not fill the request pair' in done.stderr
