"""Text sources: documents in a fixed order, opened by name.

Document ids depend neither on the machine nor on the reader. They decide the
train/eval split (`in_split`): the part before the last '::' is hashed, so that
two documents made from one text (the docstrings and the source of a module)
are on the same side.

| name                     | documents                                      |
|--------------------------|------------------------------------------------|
| python                   | the text that this Python carries (below)      |
| python:FILE              | the same, with a list of held-out documents    |
| text:GLOB                | each file that matches is one document         |
| text:GLOB#paragraphs     | each paragraph (between empty lines) is one    |
| text:GLOB#lines          | each line that is not empty is one             |
| jsonl:GLOB               | each line's field `text`                       |
| jsonl:GLOB#FIELD         | each line's field FIELD                        |
| pairs:GLOB#INPUTS,TARGETS| each line's fields INPUTS and TARGETS          |
| prompts:GLOB#FILE.yaml   | each line in each template of a promptsource   |
|                          | file (`data/prompt_source.py`)                 |
| chat:GLOB                | each line's field `messages`: a list of objects|
|                          | with `role` and `content`                      |
| chat:GLOB#FIELD          | each line's field FIELD                        |
| seqio:NAME[:SPLIT]       | a registered SeqIO task (`data/seqio_source`)  |
| tfds:NAME:SPLIT          | each example's feature `text`                  |
| tfds:NAME:SPLIT:FIELD    | each example's feature FIELD                   |

The text of a pair or a conversation is JSON: a list of two texts, or of the
messages. They feed the objectives `pairs` and `chat` (`data/supervised.py`),
all others the rest.

A GLOB may be in a bucket: gs://BUCKET/FOLDER/*.jsonl. Every shard of the
records reads its files once.

`python` has the documentation topics of `pydoc_data`, and the docstrings and
the source of every module of the standard library, except installed packages,
tests, generated code and tables (`encodings`, `_sysconfigdata*`) and files
that are not UTF-8. Documents are ordered by hashes of their ids, so that a
capped prefix is a fair sample. `python:FILE` holds out exactly the topics and
modules whose content's digest (`content_digest`) is a line of FILE: names and
contents change between Python versions, and a model that was trained
elsewhere is evaluated only on documents that it has not seen.

This module imports neither TensorFlow nor SeqIO nor jax; opening a source
`tfds:..` imports `tensorflow_datasets` (and with it TensorFlow).
"""

import abc
import ast
from collections.abc import Callable, Iterator
import dataclasses
import functools
import glob
import hashlib
import json
import os
import pathlib
import platform
import re
import sysconfig
from typing import Any
import warnings

from encdec_adapt.cli import errors
from encdec_adapt.data import randomness
from encdec_adapt.files import paths

_SAMPLE_BYTES = 1 << 16
# A split may be a slice, such as train[:10%].
_TFDS = r'tfds:([^:]+(?::[\d.*]+)?):((?:[^:\[]|\[[^]]*\])+)(?::(\w+))?'
_FORMS = (
  'python[:FILE], text:GLOB[#paragraphs|#lines], jsonl:GLOB[#FIELD],'
  ' pairs:GLOB#INPUTS,TARGETS, prompts:GLOB#FILE.yaml, chat:GLOB[#FIELD],'
  ' seqio:NAME[:SPLIT], tfds:NAME:SPLIT[:FIELD]'
)


@dataclasses.dataclass(frozen=True)
class Document:
  """A document: its id, unique in its source, and its text, not empty."""

  id: str
  text: str


def in_split(
  document_id: str, split: str, eval_fraction: float, seed: int
) -> bool:
  """Returns whether a document belongs to `split`, by a hash of its id.

  Args:
    document_id: document id; only the part before the last '::' counts.
    split: 'train' or 'eval'.
    eval_fraction: share of the documents in 'eval', in [0, 1].
    seed: seed of the split.
  """
  group = document_id.rpartition('::')[0] or document_id
  uniform = randomness.digest('split', seed, group) / 2**128
  return (uniform < eval_fraction) == (split == 'eval')


