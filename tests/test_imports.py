"""Imports go one way, and TensorFlow stays out of training processes."""

import ast
import pathlib
import subprocess
import sys

import pytest

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
# Of data, what training and evaluation may import.
TENSORFLOW_FREE = {'batch', 'records', 'loader'}
# Of runtime, what is for everybody but the leaves.
SHARED = {'errors', 'disk', 'seals', 'lock', 'progress', 'distributed', 'flops'}


def _modules():
  for path in sorted(PACKAGE.rglob('*.py')):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    if len(parts) == 2:
      yield path, parts[0], parts[1]


def _imports(path: pathlib.Path) -> set[str]:
  """Our modules that a file imports, as 'part' or 'part.module'."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      if node.module == 'encdec_adapt':
        found |= {alias.name for alias in node.names}
      elif node.module.startswith('encdec_adapt.'):
        base = node.module.removeprefix('encdec_adapt.')
        found |= {
          base if '.' in base else f'{base}.{alias.name}'
          for alias in node.names
        }
    elif isinstance(node, ast.Import):
      assert not any(
        alias.name.startswith('encdec_adapt') for alias in node.names
      ), f'{path}: import modules from their package'
  return found


@pytest.mark.parametrize(
  'path, part', [(p, part) for p, part, _ in _modules()], ids=str
)
def test_imports_go_one_way(path, part):
  for name in _imports(path):
    other, _, module = name.partition('.')
    module = module.split('.')[0]
    if other == part:
      continue
    if other == 'runtime' and part not in LEAVES:
      assert module in SHARED, f'{path} imports {name}'
      continue
    assert other in MAY_IMPORT[part], f'{path} imports {name}'
    if other == 'data':
      assert module in TENSORFLOW_FREE, f'{path} imports {name}'


def test_only_data_names_tensorflow():
  for path in PACKAGE.rglob('*.py'):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names |= {alias.name.split('.')[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and node.module:
        names.add(node.module.split('.')[0])
    if names & {'tensorflow', 'seqio', 'tensorflow_datasets'}:
      assert path.parent.name == 'data', path


def test_training_process_imports_neither_tensorflow_nor_seqio():
  code = (
    'import sys\n'
    'from encdec_adapt import evaluate, generate, materialize, train\n'
    "bad = {'tensorflow', 'seqio', 'tensorflow_datasets', 'torch'}\n"
    'print(sorted(bad & set(sys.modules)))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    cwd=PACKAGE.parent,
    check=True,
  )
  assert done.stdout.strip() == '[]'
