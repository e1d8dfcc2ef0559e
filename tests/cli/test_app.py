"""How commands end: statuses, one paragraph for bad input, tracebacks else."""

import subprocess
import sys

import pytest

from encdec_adapt.cli import app
from tests import tiny

_MAIN = """
from absl import flags
from encdec_adapt.cli import app, errors
_DO = flags.DEFINE_enum(
  'do', 'none', ['none', 'refuse', 'miss', 'break', 'stop'], ''
)

def main(argv):
  print('doing', argv[1:])
  if _DO.value == 'refuse':
    raise errors.UserError('config.train.steps is -1;\\n  give at least 1.')
  if _DO.value == 'miss':
    raise errors.AbsentError('process 3 has not come.')
  if _DO.value == 'break':
    raise RuntimeError('a defect')
  return app.RESTART if _DO.value == 'stop' else None

app.run(main)
"""


def _run(*arguments):
  return subprocess.run(
    [sys.executable, '-c', _MAIN, *arguments],
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_lines_are_there_at_once():
  """In a file or a pipe too, whatever ends the process."""
  code = (
    'import os\n'
    'from encdec_adapt.cli import command\n'
    "command.main('', lambda values: None, lambda values: (\n"
    "  print('step 10/20'), os._exit(76)))\n"
  )
  environment = tiny.environment()
  environment.pop('PYTHONUNBUFFERED')
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    timeout=60,
    env=environment,
  )
  assert (done.returncode, done.stdout) == (app.HANG, 'step 10/20\n'), done


@pytest.mark.parametrize(
  'arguments, status, stdout, stderr',
  [
    (['more'], 0, "doing ['more']\n", ''),
    (
      ['--do=refuse'],
      app.USER_ERROR,
      'doing []\n',
      'Error: config.train.steps is -1; give at least 1.\n',
    ),
    (
      ['--do=miss'],
      app.HANG,
      'doing []\n',
      'Error: process 3 has not come.\n',
    ),
    (['--do=stop'], app.RESTART, 'doing []\n', ''),
  ],
)
def test_statuses_and_paragraphs(arguments, status, stdout, stderr):
  done = _run(*arguments)
  assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


@pytest.mark.parametrize('flag', ['--do=dance', '--unknown'])
def test_a_bad_flag_is_a_user_error(flag):
  done = _run(flag)
  assert done.returncode == app.USER_ERROR
  assert done.stderr.startswith('Error: ')
  assert done.stderr.count('\n') == 1
  assert done.stdout == ''


def test_a_defect_keeps_its_traceback():
  done = _run('--do=break')
  assert done.returncode == 1
  assert 'Traceback' in done.stderr
  assert 'a defect' in done.stderr
