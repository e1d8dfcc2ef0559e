"""Imports go one way, and TensorFlow stays out of training processes."""

import ast
import json
import pathlib

import pytest

from configs import gemma2
from tests import tiny

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'encdec_adapt'

# Layers, lowest first: a module imports only from layers below its own, and
# from its own package.
LAYERS = (
  {'ops', 'files'},
  {'sharding'},
  {'telemetry'},
  {'cluster'},
  {'cli'},
  {'models', 'tokenizers'},
  {'data', 'adaptation'},
  {'checkpoints', 'huggingface', 'inference'},
  {'training'},
  {'config'},
  {'conversion'},
  {'evaluation', 'serving'},
  {'planning'},
)
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
# User errors and exit status lie below everything; flags are for commands.
LOWEST = {'cli.errors', 'cli.app', 'cli.keys', 'cli.option_strings'}
COMMANDS = {'convert', 'evaluate', 'generate', 'materialize', 'plan', 'study'}
COMMANDS |= {'serve', 'train'}


def _modules():
  for path in sorted(PACKAGE.rglob('*.py')):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    if len(parts) == 2:
      yield path, parts[0], parts[1]


def _names(path: pathlib.Path) -> set[str]:
  """Everything that a file imports, by its absolute name."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}, line {node.lineno}: relative import'
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def _imports(path: pathlib.Path) -> set[str]:
  """Our modules that a file imports, as 'part.module' or 'main'."""
  own = PACKAGE.name + '.'
  return {
    '.'.join(name.removeprefix(own).split('.')[:2])
    for name in _names(path)
    if name.startswith(own)
  }


@pytest.mark.parametrize(
  'path, part', [(p, part) for p, part, _ in _modules()], ids=str
)
def test_imports_go_one_way(path, part):
  for name in _imports(path):
    other = name.partition('.')[0]
    if other != part and name not in LOWEST:
      assert LEVEL.get(other, 99) < LEVEL.get(part, 98), f'{path}: {name}'


def test_the_root_holds_commands_and_the_configuration():
  names = {path.stem for path in PACKAGE.glob('*.py')}
  assert names == COMMANDS | {'__init__', 'config'}


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_no_command_imports_another(command):
  assert not _imports(PACKAGE / f'{command}.py') & COMMANDS


def test_no_two_modules_have_one_name():
  names = [path.stem for path in PACKAGE.rglob('*.py')]
  again = {name for name in names if names.count(name) > 1}
  assert again == {'__init__'}


def test_modules_are_imported_from_their_package():
  for path in PACKAGE.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name.split('.')[0] for alias in node.names]
        assert PACKAGE.name not in names, f'{path}, line {node.lineno}'


def _users(*libraries: str) -> set[str]:
  """Files of the package that import one of some libraries."""
  return {
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob('*.py')
    for name in _names(path)
    if name.split('.')[0] in libraries
  }


def test_only_data_imports_tensorflow():
  users = _users('tensorflow', 'seqio', 'tensorflow_datasets')
  assert all(user.startswith('data/') for user in users)


def test_only_checkpoint_imports_orbax():
  names = 'manager', 'orbax_folder', 'streaming'
  assert _users('orbax') == {f'checkpoints/{name}.py' for name in names}


def test_only_ops_calls_shard_map():
  calls = ('shard_map(', 'import shard_map')
  users = {
    path.relative_to(PACKAGE).parts[0]
    for path in PACKAGE.rglob('*.py')
    if any(call in path.read_text() for call in calls)
  }
  assert users == {'ops'}


def test_configurations_are_read_before_jax_looks_for_devices():
  """jax joins several hosts, and stands in for GPUs, only before that."""
  code = (
    'import sys\n'
    'from jax._src import xla_bridge\n'
    'from encdec_adapt import config, train\n'
    'from encdec_adapt.cli import command\n'
    'for name in sys.argv[1:]:\n'
    "  values = command.parse(train.define_flags, [f'--config={name}'])\n"
    '  config.load(values.config, sources=False)\n'
    '  assert not xla_bridge.backends_are_initialized(), name\n'
  )
  recipes = [*gemma2.PLANNED, 'size=2b_2b,topology=h100:16', 'size=9b_9b']
  names = [f'configs/gemma2.py:{argument}' for argument in recipes]
  names += ['configs/base.py', 'configs/quickstart.py', 'configs/published.py']
  names += ['configs/presets.py:encoder=llama3.2_1b,decoder=qwen3_0.6b']
  done = tiny.run_code(code, *names)
  assert done.returncode == 0, done.stderr


def test_training_imports_neither_tensorflow_nor_seqio(tmp_path):
  # In a process of its own, as the command does it, to its end.
  code = (
    'import sys\n'
    'from encdec_adapt import evaluate, generate, materialize, train\n'
    'from encdec_adapt.cli import command\n'
    'status = train.main(command.parse(train.define_flags, sys.argv[1:]))\n'
    "bad = {'tensorflow', 'seqio', 'tensorflow_datasets', 'torch'}\n"
    'print(status, sorted(bad & set(sys.modules)))\n'
  )
  flags = tiny.make_records(tmp_path, rows=16)
  done = tiny.run_code(
    code, *flags, '--config.train.steps=2', f'--workdir={tmp_path}/run'
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.splitlines()[-1] == '0 []'
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['steps'] == 2
