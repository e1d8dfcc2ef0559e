"""Exit statuses, one paragraph for user errors, tracebacks for bugs."""

import subprocess
import sys

import pytest

from encdec_adapt.base import exit_status
from tests import tiny

_MAIN = """
import os
from absl import flags
from encdec_adapt.base import errors, exit_status
from encdec_adapt.cli import command

def define(values):
  default = 'return exit_status.RESTART'
  flags.DEFINE_string('end', default, '', flag_values=values)
  flags.DEFINE_integer('count', 0, '', flag_values=values)

def main(values):
  print('step 10/20')
  if values.end == 'user error':
    raise errors.UserError('config.train.steps is -1;\\n  give at least 1.')
  if values.end == 'diverged':
    raise errors.DivergedError('the loss is nan.')
  if values.end == 'absent':
    raise errors.AbsentError('process 3 is missing.')
  if values.end == 'bug':
    raise RuntimeError('a bug')
  if values.end == 'Ctrl-C':
    raise KeyboardInterrupt
  if values.end == 'kill':  # Lines are printed at once, also into a pipe.
    os._exit(exit_status.HANG)
  return exit_status.RESTART

command.main('A job.', define, main)
"""
_SEE_KEYS = 'print_config shows every key.\n'


@pytest.mark.parametrize(
  'arguments, status, stdout, stderr',
  [
    ([], exit_status.RESTART, 'step 10/20\n', ''),
    (['--end=kill'], exit_status.HANG, 'step 10/20\n', ''),
    (
      *(['--end=user error'], exit_status.USER_ERROR, 'step 10/20\n'),
      'Error: config.train.steps is -1; give at least 1.\n',
    ),
    (
      *(['--end=diverged'], exit_status.DIVERGED, 'step 10/20\n'),
      'Error: the loss is nan.\n',
    ),
    (
      *(['--end=absent'], exit_status.HANG, 'step 10/20\n'),
      'Error: process 3 is missing.\n',
    ),
    (
      *(['--end=Ctrl-C'], exit_status.INTERRUPTED),
      *('step 10/20\n', 'interrupted\n'),
    ),
    (['--end=bug'], 1, 'step 10/20\n', 'RuntimeError: a bug\n'),
    (['--count=x'], exit_status.USER_ERROR, '', _SEE_KEYS),
    (['--unknown'], exit_status.USER_ERROR, '', _SEE_KEYS),
  ],
)
def test_statuses_and_paragraphs(arguments, status, stdout, stderr):
  environment = tiny.environment()
  environment.pop('PYTHONUNBUFFERED')
  done = subprocess.run(
    [sys.executable, '-c', _MAIN, *arguments],
    capture_output=True,
    text=True,
    timeout=60,
    env=environment,
  )
  assert (done.returncode, done.stdout) == (status, stdout), done.stderr
  assert done.stderr.endswith(stderr)
  if status not in (1, exit_status.RESTART):
    assert done.stderr.count('\n') == bool(stderr)


def test_output_without_a_reader_ends_the_command_quietly():
  code = _MAIN.replace("'step 10/20'", "'step 10/20\\n' * 100_000")
  with subprocess.Popen(
    [sys.executable, '-c', code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=tiny.environment(),
  ) as process:
    assert process.stdout.readline() == b'step 10/20\n'  # As `| head -1` does.
    process.stdout.close()
    assert process.stderr.read() == b''
  assert process.returncode == exit_status.CLOSED_OUTPUT
