"""Runs the commands of configs/tasks, each page in order, with a tiny model.

    python -m tests.e2e.task_pages FOLDER

runs them in one process, a page in each folder of FOLDER, and ends at the first
that fails, with its page and command.
"""

from collections.abc import Iterator
import importlib
import os
import pathlib
import re
import shlex
import shutil
import sys

from tests import tiny

PAGES = sorted((tiny.ROOT / 'configs' / 'tasks').glob('*.md'))
_DECODERS = tiny.ROOT / 'configs' / 'decoders'
# What each command adds, so that it ends soon.
_FEWER = {
  'train': (
    '--config.train.steps=2',
    '--config.train.batch_size=4',
    '--config.optimizer.warmup_steps=1',
    '--config.data.max_bytes=300000',
    '--config.data.eval_rows=8',
    '--config.evaluation.samples=0',
  ),
  'evaluate': ('--limit=2', '--max_tokens=2'),
  'generate': ('--max_tokens=2',),
}


def commands(page: pathlib.Path) -> Iterator[tuple[str, str]]:
  """Yields every command of a page, and the text that it reads, if any."""
  text = page.read_text()
  blocks = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.M | re.S)
  lines = iter(''.join(x for kind, x in blocks if not kind).splitlines())
  for line in lines:
    while line.endswith('\\'):
      line = line[:-1] + next(lines).lstrip()
    document = []
    if line.endswith("<<'END'"):
      document = iter(lambda: next(lines), 'END')
    yield line, '\n'.join(document)


def run(line: str, document: str) -> None:
  """Runs a command in this process.

  Raises:
    ValueError: it is none of Python's, and writes no file.
  """
  match shlex.split(line):
    case ['python', '-', '<<END']:
      exec(compile(document, line, 'exec'), {})
    case ['cat', '>', path, '<<END']:
      pathlib.Path(path).write_text(f'{document}\n')
    case ['python', '-m', 'encdec_adapt.convert', *arguments]:
      _check(tiny.convert(*arguments))
    case ['python', '-m', name, *arguments]:
      more = _FEWER.get(name.removeprefix('encdec_adapt.'), ())
      _check(tiny.call(importlib.import_module(name), *arguments, *more))
    case _:
      raise ValueError('neither python nor cat')


def _check(status):
  if status:
    raise RuntimeError(f'status {status}')


def main(folder: pathlib.Path) -> None:
  """Runs all pages."""
  decoders = folder / 'configs' / 'decoders'
  # The smaller decoder in the place of both.
  shutil.copytree(_DECODERS, decoders, ignore=shutil.ignore_patterns('base'))
  shutil.copytree(decoders / 'small', decoders / 'base')
  for page in PAGES:
    place = folder / page.stem
    place.mkdir()
    (place / 'configs').symlink_to(folder / 'configs')
    os.chdir(place)
    for line, document in commands(page):
      try:
        run(line, document)
      except BaseException as error:
        error.add_note(f'{page.relative_to(tiny.ROOT)}: {line}')
        raise


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
