"""Cloud TPU VMs on a fake cloud; what it is: fake_gcloud.py."""

import json
import shlex
import subprocess
import sys
import time

import pytest

from launch import commands
from launch.tpu_vm import job, resource
from tests.launch import checkout

WHERE = ('--name=pair', '--zone=us-west4-a')
CREATION = ('--accelerator=v5litepod-16', '--slices=2')
FAST = ('--poll_seconds=0.05', '--grace_seconds=1')
JOB = ('--', '--config=configs/base.py', "--workdir=gs://b/it's", '--x=a b')
DISK = 'source=projects/p/zones/us-west4-a/disks/d,mode=read-only'


class Cloud(checkout.Checkout):
  """A checkout beside a fake cloud."""

  def __init__(self, folder):
    """An empty cloud."""
    super().__init__(folder)
    self.folder = folder / 'cloud'
    self.folder.mkdir()
    self.environment['FAKE_CLOUD'] = str(self.folder)
    self.put(
      'gcloud', f'exec {sys.executable} {checkout.HERE}/fake_gcloud.py "$@"'
    )
    # Makes environments of the Python that runs the tests.
    self.put(
      'uv',
      'echo "uv $*" >>"$HOME/uv.log"\n'
      f'[ "$1" != venv ] || {{ mkdir -p .venv/bin; ln -sf {sys.executable}'
      ' .venv/bin/python; }',
    )

  def train(self, runs, *flags, creations=(('ACTIVE',),) * 2, **blips):
    """Runs `train` where the job meets `runs`, one after another."""
    (self.folder / 'scenario.json').write_text(
      json.dumps({'runs': runs, 'creations': creations, **blips})
    )
    return self.launch(
      'tpu_vm', 'train', *WHERE, *CREATION, *FAST, *flags, *JOB
    )

  def put_records(self):
    """Puts records of 2 bytes into a bucket; returns their address."""
    folder = self.folder / 'b' / 'records'
    folder.mkdir(parents=True)
    (folder / 'manifest.json').write_text('{}')
    return 'gs://b/records'

  def start_training(self, runs):
    """Starts what `train` runs, and returns at once."""
    (self.folder / 'scenario.json').write_text(
      json.dumps({'runs': runs, 'creations': [['ACTIVE']]})
    )
    return subprocess.Popen(
      [sys.executable, '-m', 'launch.tpu_vm', 'train', *WHERE, *CREATION]
      + [*FAST, *JOB],
      cwd=self.root,
      env=self.environment,
      stdout=subprocess.PIPE,
      text=True,
    )

  def installed(self, worker):
    """The commands of uv that a worker, as 0-1, has run."""
    return (self.folder / f'home-{worker}' / 'uv.log').read_text().splitlines()

  def calls(self, *verbs):
    """Verbs of gcloud that were called; only those of `verbs` if given."""
    path = self.folder / 'calls.jsonl'
    if not path.exists():
      return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [call for call in found if not verbs or call[3] in verbs]


@pytest.fixture
def cloud(tmp_path):
  """A fake cloud with a checkout to launch from."""
  return Cloud(tmp_path)


def _assert_ended(done, status):
  assert done.returncode == status, done.stdout + done.stderr


def test_dry_run_prints_every_command_and_runs_none(cloud):
  done = cloud.launch(
    *('tpu_vm', 'train', '--dry_run', *WHERE, *CREATION, '--project=p'),
    *('--records=gs://b/records', *JOB),
  )
  _assert_ended(done, 0)
  gcloud = 'gcloud compute tpus queued-resources'
  where = '--zone=us-west4-a --project=p'
  everywhere = '--node=all --worker=all --batch-size=all'
  alive = (
    '--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4'
  )
  run = shlex.quote(
    '--command=bash worker.sh run attempt-1 --config=configs/base.py'
    " '--workdir=gs://b/it'\"'\"'s' '--x=a b'"
  )
  look = f"$ {gcloud} describe pair '--format=value(state.state)' {where}"
  install = '[worker] $ uv pip install --quiet --python .venv/bin/python'
  assert done.stdout.splitlines() == [
    look,
    '# where there is none',
    f'$ {gcloud} create pair --accelerator-type=v5litepod-16'
    ' --runtime-version=v2-alpha-tpuv5-lite --node-count=2 --node-prefix=pair'
    f' --spot --async --quiet {where}',
    '# until it says ACTIVE',
    look,
    '# where it says FAILED, what the cloud says of it',
    f"$ {gcloud} describe pair '--format=yaml(state)' {where}",
    '$ mkdir -p runs/launch/pair',
    '$ tar --exclude=__pycache__ -czf runs/launch/pair/encdec_adapt.tar.gz'
    ' setup.py pyproject.toml encdec_adapt configs launch',
    f'$ {gcloud} scp runs/launch/pair/encdec_adapt.tar.gz'
    f' launch/tpu_vm/worker.sh pair: {everywhere} --quiet {where}',
    f"$ {gcloud} ssh pair '--command=bash worker.sh setup gs://b/records'"
    f' {everywhere} {alive} --quiet {where}',
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
    " --config=configs/base.py --workdir=gs://b/it\\'s --x=a\\ b",
    '# every 60 s while it runs',
    look,
    *(
      f'$ gcloud compute tpus tpu-vm describe pair-{slice_} {where}'
      " '--format=value(state)'"
      for slice_ in (0, 1)
    ),
    '# after a preemption, and then from the top again',
    f'$ {gcloud} delete pair --force --quiet {where}',
  ]
  assert cloud.calls() == []
  assert not (cloud.root / 'runs').exists()


