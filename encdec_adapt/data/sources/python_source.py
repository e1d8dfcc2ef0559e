"""The source `python[:FILE]`: the text that comes with the running Python.

It has the documentation topics of `pydoc_data`, and the docstrings and the
source of every module of the standard library, except installed packages,
tests, generated code and tables (`encodings`, `_sysconfigdata*`) and files
that are not UTF-8. Documents are ordered by hashes of their ids, so that a
capped prefix is a fair sample. `python:FILE` holds out exactly the topics and
modules with a content digest (`content_digest`) that is a line of FILE: names
and contents change between Python versions, and a model that was trained
elsewhere is evaluated only on documents that it has not seen.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import ast
from collections.abc import Iterator
import functools
import hashlib
import os
import pathlib
import platform
import sysconfig
import warnings

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source
from encdec_adapt.files import paths
from encdec_adapt.objectives import randomness

_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def content_digest(text: str) -> str:
  """Returns the 16 hex digits that identify a text in a list of held-outs."""
  return hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]


@document_source.register('python')
class PythonSource(document_source.Source):
  """`python[:FILE]`: the text that comes with the running Python."""

  form = 'python[:FILE]'

  # `encodings` are tables of characters, and `pydoc_data` has the topics, which
  # are documents already.
  _EXCLUDED = frozenset(
    ('site-packages', 'dist-packages', 'test', 'tests', 'idle_test')
    + ('encodings', 'pydoc_data', '__pycache__', '_bundled', 'lib-dynload')
  )

  def __init__(self, name: str, max_bytes: int = 0):
    """Finds the topics and modules; see `document_source.Source`.

    Raises:
      UserError: this Python lacks them, or FILE cannot be read.
    """
    super().__init__(name, max_bytes)
    self._root = pathlib.Path(sysconfig.get_path('stdlib'))
    # A distribution's minimal Python lacks this module.
    try:
      from pydoc_data import topics  # Only this source needs 500 kB of text.

      self._topics = topics.topics
    except ImportError:
      self._topics = {}
    files = []
    for folder, folders, names in os.walk(self._root):
      # Installed packages have more folders than all the text.
      folders[:] = [x for x in folders if x not in self._EXCLUDED]
      path = pathlib.Path(folder).relative_to(self._root)
      files += [path / name for name in names if name.endswith('.py')]
    self._modules = sorted(
      path.as_posix() for path in files if not self._is_excluded(path)
    )
    if not self._topics or not self._modules:
      raise errors.UserError(
        f'source {self.name!r}: this Python ({platform.python_version()}) lacks'
        ' the sources of its standard library, or pydoc_data; use a complete'
        ' Python, or name text of your own as text:GLOB'
      )
    path = option_strings.Part('the source', self.name).partition(':')[1]
    self._held_out = self._read_list(path.text) if path else None
    # Pieces are held out where no document is; with a list that is intended.
    self.divisible = self.divisible and self._held_out is None

  def _read_list(self, path: str) -> frozenset[str]:
    try:
      digests = set(paths.at(path).read_text().split())
    except OSError as error:
      raise errors.UserError(
        f'source {self.name!r}: the list of held-out documents {path} cannot'
        f' be read ({error.strerror or error})'
      ) from None
    contents = {f'topic/{name}': text for name, text in self._topics.items()}
    contents |= zip(self._modules, self.modules(), strict=True)
    return frozenset(
      name for name, text in contents.items() if content_digest(text) in digests
    )

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether a document belongs to `split`, by the list if any."""
    if self._held_out is None:
      return super().in_split(document_id, split, eval_fraction, seed)
    is_held_out = document_source.group(document_id) in self._held_out
    return is_held_out == (split == 'eval')

  def modules(self) -> Iterator[str]:
    """Yields the source of every module."""
    for module in self._modules:
      yield _python(self._root / module)

  def _is_excluded(self, path: pathlib.Path) -> bool:
    # The last two are generated when Python is built, for its platform.
    return bool(
      self._EXCLUDED.intersection(path.parts)
      or path.name.startswith('_sysconfigdata')
      or path.parts[0].startswith('config-')
    )

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th document; a capped source is read by all shards."""
    # Some topics are the same page under two names, of which the first in
    # alphabetical order counts: the last that a dictionary is given.
    topics = {
      text: topic for topic, text in sorted(self._topics.items(), reverse=True)
    }
    entries = [
      (f'topic/{topic}', functools.partial(str, text))
      for text, topic in topics.items()
    ]
    for module in self._modules:
      path = self._root / module
      entries += [
        (f'{module}::docstrings', lambda p=path: _docstrings(_python(p))),
        (f'{module}::source', functools.partial(_python, path)),
      ]
    # Python's own `hash` differs between processes.
    entries.sort(key=lambda entry: randomness.digest('order', entry[0]))
    return self._every(entries, shard_index, num_shards)

  def _content(self) -> Iterator[object]:
    # Contents follow from the version, except for modules that a distribution
    # patches or leaves out: names and sizes find those without reading.
    yield platform.python_version()
    yield from sorted(self._held_out or ())
    yield from sorted(self._topics)
    for module in self._modules:
      yield module
      yield (self._root / module).stat().st_size


def _python(path: pathlib.Path) -> str:
  try:
    text = path.read_text('utf-8')
  except UnicodeDecodeError:
    return ''
  return text.removeprefix('\ufeff')


def _docstrings(source: str) -> str:
  parts = []

  def visit(node, name=''):
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    text = ast.get_docstring(node)
    if text:
      heading = f'{name}({ast.unparse(node.args)})' if is_function else name
      parts.append(f'{heading}\n\n{text}' if heading else text)
    # Functions inside of functions cannot be imported: pydoc omits them, too.
    for child in () if is_function else node.body:
      if isinstance(child, _DEFINITIONS):
        visit(child, f'{name}.{child.name}'.lstrip('.'))

  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # About invalid escapes in strings.
      tree = ast.parse(source)
  except SyntaxError:  # lib2to3 and others carry Python 2 on purpose.
    return ''
  visit(tree)
  # An escape in a docstring may be a lone surrogate.
  return document_source.encodable('\n\n\n'.join(parts) + '\n' if parts else '')
