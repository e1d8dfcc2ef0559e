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


def test_success_and_leftover_arguments():
  done = _run('more')
  assert (done.returncode, done.stdout) == (0, "doing ['more']\n")


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


def test_a_user_error_is_one_paragraph():
  done = _run('--do=refuse')
  assert done.returncode == app.USER_ERROR == 2
  assert done.stderr == ('Error: config.train.steps is -1; give at least 1.\n')


def test_a_missing_process_has_a_status_that_launchers_restart_on():
  done = _run('--do=miss')
  assert done.returncode == app.HANG == 76
  assert done.stderr == 'Error: process 3 has not come.\n'


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


def test_a_status_is_passed_on():
  assert _run('--do=stop').returncode == app.RESTART == 75
