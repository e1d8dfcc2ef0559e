"""Imports go one way, and text and training do without TensorFlow."""

import ast
import json
import pathlib

import pytest

from encdec_adapt.cli import console
from encdec_adapt.configs import gemma2
from tests import tiny

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'encdec_adapt'

# Folders, lowest first: a module imports from its own folder and from those
# below it, and a folder inside another has its own level.
LEVELS = (
  {'base'},
  {'configs'},
  {'ops', 'files'},
  {'sharding', 'telemetry'},
  {'cluster'},
  {'cli'},
  {'models', 'tokenizers'},
  {'objectives', 'adaptation'},
  {'data.sources'},
  {'data.seqio', 'data.records'},
  {'data'},
  {'data.making'},
  {'huggingface.torch_export'},
  {'checkpoints', 'huggingface', 'inference'},
  {'training.losses', 'training.sections'},
  {'training.metrics'},
  {'training.recipes'},
  {'training'},
  {'config'},
  {'stored'},
  {'generation'},
  {'exchange'},
  {'training.jobs'},
  {'training.start'},
  {'evaluation.results'},
  {'evaluation.measures'},
  {'evaluation.tasks'},
  {'evaluation'},
  {'planner', 'server'},
  {'lab'},
  {'commands'},
)
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
COMMANDS = set(console.COMMANDS)


MODULES = {
  '.'.join(path.relative_to(PACKAGE).with_suffix('').parts): path
  for path in sorted(PACKAGE.rglob('*.py'))
  if path.parent != PACKAGE or path.stem != '__init__'
}


def _folder(module: str) -> str:
  """Returns the folder of a module, its key in LEVEL."""
  folder = module.rpartition('.')[0]
  is_command = module in COMMANDS | {'__main__'}
  return folder or ('commands' if is_command else module)


def _names(path: pathlib.Path) -> set[str]:
  """Everything that a file imports, by its absolute name."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      # `transformers` finds the files of a model's code by relative imports.
      if node.level and path.stem.startswith('modeling_'):
        continue
      assert not node.level, f'{path}, line {node.lineno}: relative import'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


def _imports(path: pathlib.Path) -> set[str]:
  """Modules of the package that a file imports, from its root: 'data.x.y'."""
  prefix = f'{PACKAGE.name}.'
  names = {n.removeprefix(prefix) for n in _names(path) if n.startswith(prefix)}
  # `from encdec_adapt.data import x` names a module, or a folder of them, and
  # `from encdec_adapt.data.x import Name` a name in one.
  packages = {name.removesuffix('.__init__') for name in MODULES}
  return {n if n in packages else n.rpartition('.')[0] for n in names}


@pytest.mark.parametrize('module', MODULES)
def test_imports_go_one_way(module):
  folder = module if module in LEVEL else _folder(module)
  assert folder in LEVEL, f'{module} is in a folder without a level'
  for name in _imports(MODULES[module]):
    other = name if name in LEVEL else _folder(name)
    if other != folder:
      assert LEVEL[other] < LEVEL[folder], f'{module} imports {name}'


def test_the_root_holds_commands_and_the_configuration():
  names = {path.stem for path in PACKAGE.glob('*.py')}
  assert names == COMMANDS | {'__init__', '__main__', 'config', 'configs'}


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_no_command_imports_another(command):
  assert not _imports(PACKAGE / f'{command}.py') & COMMANDS


def test_no_two_modules_have_one_name():
  names = [path.stem for path in PACKAGE.rglob('*.py')]
  repeated = {name for name in names if names.count(name) > 1}
  assert repeated == {'__init__'}


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
  assert all(user.startswith('data/seqio/') for user in _users('seqio'))
  users = _users('tensorflow', 'tensorflow_datasets')
  assert all(user.startswith('data/') for user in users)


def test_only_checkpoint_imports_orbax():
  names = 'manager', 'orbax_folder', 'streaming'
  assert _users('orbax') == {f'checkpoints/{name}.py' for name in names}


def test_the_code_of_exports_imports_only_torch_and_transformers():
  folder = PACKAGE / 'huggingface' / 'torch_export'
  names = {n for p in folder.glob('*_encdec_adapt.py') for n in _names(p)}
  roots = {name.split('.')[0] for name in names}
  assert roots == {'functools', 'math', 'torch', 'transformers'}


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
  recipes = [*gemma2.ON_TPU, 'size=2b_2b,topology=h100:16', 'size=9b_9b']
  names = [f'configs/gemma2.py:{argument}' for argument in recipes]
  names += ['configs/base.py', 'configs/quickstart.py', 'configs/published.py']
  names += ['configs/t5.py:size=t5_11b,topology=h100:8']
  names += ['configs/presets.py:encoder=llama3.2_1b,decoder=qwen3_0.6b']
  done = tiny.run_code(code, *names)
  assert done.returncode == 0, done.stderr


def test_text_needs_neither_tensorflow_nor_seqio(tmp_path):
  # A module that is None cannot be imported.
  text, lines = (f'{tmp_path}/a.{end}' for end in ('txt', 'jsonl'))
  code = (
    'import sys\n'
    "for name in ('tensorflow', 'seqio', 'tensorflow_datasets'):\n"
    '  sys.modules[name] = None\n'
    'from encdec_adapt import materialize\n'
    'from encdec_adapt.cli import command\n'
    'values = command.parse(materialize.define_flags, sys.argv[1:])\n'
    'print(materialize.main(values))\n'
  )
  pathlib.Path(text).write_text('\n'.join(tiny.text(200)))
  rows = [json.dumps({'text': text}) for text in tiny.text(200, seed=1)]
  pathlib.Path(lines).write_text('\n'.join(rows))
  done = tiny.run_code(
    code,
    '--config=laptop',
    f'--workdir={tmp_path}/run',
    f'--config.data.source=text:{text}#lines + jsonl:{lines}',
    '--config.data.vocabulary=bytes',
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.splitlines()[-1] == '0'
  assert (tmp_path / 'run' / 'records' / 'train' / 'manifest.json').exists()


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