def test_what_dry_run_prints_is_what_is_run(cloud):
  records = f'--records={cloud.put_records()}'
  flags = ('--dry_run', *WHERE, *CREATION, records)
  printed = cloud.launch('tpu_vm', 'train', *flags, *JOB).stdout
  done = cloud.train(['finish'], records)
  _assert_ended(done, 0)
  _assert_ended(cloud.launch('tpu_vm', 'delete', *WHERE), 0)
  shown = {
    tuple(shlex.split(line.partition('$ gcloud ')[2]))
    for line in printed.splitlines()
    if '$ gcloud ' in line
  }
  called = {tuple(call) for call in cloud.calls()}
  # Nothing failed whose reason would have been asked for.
  (unasked,) = shown - called
  assert '--format=yaml(state)' in unasked and called < shown
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
  _assert_ended(done, 0)
  lines = done.stdout.splitlines()
  assert (
    '[0.0] continuing at step 0; --coordinator=auto --config=configs/base.py'
    " --workdir=gs://b/it's --x=a b" in lines
  )
  for worker in ('0.0', '0.1', '1.0', '1.1'):
    assert f'[{worker}] launch: ended with status 0' in lines
    home = cloud.folder / f'home-{worker.replace(".", "-")}'
    assert (home / 'encdec_adapt' / 'records' / 'manifest.json').exists()
    assert 'launch/locks/tpu.txt' in cloud.installed(home.name[5:])[1]
  log = (cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt').read_text()
  assert '[0.0] step 6\n' in log
  assert [call[3] for call in cloud.calls('create', 'delete')] == ['create']
  assert 'still there, and cost' in done.stdout

  # Given again, nothing is created, and nothing is installed again.
  installed = cloud.installed('0-0')
  done = cloud.train(['finish'], '--delete_when_done')
  _assert_ended(done, 0)
  assert '[0.0] continuing at step 6' in done.stdout
  assert len(installed) == 3
  assert '.venv is as launch/locks/tpu.txt has it' in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
  ]


@pytest.mark.parametrize('event', ['preempt', 'vanish', 'lose_slice'])
def test_a_preempted_resource_is_made_anew_and_the_job_continues(cloud, event):
  done = cloud.train([event, 'finish'])
  _assert_ended(done, 0)
  assert 'preempted: made anew, and continued' in done.stdout
  assert '[0.0] continuing at step 2' in done.stdout
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
  _assert_ended(done, 0)
  assert '# pair: SUSPENDED' in done.stdout
  assert '[0.0] step 6' in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
    'create',
  ]


@pytest.mark.long
def test_told_to_stop_on_machines_that_stay_it_is_started_again(cloud):
  done = cloud.train(['stop', 'finish'])
  _assert_ended(done, 0)
  assert 'the job told to stop, and saved' in done.stdout
  assert '[0.0] continuing at step 2' in done.stdout
  assert len(cloud.calls('create', 'delete')) == 1


def test_the_job_on_every_worker_is_told_to_trace_and_to_stop(cloud):
  log = cloud.root / 'runs' / 'launch' / 'pair' / 'log.txt'
  launcher = cloud.start_training(['wait', 'finish'])
  try:
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count('waiting') < 4:
      assert time.monotonic() < deadline
      time.sleep(0.1)
    traced = cloud.launch('tpu_vm', 'profile', *WHERE, '--slices=2')
    while log.read_text().count('] tracing') < 4:
      assert time.monotonic() < deadline
      time.sleep(0.1)
    done = cloud.launch('tpu_vm', 'stop', *WHERE, '--slices=2')
    output, _ = launcher.communicate(timeout=60)
  finally:
    launcher.kill()
  assert traced.stdout.count('] launch: told to trace its next steps') == 4
  assert done.stdout.count('] launch: told to stop') == 4
  assert 'the job told to stop, and saved: 4 of 4 workers' in output
  assert launcher.returncode == 0


