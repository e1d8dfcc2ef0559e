"""Commands with subcommands; those with flags only are in tests/e2e."""

import functools
import io
import json
import subprocess
import sys

from absl import flags
import pytest

from encdec_adapt import evaluate, generate, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command, console
from tests import tiny


def _define(values):
  flags.DEFINE_integer('count', 1, 'How often.', flag_values=values)


COMMANDS = {
  'one': command.Subcommand(
    'takes one', _define, lambda values, rest: values.count, ('X',)
  ),
  'many': command.Subcommand(
    'takes some', _define, lambda values, rest: len(rest), ('X', 'Y'), more=True
  ),
}
run = functools.partial(command.run_subcommand, 'A command.', COMMANDS)


@pytest.mark.parametrize(
  'argv, status',
  [
    (['one', 'a'], 1),
    (['one', 'a', '--count=3'], 3),
    (['one', '--count=3', 'a'], 3),
    (['many', 'a', 'b'], 2),
    (['many', 'a', '--count=7', 'b', 'c'], 3),
  ],
)
def test_flags_before_and_after_operands(argv, status):
  assert run(argv) == status


@pytest.mark.parametrize(
  'argv, words',
  [
    (['on'], "'on' is not a command; .* one of one, many"),
    (['one'], 'one takes X, not nothing'),
    (['one', 'a', 'b'], 'one takes X, not a b'),
    (['many', 'a'], 'many takes X Y ..., not a'),
    (['one', 'a', '--cuont=3'], 'cuont'),
    (['one', 'a', '--count=x'], 'count'),
  ],
)
def test_bad_arguments_are_named(argv, words):
  with pytest.raises(errors.UserError, match=words):
    run(argv)


def test_a_terminal_of_another_encoding_gets_escapes(monkeypatch):
  screen = io.TextIOWrapper(io.BytesIO(), 'ascii')
  monkeypatch.setattr(sys, 'stdout', screen)
  monkeypatch.setattr(sys, 'argv', ['x'])
  with pytest.raises(SystemExit):
    command.main('A command.', lambda _: None, lambda _: print('\u00fc'))
  assert screen.buffer.getvalue() == b'\\xfc\n'


PROCESSES = {'coordinator', 'processes', 'process', 'start_seconds'}


@pytest.mark.parametrize(
  'main, flags, free',
  [
    (train, ['--config=configs/base.py', '--config.seed=3'], set()),
    (evaluate, ['--checkpoint=a', '--limit=3'], set()),
    (generate, ['--checkpoint=a'], {'prompt', 'prompts', 'output'}),
  ],
)
def test_processes_agree_on_every_flag_but_their_own(main, flags, free):
  values = command.parse(main.define_flags, [*flags, '--process=1'])
  agreed = command.agreed(values)
  names = {name for name in values if '.' not in name} - {'h', 'help'}
  assert names - agreed.keys() == free | PROCESSES
  assert json.loads(json.dumps(agreed))
  if main is train:
    assert agreed['config']['seed'] == 3


def _python(*arguments):
  """Runs Python in a clone; -S: without what is installed."""
  return subprocess.run(
    [sys.executable, *arguments], cwd=tiny.ROOT, capture_output=True, text=True
  )


def test_the_package_is_a_command():
  done = _python('-m', 'encdec_adapt', '--help')
  assert done.returncode == 0
  for name in console.COMMANDS:
    assert f'\n  {name} ' in done.stdout


@pytest.mark.parametrize('module', ['encdec_adapt', 'encdec_adapt.train'])
def test_a_command_outside_of_its_environment_says_how_to_activate_it(module):
  done = _python('-S', '-m', module, '--help')
  assert done.returncode == 1 and done.stdout == ''
  (line,) = done.stderr.splitlines()
  assert 'source .venv/bin/activate' in line and 'pip install' in line
