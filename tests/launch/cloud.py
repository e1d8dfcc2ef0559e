"""A checkout to launch from, with stand-ins for every program it runs."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from tests import tiny

HERE = pathlib.Path(__file__).resolve().parent
JOB = ('--', '--config=configs/base.py', "--workdir=gs://b/it's", '--x=a b')
RECORDS = '--config.data.folder=records'
PAIR = ('--name=pair', '--zone=us-west4-a')
TPU_VM = (*PAIR, '--accelerator=v5litepod-16', '--slices=2')
FAST = ('--poll_seconds=0.05', '--grace_seconds=1')
DISK = 'source=projects/p/zones/us-west4-a/disks/d,mode=read-only'

# The metadata server of a virtual machine.
_CURL = """case "${!#}" in
  */agent-worker-number) echo "${FAKE_POSITION#*-}" ;;
  */tpu-env) echo "MEGASCALE_SLICE_ID: '${FAKE_POSITION%-*}'" ;;
  *) exit 22 ;;
esac"""
# Makes environments of the Python that runs the tests.
_UV = f"""echo "uv $*" >>"$HOME/uv.log"
if [ "$1" = venv ]; then
  mkdir -p .venv/bin
  ln -sf {sys.executable} .venv/bin/python
fi"""


class Cloud:
  """A copy of the launchers with stand_in_train.py, and a fake cloud.

  Attributes:
    root: the checkout.
    bin: folder on PATH with the stand-ins.
    folder: the cloud, see fake_tools.py.
    environment: environment of the launchers.
  """

  def __init__(self, folder: pathlib.Path):
    """Makes all of it in the test's folder."""
    self.root, self.bin = folder / 'checkout', folder / 'bin'
    self.folder = folder / 'cloud'
    self.bin.mkdir()
    self.folder.mkdir()
    self.environment = {
      name: value
      for name, value in os.environ.items()
      if name not in ('PYTHON', 'PYTHONPATH', 'PYTHONUNBUFFERED', 'VIRTUAL_ENV')
      and not name.endswith('_MEM_FRACTION')
    }
    self.environment['PATH'] = f'{self.bin}:{os.environ["PATH"]}'
    self.environment['FAKE_CLOUD'] = str(self.folder)
    for path in ('launch', 'configs'):
      skip = shutil.ignore_patterns('__pycache__')
      shutil.copytree(tiny.ROOT / path, self.root / path, ignore=skip)
    for path in ('setup.py', 'pyproject.toml', 'README.md'):
      shutil.copy(tiny.ROOT / path, self.root)
    package = self.root / 'encdec_adapt'
    package.mkdir()
    (package / '__init__.py').touch()
    shutil.copy(HERE / 'stand_in_train.py', package / 'train.py')
    for name in 'gcloud sbatch squeue scancel xpk docker kubectl'.split():
      program = f'{sys.executable} {HERE}/fake_tools.py'
      self.put(name, f'exec {program} {name} "$@"')
    self.put('curl', _CURL)
    self.put('uv', _UV)

  def put(self, name: str, script: str) -> None:
    """Puts a shell script on PATH."""
    path = self.bin / name
    path.write_text(f'#!/usr/bin/env bash\n{script}\n')
    path.chmod(0o755)

  def start(self, module: str, *arguments: str) -> subprocess.Popen:
    """Starts a launcher."""
    return subprocess.Popen(
      [sys.executable, '-m', f'launch.{module}', *arguments],
      cwd=self.root,
      env=self.environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def launch(
    self, module: str, *arguments: str, status: int = 0
  ) -> subprocess.CompletedProcess:
    """Runs a launcher to its end and checks its exit status."""
    process = self.start(module, *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, output + errors
    return subprocess.CompletedProcess(module, status, output, errors)

  def bash(self, *arguments: str, **environment: str):
    """Runs bash in the checkout; returns its result."""
    return subprocess.run(
      ['bash', *arguments],
      cwd=self.root,
      env=self.environment | environment,
      capture_output=True,
      text=True,
    )

  def set_scenario(self, runs, creations=(('ACTIVE',),) * 2, **failures):
    """Sets the events of the runs to come, and the states of resources."""
    for count in self.folder.glob('count *'):
      count.unlink()
    content = {'runs': runs, 'creations': creations, 'failures': failures}
    (self.folder / 'scenario.json').write_text(json.dumps(content))

  def train(self, runs, *flags: str, status: int = 0, **scenario):
    """Runs `launch.tpu_vm train` with these events, one per run."""
    self.set_scenario(runs, **scenario)
    with_records = any(f.startswith(('--rec', '--data_disk')) for f in flags)
    job = (*JOB, RECORDS) if with_records else JOB
    return self.launch(
      *('tpu_vm', 'train', *TPU_VM, *FAST, *flags, *job), status=status
    )

  def put_records(self) -> str:
    """Puts records of 2 bytes into a bucket; returns their flag."""
    folder = self.folder / 'b' / 'records'
    folder.mkdir(parents=True)
    (folder / 'manifest.json').write_text('{}')
    return '--records=gs://b/records'

  def calls(self, *verbs: str) -> list[list[str]]:
    """Returns the calls of programs; with verbs, those of gcloud's."""
    path = self.folder / 'calls.jsonl'
    lines = path.read_text().splitlines() if path.exists() else ()
    found = [json.loads(line) for line in lines]
    return [call for call in found if not verbs or call[4] in verbs]

  def requests(self) -> str:
    """Returns the requests for resources, such as 'create delete'."""
    return ' '.join(call[4] for call in self.calls('create', 'delete'))
