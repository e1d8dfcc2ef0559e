"""Imports go one way, and TensorFlow stays out of training processes."""

import ast
import json
import pathlib

import pytest

from configs import gemma2
from tests import tiny

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'encdec_adapt'

# What each part may import of ours; runtime.errors is everybody's but the
# leaves', and mains import anything.
MAY_IMPORT = {
  'ops': set(),
  'sharding': set(),
  'runtime': set(),
  'models': {'ops'},
  'data': set(),
  'adaptation': {'models'},
  'interop': {'models'},
  'inference': {'models', 'ops', 'sharding'},
  'training': {'inference', 'models', 'ops', 'sharding', 'data'},
  'exchange': {
    'adaptation',
    'config',
    'data',
    'inference',
    'interop',
    'models',
    'sharding',
    'training',
  },
  # What a job's programs cost: the job's own functions make them.
  'planning': {
    'config',
    'evaluation',
    'job',
    'job_sources',
    'models',
    'ops',
    'sharding',
    'training',
  },
  'evaluation': {
    'training',
    'inference',
    'models',
    'ops',
    'sharding',
    'data',
  },
}
LEAVES = ('ops', 'sharding')
# Of data, what other packages may import.
TENSORFLOW_FREE = {
  'added_tokens',
  'batch',
  'records',
  'loader',
  'vocabularies',
  'vocabulary',
}
# Of runtime, what is for everybody but the leaves; exchange, half of a main,
# may take all.
SHARED = {
  'errors',
  'disk',
  'files',
  'seals',
  'storage',
  'lock',
  'orphans',
  'progress',
  'distributed',
  'environment',
  'flops',
}


def _modules():
  for path in sorted(PACKAGE.rglob('*.py')):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    if len(parts) == 2:
      yield path, parts[0], parts[1]


def _package(path: pathlib.Path) -> str:
  """The package that a file's relative imports start from."""
  return '.'.join(path.relative_to(PACKAGE.parent).parent.parts)


def _names(source: str, package: str) -> set[str]:
  """Everything that a source imports, by its absolute name."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      parts = [node.module] if node.module else []
      if node.level:
        above = package.split('.')
        parts = above[: len(above) - node.level + 1] + parts
      found |= {'.'.join([*parts, alias.name]) for alias in node.names}
  return found


def _imports(source: str, package: str) -> set[str]:
  """Our modules that a source imports, as 'part.module' or 'main'."""
  own = PACKAGE.name + '.'
  return {
    '.'.join(name.removeprefix(own).split('.')[:2])
    for name in _names(source, package)
    if name.startswith(own)
  }


@pytest.mark.parametrize(
  'source, names',
  [
    ('from encdec_adapt import train', {'train'}),
    ('from encdec_adapt.data import batch, rows', {'data.batch', 'data.rows'}),
    ('from encdec_adapt.data.batch import Pair', {'data.batch'}),
    ('from . import masks', {'ops.masks'}),
    ('from .masks import MaskSpec', {'ops.masks'}),
    ('from .. import train', {'train'}),
    ('from ..models import build', {'models.build'}),
    ('def f():\n  from ..runtime import lock', {'runtime.lock'}),
    ('import encdec_adapt.data.batch', {'data.batch'}),
    ('import jax\nfrom jax import numpy', set()),
  ],
)
def test_imports_are_found_however_they_are_written(source, names):
  assert _imports(source, 'encdec_adapt.ops') == names


@pytest.mark.parametrize(
  'path, part', [(p, part) for p, part, _ in _modules()], ids=str
)
def test_imports_go_one_way(path, part):
  for name in _imports(path.read_text(), _package(path)):
    other, _, module = name.partition('.')
    if other == part:
      continue
    if other == 'runtime' and part not in LEAVES:
      assert part == 'exchange' or module in SHARED, f'{path} imports {name}'
      continue
    assert other in MAY_IMPORT[part], f'{path} imports {name}'
    if other == 'data':
      assert module in TENSORFLOW_FREE, f'{path} imports {name}'


def test_modules_are_imported_from_their_package():
  for path in PACKAGE.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names = [alias.name.split('.')[0] for alias in node.names]
        assert PACKAGE.name not in names, f'{path}, line {node.lineno}'


def _users(library: str) -> set[str]:
  """Files of the package that import a library."""
  return {
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob('*.py')
    if any(
      name.split('.')[0] == library
      for name in _names(path.read_text(), _package(path))
    )
  }


@pytest.mark.parametrize(
  'library', ['tensorflow', 'seqio', 'tensorflow_datasets']
)
def test_only_data_imports_tensorflow(library):
  assert all(user.startswith('data/') for user in _users(library))


def test_only_checkpoint_imports_orbax():
  assert _users('orbax') == {
    'training/checkpoint.py',
    'training/orbax_folder.py',
    'training/streamed.py',
  }


def test_only_ops_names_shard_map():
  users = set()
  for path in PACKAGE.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      # Attributes, names, the module of an import, what it imports.
      for field in ('attr', 'id', 'module', 'name'):
        if 'shard_map' in (getattr(node, field, None) or ''):
          users.add(path.relative_to(PACKAGE).parts[0])
  assert users == {'ops'}


def test_configurations_are_read_before_jax_looks_for_devices():
  """jax joins several hosts, and stands in for GPUs, only before that."""
  code = (
    'import sys\n'
    'from jax._src import xla_bridge\n'
    'from encdec_adapt import config, train\n'
    'from encdec_adapt.runtime import command\n'
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
    'from encdec_adapt.runtime import command\n'
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
