"""A fake cloud of TPU VMs for launcher tests; see fake_gcloud.py."""

import json
import subprocess
import sys

from tests.launch import checkout

WHERE = ('--name=pair', '--zone=us-west4-a')
CREATION = ('--accelerator=v5litepod-16', '--slices=2')
FAST = ('--poll_seconds=0.05', '--grace_seconds=1')
JOB = ('--', '--config=configs/base.py', "--workdir=gs://b/it's", '--x=a b')
FOLDER = '--config.data.folder=records'
DISK = 'source=projects/p/zones/us-west4-a/disks/d,mode=read-only'


class Cloud(checkout.Checkout):
  """A checkout with a fake cloud."""

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
    given = {flag.partition('=')[0] for flag in flags}
    job = (*JOB, FOLDER) if given & {'--records', '--data_disk'} else JOB
    (self.folder / 'scenario.json').write_text(
      json.dumps({'runs': runs, 'creations': creations, **blips})
    )
    return self.launch(
      'tpu_vm', 'train', *WHERE, *CREATION, *FAST, *flags, *job
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

  def checksum(self, archive):
    """What cksum says of the archive that a command prints."""
    script = f'{archive} | cksum | awk \'{{ print $1 "-" $2 }}\''
    return subprocess.run(
      ['bash', '-c', script],
      cwd=self.root,
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()

  def calls(self, *verbs):
    """Verbs of gcloud that were called; only those of `verbs` if given."""
    path = self.folder / 'calls.jsonl'
    if not path.exists():
      return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [call for call in found if not verbs or call[3] in verbs]


def assert_ended(done, status):
  """Ended with this status; otherwise shows what was printed."""
  assert done.returncode == status, done.stdout + done.stderr


def starts(cloud) -> int:
  """Number of starts of a job that ran from step 0 to its end."""
  (log,) = [
    text
    for text in (
      path.read_text()
      for path in cloud.folder.glob('home-*/encdec_adapt.job/log')
    )
    if 'resuming at' in text
  ]
  assert 'resuming at step 0' in log and 'step 6' in log
  return log.count('resuming at')
