"""The commands for one's own text and examples, as printed."""

import ast
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import warnings

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import convert, evaluate, generate, materialize, train
from encdec_adapt.cli import command
from tests import tiny
from tests.e2e import folders

pytestmark = pytest.mark.e2e
PAGE = (tiny.ROOT / 'configs' / 'your_data.md').read_text()
# Heading -> the run that the second of its jobs starts from, and the last run.
PARTS = {
  'Your own text': ('decoder', 'pair', 'exported'),
  'Your own examples': ('language', 'answers', 'exported_answers'),
}


def _commands(heading):
  """The six commands below a heading, as module and arguments."""
  block = PAGE.split(f'## {heading}\n')[1].split('```\n')[1]
  lines = block.replace('\\\n', ' ').splitlines()
  assert len(lines) == 6
  for line in lines:
    python, flag, module, *arguments = shlex.split(line)
    assert (python, flag) == ('python', '-m')
    yield module, arguments


@pytest.fixture
def texts(tmp_path, monkeypatch):
  """A folder with the user's files: 5 MB of Python's modules."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'books').mkdir()
  for path in sorted(pathlib.Path(json.__file__).parents[1].glob('*.py')):
    shutil.copy(path, tmp_path / 'books' / f'{path.stem}.txt')
  with open(tmp_path / 'pairs.jsonl', 'w', encoding='utf-8') as file:
    for name, line in _docstrings():
      pair = {'question': f'What does {name} do?', 'answer': line}
      file.write(json.dumps(pair) + '\n')
  return tmp_path


def _docstrings():
  """Names of the standard library's functions, and their first lines."""
  for path in sorted(pathlib.Path(json.__file__).parents[1].glob('*.py')):
    with warnings.catch_warnings(action='ignore'):
      tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef) and (
        text := ast.get_docstring(node)
      ):
        yield f'{path.stem}.{node.name}', text.splitlines()[0][:100]


def test_the_readme_is_a_page():
  assert (tiny.ROOT / 'README.md').read_text().count('\n') <= 120


@pytest.mark.parametrize('heading', PARTS)
def test_every_command_is_understood(heading, texts):
  source, _, _ = PARTS[heading]
  small = tiny.ROOT / 'configs' / 'decoders' / 'small'
  flags = [f'--source={small}', f'--output=runs/{source}']
  assert tiny.convert('import', *flags) == 0
  for module, arguments in _commands(heading):
    name = module.removeprefix('encdec_adapt.')
    if name == 'train':
      assert tiny.call(train, *arguments, '--dry_run') == 0
    elif name == 'convert':
      verb, *flags = arguments
      command.parse(convert.COMMANDS[verb].define, flags)
    else:
      main = {
        'materialize': materialize,
        'evaluate': evaluate,
        'generate': generate,
      }[name]
      values = command.parse(main.define_flags, arguments)
      if name == 'materialize':
        config_lib.load(values.config, values.workdir)


@pytest.mark.slow
@pytest.mark.parametrize('heading', PARTS)
def test_every_command_passes(heading, texts):
  for module, arguments in _commands(heading):
    subprocess.run(
      [sys.executable, '-m', module, *arguments],
      check=True,
      env=tiny.environment() | {'PYTHONPATH': str(tiny.ROOT)},
    )
  source, run, exported = PARTS[heading]
  for name in (source, run):
    summary = folders.read(texts / 'runs' / name / 'summary.json')
    assert summary['eval_loss'] < summary['eval_loss_at_step_0'] - 1
  assert (texts / 'runs' / exported / 'model.safetensors').exists()
