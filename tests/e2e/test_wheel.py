"""Every command works from a wheel, outside a checkout."""

import os
import shutil
import subprocess
import sys

import pytest

import encdec_adapt
from encdec_adapt.cli import console
from encdec_adapt.stored import model_on_disk
from tests import tiny

pytestmark = pytest.mark.e2e


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """A folder with the package installed from a wheel."""
  folder = tmp_path_factory.mktemp('wheel')
  # Built from a copy: setuptools leaves its build folder beside setup.py.
  source = folder / 'source'
  for name in ('encdec_adapt', 'configs'):
    shutil.copytree(tiny.ROOT / name, source / name)
  for name in ('setup.py', 'pyproject.toml', 'LICENSE', 'README.md'):
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


@pytest.mark.long
def test_every_command_has_help(wheel, tmp_path):
  # All in one process: importing jax takes longer than a command's help.
  code = (
    'import runpy, sys\n'
    'import encdec_adapt\n'
    'from encdec_adapt.base import packages\n'
    'print(encdec_adapt.__file__)\n'
    "print(packages.install_command('eval'))\n"
    'for name in sys.argv[1:]:\n'
    "  sys.argv = [name, '--help']\n"
    '  try:\n'
    "    runpy.run_module(f'encdec_adapt.{name}', run_name='__main__')\n"
    '  except SystemExit as end:\n'
    '    print(name, end.code)\n'
  )
  shown = _run(wheel, tmp_path / 'empty', code, *console.COMMANDS)
  assert str(wheel) in shown
  assert "pip install 'encdec_adapt[eval]'\n" in shown
  for name in console.COMMANDS:
    assert any(f'\n{name} {code}\n' in shown for code in (0, None)), shown


@pytest.mark.long
@pytest.mark.parametrize('place', ['wheel', 'checkout'])
def test_configurations_are_found_beside_a_foreign_folder(
  place, wheel, tmp_path
):
  """A user's own folder `configs`, first on the path, is never imported."""
  folder = tmp_path / 'foreign'
  (folder / 'configs').mkdir(parents=True)
  for name in ('__init__', 'pretrained', 'lookups'):
    (folder / 'configs' / f'{name}.py').write_text('raise OSError("foreign")')
  code = (
    'import sys\n'
    "sys.path.insert(0, '')\n"
    'from encdec_adapt import config, configs, materialize, study, train\n'
    'from encdec_adapt.cli import command\n'
    "model = configs.path('decoders/small')\n"
    "for name in (f'sft:source={model}', 'gemma2:size=2b_2b'):\n"
    "  values = command.parse(train.define_flags, [f'--config={name}'])\n"
    '  print(values.config.model.kind, values.config.data.objective)\n'
    "assert study.load('studies/tuning:size=smoke').claims\n"
    "page = study.load('quickstart:size=smoke')\n"
    'for stage in page.commands:\n'
    '  print(stage.arguments)\n'
    "flag = f'--config={page.arms[0].config}'\n"
    'command.parse(materialize.define_flags, [flag])\n'
    'from encdec_adapt.configs import lookups\n'
    'print(lookups.__file__)\n'
  )
  root = wheel if place == 'wheel' else tiny.ROOT
  shown = _run(root, folder, code)
  assert 'decoder_only pairs\nencoder_decoder prefix_lm\n' in shown
  assert shown.splitlines()[-1].startswith(str(root))
  names = {path.name.partition('-')[0] for path in wheel.iterdir()}
  assert names == {'encdec_adapt', 'bin'}


@pytest.mark.long
@pytest.mark.parametrize(
  'arguments, status, words',
  [
    ([], 0, console.COMMANDS),
    (['--version'], 0, [f'encdec_adapt {encdec_adapt.__version__}\n']),
    (['trian'], 2, ["did you mean 'train'?"]),
    (
      ['train', '--config=gemma3'],
      2,
      ['gemma3', 'gemma2, gemma3_270m, gemma4, laptop'],
    ),
  ],
)
def test_the_console_script_runs_commands(
  arguments, status, words, wheel, tmp_path
):
  done = subprocess.run(
    [sys.executable, wheel / 'bin' / 'encdec-adapt', *arguments],
    cwd=tmp_path,
    env=tiny.environment() | {'PYTHONPATH': str(wheel)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == status, done.stderr
  assert all(word in done.stdout + done.stderr for word in words)
  assert 'Traceback' not in done.stderr


@pytest.mark.long
def test_convert_and_calibration(wheel, gemma, tmp_path):
  code = (
    'import sys\n'
    'from encdec_adapt import convert\n'
    'from encdec_adapt.cli import command\n'
    'from encdec_adapt.planner import calibration\n'
    'assert calibration.table()\n'
    'run = command.run_subcommand\n'
    "sys.exit(run('', convert.COMMANDS, sys.argv[1:]))\n"
  )
  output = tmp_path / 'run'
  flags = [f'--source={gemma}', f'--output={output}']
  _run(wheel, tmp_path / 'empty', code, 'import', *flags)
  assert model_on_disk.open_model(output).step == 0
  flags = [f'--checkpoint={output}', f'--output={tmp_path}/folder']
  _run(wheel, tmp_path / 'empty', code, 'export', *flags)
  assert 'exported in' in (tmp_path / 'folder' / 'README.md').read_text()
  assert not os.listdir(tmp_path / 'empty')