def test_a_connection_that_breaks_does_not_end_the_job(cloud):
  done = cloud.train(['drop', 'finish'])
  _assert_ended(done, 0)
  lines = done.stdout.splitlines()
  assert 'the job was lost from sight' in done.stdout
  # Every line of it was shown; one that was on its way may come twice.
  assert _starts(cloud) == 1
  assert {f'[0.0] step {step}' for step in range(3, 7)} <= set(lines)


def test_looks_that_fail_do_not_end_the_launcher(cloud):
  blips = {'queued-resources describe': 3, 'tpu-vm describe': 2}
  done = cloud.train(['slow'], '--delete_when_done', blips=blips)
  _assert_ended(done, 0)
  assert done.stdout.count('# a look failed (1 in a row, 30 are borne)') >= 2
  assert '# a look failed (3 in a row, 30 are borne)' in done.stdout
  assert 'Unable to find the server' in done.stdout
  assert 'machines are being taken away' not in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
  ]


def test_a_look_that_fails_after_the_connection_did_deletes_nothing(cloud):
  done = cloud.train(['drop', 'finish'], blips={'tpu-vm describe': 4})
  _assert_ended(done, 0)
  assert done.stdout.count('# a look failed (') == 4
  assert 'preempted' not in done.stdout
  assert not cloud.calls('delete')
  assert _starts(cloud) == 1


def _starts(cloud) -> int:
  """How often a job that went on from step 0 to its end was started."""
  (log,) = [
    text
    for text in (
      path.read_text()
      for path in cloud.folder.glob('home-*/encdec_adapt.job/log')
    )
    if 'continuing at' in text
  ]
  assert 'continuing at step 0' in log and 'step 6' in log
  return log.count('continuing at')


class Looks(commands.Shell):
  """A shell whose commands end with what it is given, one after another."""

  def __init__(self, *answers):
    """Answers are status, output and complaint; the last one stays."""
    super().__init__(dry_run=False)
    self.answers = list(answers)

  def ask(self, command):
    """The next answer."""
    return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ACTIVE, READY = (0, 'ACTIVE', ''), (0, 'READY', '')
BLIP = (1, '', 'Unable to find the server')
MISSING = (1, '', 'ERROR: (gcloud...) NOT_FOUND: Resource was not found.')


def _job(*answers):
  one = resource.Resource(name='pair', zone='us-west4-a')
  return job.Job(one, Looks(*answers), poll_seconds=0, grace_seconds=0)


@pytest.mark.parametrize(
  'answers, gone',
  [
    ([ACTIVE, READY], False),
    ([ACTIVE, MISSING], True),
    ([ACTIVE, (0, 'PREEMPTED', '')], True),
    ([MISSING], True),
    ([(0, 'SUSPENDING', '')], True),
    ([ACTIVE, BLIP], None),
    ([ACTIVE, (127, '', 'gcloud: command not found')], None),
  ],
)
def test_machines_are_gone_where_the_cloud_says_so(answers, gone):
  assert _job(*answers).gone() is gone


def test_the_first_look_must_not_fail():
  with pytest.raises(commands.LaunchError, match='ended with status 1: Unable'):
    _job(BLIP).state()


def test_half_an_hour_of_looks_that_fail_ends_it(capsys):
  watching = _job(ACTIVE, READY, BLIP)
  assert watching.gone() is False
  for _ in range(30):
    assert watching.gone() is None
  with pytest.raises(commands.LaunchError, match='Unable to find the server'):
    watching.gone()
  assert capsys.readouterr().out.count('# a look failed (') == 30


def test_nothing_is_deleted_before_a_look_succeeds():
  down = _job(ACTIVE, BLIP, BLIP, MISSING)
  assert down.state() == 'ACTIVE'
  down.take_down()  # Would run a command otherwise, and fail.
  assert _job(ACTIVE, BLIP, BLIP, ACTIVE, READY).was_preempted(wait=True) is (
    False
  )


def test_records_that_the_disk_has_no_room_for_are_not_copied(cloud):
  cloud.put('df', 'echo Avail; echo 2000000001')
  done = cloud.train(['finish'], f'--records={cloud.put_records()}')
  _assert_ended(done, 2)
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
  _assert_ended(cloud.train(['finish'], records), 0)
  cloud.put('df', 'echo Avail; echo 2000000000')
  (cloud.folder / 'step').unlink()
  _assert_ended(cloud.train(['finish'], records), 0)


