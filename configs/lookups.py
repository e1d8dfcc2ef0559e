"""The sources `lookups` and `documents`: questions on tables, and on documents.

    config.data.source = 'lookups'  # or 'lookups:length=short,table=none'
    config.data.seqio_modules = ('encdec_adapt.configs.lookups',)

A table has four names of classes and functions of the standard library, each
with the beginning of its docstring up to the end of a word: 180 to 240
characters, 90 to 120 with `length=short`, or 60 to 80 with `length=shorter`.
With `short`, two fifths of the
questions fit 224 tokens of the shipped decoders together with table and answer;
rows of that length drop the others. A question asks for one of the names, and
the answer is its text, word for word: what is measured is whether a model
copies from what it reads. The loss hardly tells whether it finds the row that
is asked for: the choice among four rows is worth ln 4 nats of a whole answer.
`table=none` leaves the table out, and `table=asked` all rows but the one that
is asked for: what models answer then are floors. `table=rows` has the rows as
passages (objective `passages`). Every docstring is in one table; all four
questions on a table are on the same side of the split.

`documents` asks for one of six facts, as `--retrieval` does of 10 and 20: each
is the code of a thing, and a passage of its own without text around it. Codes
are drawn for every question, so that only its documents have the answer.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import ast
from collections.abc import Iterator
import functools
import json
import textwrap
import warnings

import numpy as np

from encdec_adapt.base import option_strings
from encdec_adapt.data.sources import document_source, python_source
from encdec_adapt.evaluation.tasks import retrieval_tasks
from encdec_adapt.objectives import randomness

# Shortest and longest description, in characters.
_LENGTHS = {'long': (180, 240), 'short': (90, 120), 'shorter': (60, 80)}
_ROWS = 4  # Rows of a table.
_TABLES = 'all', 'asked', 'none', 'rows'
_QUESTIONS = 12_000  # Of `documents`.
_DOCUMENTS = 6  # Of a question.
_NODES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@document_source.register('lookups')
class LookupSource(python_source.PythonSource):
  """`lookups`: a table with a question, and the answer."""

  form = 'lookups[:length=short|shorter][,table=asked|none|rows]'
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
  """Returns JSON of (the shown rows of a table with a question, answer).

  With 'rows' it is (a question, answer, the rows as passages).
  """
  name, text = table[row]
  if shown == 'rows':
    passages = [{'title': title, 'text': words} for title, words in table]
    content = [f'What is {name}?', text, {'rows': passages}]
    return json.dumps(content, ensure_ascii=False)
  rows = {'all': table, 'asked': [table[row]], 'none': []}[shown]
  lines = ''.join(f'{title}: {words}\n' for title, words in rows)
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


@document_source.register('documents')
class DocumentsSource(document_source.Source):
  """`documents`: a question on one of six facts, the answer, the facts."""

  form = 'documents'
  document_kind = 'pairs'

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th question."""
    entries = (
      (str(i), functools.partial(_question, i)) for i in range(_QUESTIONS)
    )
    return self._every(entries, shard_index, num_shards)

  def _content(self) -> Iterator[object]:
    yield _question(0)


def _question(number: int) -> str:
  """Returns JSON of (a question, answer, six facts as passages)."""
  rng = np.random.default_rng(number)
  things, codes = (x[:_DOCUMENTS] for x in retrieval_tasks.draw(rng))
  asked = rng.integers(_DOCUMENTS)
  facts = [*map(retrieval_tasks.fact, things, codes)]
  question = f'What is the code of the {things[asked]}?'
  return json.dumps([question, codes[asked], {'documents': facts}])
