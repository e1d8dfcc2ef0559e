"""The source `lookups`: questions on tables of names and their descriptions.

    config.data.source = 'lookups'  # or 'lookups:length=short,table=none'
    config.data.seqio_modules = ('encdec_adapt.configs.lookups',)

A table has four names of classes and functions of the standard library, each
with the beginning of its docstring up to the end of a word: 180 to 240
characters, or 90 to 120 with `length=short`. With the latter, two fifths of the
questions fit 224 tokens of the shipped decoders together with table and answer;
rows of that length drop the others. A question asks for one of the names, and
the answer is its text, word for word: what is measured is whether a model
copies from what it reads. The loss hardly tells whether it finds the row that
is asked for: the choice among four rows is worth ln 4 nats of a whole answer.
`table=none` leaves the table out, and `table=asked` all rows but the one that
is asked for: two points to compare losses with. Every docstring is in one
table; all four questions on a table are on the same side of the split.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import ast
from collections.abc import Iterator
import functools
import json
import textwrap
import warnings

from encdec_adapt.base import option_strings
from encdec_adapt.data.sources import document_source, python_source
from encdec_adapt.objectives import randomness

# Shortest and longest description, in characters.
_LENGTHS = {'long': (180, 240), 'short': (90, 120)}
_ROWS = 4  # Rows of a table.
_TABLES = 'all', 'asked', 'none'
_NODES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@document_source.register('lookups')
class LookupSource(python_source.PythonSource):
  """`lookups`: a table with a question, and the answer."""

  form = 'lookups[:length=short][,table=asked|none]'
  document_kind = 'pairs'

  def _read_argument(self, argument: option_strings.Part) -> None:
    values = argument.key_values({'length': 'long', 'table': 'all'})
    self._length, self._table = values['length'], values['table']
    if self._length not in _LENGTHS or self._table not in _TABLES:
      raise argument.error(
        f'needs a length of {", ".join(_LENGTHS)} and a table of'
        f' {", ".join(_TABLES)}'
      )

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th question; all shards read the standard library."""
    bounds = _LENGTHS[self._length]
    texts = {
      name: text
      for module in self.modules()
      for name, text in _described(module, *bounds)
    }
    # In the order of their hashes, so that a table mixes modules, and each
    # description once, so that a question has one answer.
    names = {
      text: name
      for name, text in sorted(
        texts.items(), key=lambda item: randomness.digest('table', item[0])
      )
    }
    rows = [(name, text) for text, name in names.items()]
    tables = [rows[i : i + _ROWS] for i in range(0, len(rows) - 3, _ROWS)]
    entries = (
      (
        f'{table[0][0]}::{row}',
        functools.partial(_pair, table, row, self._table),
      )
      for table in tables
      for row in range(_ROWS)
    )
    return self._every(entries, shard_index, num_shards)


def _pair(table: list[tuple[str, str]], row: int, shown: str) -> str:
  """Returns JSON of (the shown rows of a table with a question, answer)."""
  rows = {'all': table, 'asked': [table[row]], 'none': []}[shown]
  lines = ''.join(f'{name}: {text}\n' for name, text in rows)
  name, text = table[row]
  return json.dumps([f'{lines}What is {name}?\n', text], ensure_ascii=False)


def _described(
  source: str, shortest: int, longest: int
) -> Iterator[tuple[str, str]]:
  """Yields names in a module, and the first lines of their docstrings."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # Warnings of invalid escapes in strings.
      tree = ast.parse(source)
  except SyntaxError:  # lib2to3 and others carry Python 2 on purpose.
    return
  for node in ast.walk(tree):
    if isinstance(node, _NODES):
      text = ' '.join((ast.get_docstring(node) or '').split())
      text = textwrap.shorten(text, longest, placeholder='')
      if len(text) >= shortest:
        yield node.name, document_source.encodable(text)