class Source(abc.ABC):
  """Documents in a fixed order.

  Attributes:
    name: name that the source was opened by.
    skips_bad: whether documents that cannot be read are left out.
    skipped: number of wanted documents that were left out so far.
    max_bytes: documents are used until their UTF-8 text exceeds this; the
      one that exceeds it is not used. 0 for all.
  """

  def __init__(self, name: str, max_bytes: int = 0):
    self.name = name
    self.max_bytes = max_bytes
    self.skips_bad = False
    self.skipped = 0

  @abc.abstractmethod
  def entries(self) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields ids and functions that read the texts when they are called."""

  @property
  def divisible(self) -> bool:
    """Whether documents may be cut, because they are text."""
    return gives(self.name) == 'text'

  def in_split(
    self, document_id: str, split: str, eval_fraction: float, seed: int
  ) -> bool:
    """Returns whether a document belongs to `split`; see `in_split`."""
    return in_split(document_id, split, eval_fraction, seed)

  @abc.abstractmethod
  def _content(self) -> Iterator[object]:
    """Yields the values that the fingerprint is computed from."""

  def documents(
    self, keep: Callable[[int, str], bool] | None = None
  ) -> Iterator[Document]:
    """Yields the documents that have text, in order.

    Args:
      keep: function of (index, id) that selects documents; others are not
        read unless `max_bytes` has to count them.

    Raises:
      UserError: the source is missing or has no text.
    """
    size, empty = 0, True
    for index, (document_id, read) in enumerate(self.entries()):
      wanted = keep is None or keep(index, document_id)
      if not wanted and not self.max_bytes:
        empty = False
        continue
      try:
        text = read()
      except errors.UserError:
        if not self.skips_bad:
          raise
        self.skipped += wanted
        continue
      if self.max_bytes:
        size += len(text.encode('utf-8'))
        if size > self.max_bytes:
          break
      empty = empty and not text
      if wanted and text:
        yield Document(document_id, text)
    if empty:
      raise errors.UserError(
        f'source {self.name!r} has no text within max_bytes={self.max_bytes};'
        ' check its files, the field and the cap'
      )

  def fingerprint(self) -> str:
    """Returns a hex digest of the content and the cap.

    It is computed from names, sizes and three samples of each local file, and
    from the store's checksums of files in a bucket.
    """
    parts = [self.max_bytes, *self._content()]
    return f'{randomness.digest(self.name, *parts):032x}'


class Pieces(Source):
  """The documents of a source, cut into pieces on paragraphs' ends.

  Piece i of document D has the id D:i. Pieces have at least 4,000 characters,
  but for the last of a document.
  """

  _PIECE = re.compile(r'.{4000}.*?(?:\n\s*\n|\Z)|.+\Z', re.DOTALL)

  def __init__(self, source: Source):
    """Wraps a source of texts, whose name and cap it has."""
    super().__init__(source.name, source.max_bytes)
    self._source = source

  def entries(self):
    for document in self._source.documents():
      pieces = self._PIECE.finditer(document.text)
      for number, piece in enumerate(pieces, 1):
        yield f'{document.id}:{number}', piece.group

  def _content(self):
    yield self._source.fingerprint()


def open_source(name: str, max_bytes: int = 0) -> Source:
  """Opens a source by its name (table in the module's docstring).

  Raises:
    UserError: the name has no known form, or has no documents.
  """
  kind, _, rest = name.partition(':')
  if kind == 'prompts' and rest:
    from encdec_adapt.data import prompt_source  # Only it needs Jinja.

    return prompt_source.PromptSource(name, max_bytes)
  if kind not in _SOURCES or not rest and name != 'python':
    raise errors.UserError(
      f'source {name!r}: not a source; the forms are {_FORMS}'
    )
  return _SOURCES[kind](name, max_bytes)


def gives(name: str) -> str:
  """Returns what a source has: 'text', 'pairs' or 'chat'."""
  kind = name.partition(':')[0]
  return {'pairs': 'pairs', 'prompts': 'pairs', 'chat': 'chat'}.get(
    kind, 'text'
  )


def content_digest(text: str) -> str:
  """Returns the 16 hex digits that identify a text in a list of held-outs."""
  return hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]


class PythonSource(Source):
  """`python[:FILE]`: the text that comes with the running Python."""

  _LEFT_OUT = frozenset(
    ('site-packages', 'dist-packages', 'test', 'tests', 'idle_test')
    + ('encodings', 'pydoc_data', '__pycache__', '_bundled', 'lib-dynload')
  )

  def __init__(self, *args):
    super().__init__(*args)
    self._root = pathlib.Path(sysconfig.get_path('stdlib'))
    try:
      from pydoc_data import topics  # Only this source needs 500 kB of text.
    except ImportError:
      topics = None
    self._topics = topics.topics if topics else {}
    self._modules = sorted(
      path.relative_to(self._root).as_posix()
      for path in self._root.rglob('*.py')
      if self._wanted(path.relative_to(self._root))
    )
    if not self._topics or not self._modules:
      raise errors.UserError(
        f'source {self.name!r}: this Python ({platform.python_version()}) lacks'
        ' the sources of its standard library, or pydoc_data; use a complete'
        ' Python, or name text of your own as text:GLOB'
      )
    path = self.name.partition(':')[2]
    self._held_out = self._read_list(path) if path else None

  def _read_list(self, path: str) -> frozenset[str]:
    """Returns the topics and modules whose contents a file lists."""
    try:
      digests = set(paths.at(path).read_text().split())
    except OSError as error:
      raise errors.UserError(
        f'source {self.name!r}: the list of held-out documents {path} cannot'
        f' be read ({error.strerror or error})'
      ) from None
    contents = {f'topic/{name}': text for name, text in self._topics.items()}
    contents |= {name: _python(self._root / name) for name in self._modules}
    return frozenset(
      name for name, text in contents.items() if content_digest(text) in digests
    )

  def in_split(self, document_id, split, eval_fraction, seed):
    if self._held_out is None:
      return super().in_split(document_id, split, eval_fraction, seed)
    group = document_id.rpartition('::')[0] or document_id
    return (group in self._held_out) == (split == 'eval')

  @property
  def divisible(self):
    return self._held_out is None  # A list says what is held out.

  def _wanted(self, path: pathlib.Path) -> bool:
    return not (
      self._LEFT_OUT.intersection(path.parts)
      or path.name.startswith('_sysconfigdata')
      or path.parts[0].startswith('config-')
    )

  def entries(self):
    entries = []
    seen = set()
    for topic, text in sorted(self._topics.items()):
      if text not in seen:  # Some topics are the same page under two names.
        entries.append((f'topic/{topic}', lambda text=text: text))
      seen.add(text)
    for module in self._modules:
      path = self._root / module
      entries.append(
        (f'{module}::docstrings', lambda p=path: _docstrings(_python(p)))
      )
      entries.append((f'{module}::source', lambda p=path: _python(p)))
    entries.sort(key=lambda entry: randomness.digest('order', entry[0]))
    yield from entries

  def _content(self):
    yield platform.python_version()
    yield from sorted(self._held_out or ())
    yield from sorted(self._topics)
    for module in self._modules:
      yield module
      yield (self._root / module).stat().st_size


def _python(path: pathlib.Path) -> str:
  """Reads a module, '' if it is not UTF-8 (a few declare another coding)."""
  try:
    text = path.read_text('utf-8')
  except UnicodeDecodeError:
    return ''
  return text.removeprefix('\ufeff')


def _docstrings(source: str) -> str:
  """Returns a module's docstrings under their names, like `pydoc`'s pages."""
  parts = []

  def visit(node, prefix):
    text = ast.get_docstring(node)
    if text:
      parts.append(f'{prefix}\n\n{text}' if prefix else text)
    for child in node.body:
      if isinstance(child, ast.ClassDef):
        visit(child, f'{prefix}.{child.name}'.lstrip('.'))
      elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
        name = f'{prefix}.{child.name}'.lstrip('.')
        text = ast.get_docstring(child)
        if text:
          arguments = ast.unparse(child.args)
          parts.append(f'{name}({arguments})\n\n{text}')

  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # About invalid escapes in strings.
      tree = ast.parse(source)
  except SyntaxError:  # lib2to3 and others carry Python 2 on purpose.
    return ''
  visit(tree, '')
  return _encodable('\n\n\n'.join(parts) + '\n' if parts else '')


def _encodable(text: str) -> str:
  """Replaces lone surrogates, which UTF-8 cannot hold, by U+FFFD."""
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


class FileSource(Source):
  """Files that match a glob, ordered by name."""

  def __init__(self, *args):
    super().__init__(*args)
    self.pattern = self._pattern(self.name.partition(':')[2])
    expanded = os.path.expanduser(self.pattern)
    self._root = _fixed_folder(expanded)
    self._digests = {}  # The store's checksums of files in a bucket.
    if paths.is_bucket(expanded):
      try:
        self._digests = paths.matching(expanded)
      except OSError as error:
        raise errors.UserError(
          f'source {self.name!r} cannot be listed: {error}'
        ) from error
      self._paths, searched = list(self._digests), 'its bucket'
    else:
      found = glob.glob(expanded, recursive=True)
      self._paths = sorted(path for path in found if os.path.isfile(path))
      searched = os.getcwd()
    if not self._paths:
      raise errors.UserError(
        f'source {self.name!r}: no file matches {self.pattern!r} in'
        f' {searched}; check the path, and quote the glob in the shell'
      )

  def _pattern(self, rest: str) -> str:
    return rest

  def _id(self, path: str) -> str:
    """Returns the path below the glob's fixed folder, without any '::'."""
    relative = os.path.relpath(path, self._root).replace(os.sep, '/')
    return relative.replace('::', ':_:')

  def _content(self):
    for path in self._paths:
      yield self._id(path)
      yield str(self._digests.get(path) or _sample(path))


class TextSource(FileSource):
  """`text:GLOB[#UNIT]`: each file, paragraph or line is one document."""

  _UNITS = {'paragraphs': re.compile(r'\n\s*\n'), 'lines': re.compile('\n')}

  def _pattern(self, rest: str) -> str:
    pattern, _, unit = rest.partition('#')
    if unit and unit not in self._UNITS:
      raise errors.UserError(
        f'source {self.name!r}: {unit!r} after the # must be'
        f' {" or ".join(self._UNITS)}'
      )
    self._ends = self._UNITS.get(unit)
    return pattern

  def entries(self):
    for path in self._paths:
      try:
        parts = self._ends.split(self._read(path)) if self._ends else None
      except errors.UserError:
        parts = None  # Raised again where the document is read.
      if parts is None:
        yield self._id(path), functools.partial(self._read, path)
        continue
      units = (part.strip('\n') for part in parts if part.strip())
      for number, unit in enumerate(units, 1):
        yield f'{self._id(path)}:{number}', functools.partial(str, unit)

  def _read(self, path: str) -> str:
    with paths.open_to_read(path) as file:
      return decode(file.read(), self.name, path)


class JsonlSource(FileSource):
  """`jsonl:GLOB[#FIELD]`: each line is an object with the text in a field."""

  def _pattern(self, rest: str) -> str:
    pattern, _, field = rest.partition('#')
    self._field = field or 'text'
    return pattern

  def entries(self):
    for name, *line in self._lines():
      yield name, functools.partial(self._read, *line)

  def _lines(self) -> Iterator[tuple[str, bytes, str, int]]:
    """Yields id, content, path and number of every line that is not empty."""
    for path in self._paths:
      with paths.open_to_read(path) as file:
        for number, line in enumerate(file, start=1):
          if line.strip():
            yield f'{self._id(path)}:{number}', line, path, number

  def _read(self, line: bytes, path: str, number: int) -> str:
    text = self._value(line, path, number, self._field, str)
    return _encodable(text)

  def _value(
    self, line: bytes, path: str, number: int, field: str, kind: type
  ) -> Any:
    """Returns a field of a line.

    Raises:
      UserError: the line is no object, or the field is missing or of another
        type; names the file and the line.
    """
    where = f'{path}, line {number}'
    try:
      value = json.loads(decode(line, self.name, where))[field]
    except (ValueError, KeyError, TypeError) as error:
      value = error
    if not isinstance(value, kind):
      what = 'text' if kind is str else 'a list'
      raise errors.UserError(
        f'source {self.name!r}: {where}, is not a JSON object with {what} in'
        f' {field!r} ({value!r:.200}); name the field after a #, as in'
        ' jsonl:GLOB#FIELD'
      )
    return value


class PairSource(JsonlSource):
  """`pairs:GLOB#INPUTS,TARGETS`: two fields of each line."""

  def _pattern(self, rest: str) -> str:
    pattern, _, fields = rest.partition('#')
    self._fields = fields.split(',')
    if len(self._fields) != 2 or not all(self._fields):
      raise errors.UserError(
        f'source {self.name!r}: name two fields, as in'
        ' pairs:GLOB#INPUTS,TARGETS'
      )
    return pattern

  def _read(self, line, path, number):
    pair = [self._value(line, path, number, name, str) for name in self._fields]
    return _encodable(json.dumps(pair, ensure_ascii=False))


class ChatSource(JsonlSource):
  """`chat:GLOB[#FIELD]`: a list of messages in each line."""

  def _pattern(self, rest: str) -> str:
    pattern, _, field = rest.partition('#')
    self._field = field or 'messages'
    return pattern

  def _read(self, line, path, number):
    messages = self._value(line, path, number, self._field, list)
    return _encodable(json.dumps(messages, ensure_ascii=False))


class TfdsSource(Source):
  """`tfds:NAME:SPLIT[:FIELD]`: a prepared TFDS dataset."""

  def __init__(self, *args):
    super().__init__(*args)
    match = re.fullmatch(_TFDS, self.name)
    if not match:
      raise errors.UserError(
        f'source {self.name!r}: the form is tfds:NAME:SPLIT[:FIELD], where'
        ' NAME may end in :VERSION, or be the folder of a prepared version'
      )
    dataset, self._split, self._field = match.groups(default='text')
    import tensorflow_datasets as tfds  # Brings TensorFlow.

    try:
      if os.path.isdir(dataset):
        self._builder = tfds.builder_from_directory(dataset)
      else:
        self._builder = tfds.builder(dataset)
      self._examples = self._builder.info.splits[self._split].num_examples
    except Exception as error:  # TFDS has no common class of errors.
      raise errors.UserError(
        f'source {self.name!r}: TFDS cannot open it: {error}. Prepare it with'
        f' `tfds build {dataset}`, or set TFDS_DATA_DIR'
      ) from error
    if self._field not in self._builder.info.features:
      raise errors.UserError(
        f'source {self.name!r}: there is no feature {self._field!r} but'
        f' {sorted(self._builder.info.features)}; name it as the last part'
      )

  def entries(self):
    import tensorflow_datasets as tfds

    # Ordered reading: index i is the same example on every machine.
    config = tfds.ReadConfig(
      shuffle_seed=0, interleave_cycle_length=1, add_tfds_id=True
    )
    rows = self._builder.as_dataset(
      split=self._split, shuffle_files=False, read_config=config
    )
    for row in tfds.as_numpy(rows):
      example_id = row['tfds_id'].decode().replace('::', ':_:')
      yield (
        example_id,
        lambda text=row[self._field], at=example_id: decode(
          text, self.name, at
        ),
      )

  def _content(self):
    yield self._builder.info.full_name
    yield self._examples
    yield self._field


def decode(data: bytes, source: str, where: str) -> str:
  """Decodes UTF-8.

  Args:
    data: text, with or without a byte-order mark.
    source: name of the source, for the error.
    where: place in the source, for the error.

  Raises:
    UserError: it is not UTF-8; names the place and the byte.
  """
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise errors.UserError(
      f'source {source!r}: {where}, is not UTF-8 (byte {error.start});'
      ' convert it, for example with `iconv -t UTF-8`'
    ) from None


def _fixed_folder(pattern: str) -> str:
  """Returns the folder of a glob before its first wildcard."""
  folder = os.path.dirname(pattern)
  while glob.has_magic(folder):
    folder = os.path.dirname(folder)
  return folder or '.'


def _sample(path: str) -> str:
  """Returns a digest of a file's size, beginning, middle and end."""
  size = os.path.getsize(path)
  digest = hashlib.blake2b(str(size).encode(), digest_size=16)
  with open(path, 'rb') as file:
    for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
      file.seek(start)
      digest.update(file.read(_SAMPLE_BYTES))
  return digest.hexdigest()


_SOURCES = {
  'python': PythonSource,
  'text': TextSource,
  'jsonl': JsonlSource,
  'pairs': PairSource,
  'chat': ChatSource,
  'tfds': TfdsSource,
}
