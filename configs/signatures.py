"""Names and signatures of Python's library, and their documentation.

    python -m encdec_adapt.configs.signatures --output=runs/signatures

train.jsonl has a function or class in each line: `signature`, its qualified
name with its arguments, and `documentation`, the first paragraph of its
docstring. search/ has those of the modules that --source holds out, in the
layout that `evaluate --embeddings` reads: which documentation belongs to a
signature? The same Python gives the same files.
"""

import ast
from collections.abc import Iterator
import itertools
import json

from absl import flags

from encdec_adapt import configs
from encdec_adapt.cli import command
from encdec_adapt.configs import functions
from encdec_adapt.data.sources import python_source
from encdec_adapt.files import disk

_LONGEST = 400  # Characters of a paragraph.
_SHORTEST = 20

define_flags = command.define(
  command.string('output', 'Folder of the files.'),
  command.string(
    'source',
    'python:FILE, where FILE lists the held-out modules.',
    default=f'python:{configs.path("decoders/held_out.txt")}',
  ),
)


class _Library(python_source.PythonSource):
  def named_modules(self) -> Iterator[tuple[str, str]]:
    return zip(self._modules, self.modules(), strict=True)


def main(values: flags.FlagValues) -> int:
  """Writes the files."""
  command.require(values, 'output')
  folder = disk.require_writable(values.output)
  source = _Library(values.source)
  pairs = {'train': {}, 'eval': {}}  # Documentation to signature and module.
  # A documentation that several functions have belongs to the first alone.
  for name, text in source.named_modules():
    held_out = source.in_split(name, 'eval', 0.04, 0)
    for signature, documentation in _pairs(name, text):
      if not any(documentation in part for part in pairs.values()):
        pairs['eval' if held_out else 'train'][documentation] = signature, name
  rows = [
    {'signature': signature, 'documentation': documentation}
    for documentation, (signature, _) in pairs['train'].items()
  ]
  search = folder / 'search'
  (search / 'qrels').mkdir(parents=True, exist_ok=True)
  documents = [
    {'_id': f'{i}', 'text': text} for i, text in enumerate(pairs['eval'])
  ]
  queries = [
    {'_id': f'query{i}', 'text': signature, 'document_group': module}
    for i, (signature, module) in enumerate(pairs['eval'].values())
  ]
  for path, lines in (
    (folder / 'train.jsonl', rows),
    (search / 'queries.jsonl', queries),
    (search / 'corpus.jsonl', documents),
  ):
    path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
    print(f'{path}: {len(lines)} lines')
  relevant = [f'query{i}\t{i}\t1' for i in range(len(queries))]
  lines = '\n'.join(['query-id\tcorpus-id\tscore', *relevant])
  (search / 'qrels' / 'test.tsv').write_text(f'{lines}\n')
  return 0


def _pairs(module: str, source: str) -> Iterator[tuple[str, str]]:
  tree = functions.parse(source)
  prefix = module.removesuffix('.py').removesuffix('/__init__')
  nodes = [(prefix.replace('/', '.'), tree)]
  while nodes:
    name, node = nodes.pop()
    for child in ast.iter_child_nodes(node):
      if not isinstance(child, functions.FUNCTIONS + (ast.ClassDef,)):
        continue
      qualified = f'{name}.{child.name}'
      nodes.append((qualified, child))
      lines = (ast.get_docstring(child) or '').splitlines()
      paragraph = ' '.join(
        x.strip() for x in itertools.takewhile(str.strip, lines)
      )
      if _SHORTEST <= len(paragraph) <= _LONGEST:
        arguments = getattr(child, 'args', None)
        text = ast.unparse(arguments) if arguments else ''
        yield f'{qualified}({text})', paragraph


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