def test_records_of_a_data_disk_are_mounted(cloud):
  cloud.put(
    'sudo',
    '[ ! -e "$FAKE_CLOUD/no-disk" ] || exit 32\n'
    'echo "$*" >>"$HOME/sudo.log"; touch "${!#}/manifest.json"',
  )
  done = cloud.train(['finish'], f'--data_disk={DISK}')
  _assert_ended(done, 0)
  assert f'--data-disk={DISK}' in cloud.calls('create')[0]
  for worker in ('0-0', '1-1'):
    home = cloud.folder / f'home-{worker}'
    assert (home / 'sudo.log').read_text() == (
      'mount -t ext4 -o ro -o noload LABEL=records encdec_adapt/records\n'
    )
    assert (home / 'encdec_adapt' / 'records' / 'manifest.json').exists()
  assert not [call for call in cloud.calls() if call[0] == 'storage']

  (cloud.folder / 'no-disk').touch()
  done = cloud.train(['finish'], f'--data_disk={DISK}')
  _assert_ended(done, 2)
  assert '(mkfs.ext4 -L records)' in done.stdout


def test_a_recipe_without_chips_to_spread_it_over_is_warned_of(cloud):
  config = '--config=configs/gemma2.py:size=9b_2b'
  flags = ('--dry_run', *WHERE, *CREATION, '--', '--workdir=/b/r')
  done = cloud.launch('tpu_vm', 'train', *flags, config)
  _assert_ended(done, 0)
  assert done.stderr.startswith(f'Warning: {config} names no topology')
  assert 'configs/gemma2.py:size=9b_2b,topology=v5e:4x4' in done.stderr
  done = cloud.launch(
    'tpu_vm', 'train', *flags, f'{config},topology=v5e:4x4,slices=2'
  )
  _assert_ended(done, 0)
  assert not done.stderr


@pytest.mark.long
def test_failures_in_a_row_end_it(cloud):
  done = cloud.train(['crash', 'crash'], '--retries=1')
  _assert_ended(done, 2)
  assert 'failed 2 times in a row' in done.stderr
  assert '--retries=1' in done.stderr
  assert 'Traceback' in done.stdout
  assert not cloud.calls('delete')


def test_bad_input_is_not_tried_again(cloud):
  done = cloud.train(['refuse'])
  _assert_ended(done, 2)
  assert done.stdout.count('[0.1] Error: config.data') == 1
  assert 'refused its input: 4 of 4 workers with status 2' in done.stdout


def test_a_request_that_fails_says_why(cloud):
  done = cloud.train([], creations=[['FAILED']])
  _assert_ended(done, 2)
  assert 'could not fill the request pair' in done.stderr


@pytest.mark.long
def test_restarts_are_limited(cloud):
  done = cloud.train(['stop', 'stop'], '--max_restarts=1')
  _assert_ended(done, 2)
  assert '--max_restarts=1' in done.stderr


@pytest.mark.parametrize(
  'statuses, gcloud, end',
  [
    ({'0.0': 0, '0.1': 0}, 0, job.End.DONE),
    ({'0.0': 0}, 255, job.End.LOST),  # Of a worker nothing is known.
    ({}, 1, job.End.LOST),
    ({'0.0': 75, '0.1': 75}, 75, job.End.RESTART),
    ({'0.0': 75, '0.1': 0}, 75, job.End.RESTART),
    ({'0.0': 2, '0.1': 2}, 2, job.End.REFUSED),
    ({'0.0': 1, '0.1': 2}, 1, job.End.FAILED),  # It tells the others.
    ({'0.0': 75, '0.1': 137}, 75, job.End.FAILED),
    ({'0.0': 76, '0.1': 76}, 76, job.End.FAILED),
  ],
)
def test_how_an_attempt_ended(statuses, gcloud, end):
  assert job.judge(statuses, gcloud) is end


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
    ({'--data_disk': DISK.replace('4-a', '4-b')}, '/zones/us-west4-a/disks/'),
    ({'--data_disk': DISK.replace('only', 'write')}, 'which all workers att'),
    ({'--data_disk': DISK, '--records': 'gs://b/r'}, ': give one; both are'),
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


def test_without_gcloud_it_says_so(tmp_path):
  here = checkout.Checkout(tmp_path)
  here.environment['PATH'] = str(here.bin)
  done = here.launch('tpu_vm', 'delete', *WHERE)
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
