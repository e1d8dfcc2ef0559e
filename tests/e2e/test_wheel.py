"""Every command works from a wheel, outside a checkout."""

import os
import shutil
import subprocess
import sys

import pytest

from encdec_adapt.conversion import model_on_disk
from tests import tiny

pytestmark = pytest.mark.e2e
COMMANDS = 'train convert evaluate generate plan study materialize'.split()


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """A folder with the package installed from a wheel."""
  folder = tmp_path_factory.mktemp('wheel')
  # Built from a copy: setuptools leaves its build folder beside setup.py.
  source = folder / 'source'
  shutil.copytree(tiny.ROOT / 'encdec_adapt', source / 'encdec_adapt')
  for name in ('setup.py', 'pyproject.toml', 'LICENSE'):
    shutil.copy(tiny.ROOT / name, source)
  pip = [sys.executable, '-m', 'pip', '--quiet']
  built, target = folder / 'built', folder / 'installed'
  subprocess.run(
    [*pip, 'wheel', '--no-deps', '--no-build-isolation']
    + ['--wheel-dir', built, source],
    check=True,
  )
  (file,) = built.glob('*.whl')
  subprocess.run(
    [*pip, 'install', '--no-deps', '--target', target, file], check=True
  )
  return target


def _run(wheel, folder, code, *arguments):
  """Runs code with the installed package in an empty folder."""
  folder.mkdir(exist_ok=True)
  environment = tiny.environment() | {'PYTHONPATH': str(wheel)}
  done = subprocess.run(
    [sys.executable, '-P', '-c', code, *map(str, arguments)],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def test_every_command_has_help(wheel, tmp_path):
  # All in one process: importing jax takes longer than a command's help.
  code = (
    'import runpy, sys\n'
    'import encdec_adapt\n'
    'print(encdec_adapt.__file__)\n'
    'for name in sys.argv[1:]:\n'
    "  sys.argv = [name, '--help']\n"
    '  try:\n'
    "    runpy.run_module(f'encdec_adapt.{name}', run_name='__main__')\n"
    '  except SystemExit as end:\n'
    '    print(name, end.code)\n'
  )
  shown = _run(wheel, tmp_path / 'empty', code, *COMMANDS)
  assert str(wheel) in shown
  for name in COMMANDS:
    assert any(f'\n{name} {code}\n' in shown for code in (0, None)), shown


def test_convert_and_calibration(wheel, gemma, tmp_path):
  code = (
    'import sys\n'
    'from encdec_adapt import convert\n'
    'from encdec_adapt.cli import command\n'
    'from encdec_adapt.planning import calibration\n'
    'assert calibration.table()\n'
    'run = command.run_subcommand\n'
    "sys.exit(run('', convert.COMMANDS, sys.argv[1:]))\n"
  )
  output = tmp_path / 'run'
  flags = [f'--source={gemma}', f'--output={output}']
  _run(wheel, tmp_path / 'empty', code, 'import', *flags)
  assert model_on_disk.open_model(output).step == 0
  assert not os.listdir(tmp_path / 'empty')
