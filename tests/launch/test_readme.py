"""The commands of the pages of launch/ are valid and consistent."""

import shlex
import subprocess
import sys

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import materialize, train
from encdec_adapt.cli import command
from tests import tiny


@pytest.fixture(scope='module')
def lines():
  """Returns the commands of the pages, split as by a shell."""
  pages = [tiny.ROOT / 'launch' / name for name in ('', 'gke')]
  blocks = [
    block
    for page in pages
    for block in (page / 'README.md').read_text().split('```\n')[1::2]
  ]
  text = '\n'.join(blocks).replace('\\\n', ' ')
  return [shlex.split(line, comments=True) for line in text.splitlines()]


def _after(lines, *start):
  """Returns the arguments of complete commands that start with these words."""
  return [
    line[len(start) :]
    for line in lines
    if line[: len(start)] == list(start) and '...' not in ' '.join(line)
  ]


@pytest.mark.parametrize('module', ['tpu_vm', 'gke', 'slurm'])
def test_launchers_accept_the_commands(lines, module):
  found = _after(lines, 'python3', '-m', f'launch.{module}')
  assert found
  for verb, *flags in found:
    rehearse = [] if verb == '--help' else ['--dry_run']
    if module == 'slurm' and verb == 'train':
      rehearse.append(f'--python={sys.executable}')
    command_line = [f'launch.{module}', verb, *rehearse, *flags]
    subprocess.run(
      [sys.executable, '-m', *command_line], cwd=tiny.ROOT, check=True
    )


def test_training_reads_the_records_and_uploads_of_the_page(lines, monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  (making,) = _after(lines, 'python', '-m', 'encdec_adapt.materialize')
  launching = _after(lines, 'python3', '-m', 'launch.tpu_vm', 'train')[0]
  training = launching[launching.index('--') + 1 :]
  made = command.parse(materialize.define_flags, making).config
  values = command.parse(train.define_flags, training)
  read = config_lib.load(values.config, values.workdir)
  records = config_lib.load(made, sources=False).data
  assert records.train == read.data.train
  assert records.evaluation == read.data.evaluation

  # Everything that the job reads from the bucket is uploaded, and the records
  # are where the launcher copies them.
  put = {
    target + source
    for source, target in _after(lines, *'gcloud storage cp -r'.split())
  }
  named = {flag.partition('=')[2] for flag in launching if '=gs://' in flag}
  cache = values.config.compute.compile_cache
  assert named - {values.workdir, cache} == put
  assert records.folder == read.data.folder == 'records'
