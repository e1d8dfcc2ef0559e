"""Sources that are files: plain text and JSON lines.

The files of a glob, ordered by name, are one line of bytes, of which every
shard reads an equal range: whole files where there are many, a part of a file
where there are few. A document is in the shard in whose range it begins (a
paragraph: in which the empty line before it begins). A document is named by its
file and the offset of its first byte there, a whole file by its name. The
byte-order mark of a file is dropped; elsewhere U+FEFF is text.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import codecs
from collections.abc import Iterator
import functools
import glob
import hashlib
import json
import os
from typing import Any

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source
from encdec_adapt.files import paths

_SAMPLE_BYTES = 1 << 16
_BLOCK = 1 << 20


class FileSource(document_source.Source):
  """Files that match a glob, each line of which is a document."""

  def __init__(self, name: str, max_bytes: int = 0):
    """Lists the files; see `document_source.Source`.

    Raises:
      UserError: no file matches, or a bucket cannot be listed.
    """
    super().__init__(name, max_bytes)
    string = option_strings.Part('the source', self.name)
    pattern, fields = string.partition(':')[1].partition('#')
    self.pattern = pattern.text
    self._take_fields(fields)
    expanded = os.path.expanduser(self.pattern)
    root = _fixed_folder(expanded)
    try:
      self._files = paths.matching(expanded)
    except OSError as error:
      raise errors.UserError(
        f'source {self.name!r} cannot be listed: {error}'
      ) from error
    self._sizes = {path: entry['bytes'] for path, entry in self._files.items()}
    if not self._sizes:
      raise errors.UserError(
        f'source {self.name!r}: no file matches {self.pattern!r}; check the'
        f' path (from {os.getcwd()}), and quote the glob in the shell'
      )
    self._ids = {path: _relative(path, root) for path in self._sizes}

  @abc.abstractmethod
  def _take_fields(self, fields: option_strings.Part) -> None:
    """Sets the fields or the unit, which follow the # of a source's name."""

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields the documents that begin in the shard's range of the files."""
    for name, *unit in self._units(shard_index, num_shards):
      yield from self._documents(name, *unit)

  def _units(
    self, shard_index: int, num_shards: int
  ) -> Iterator[tuple[str, bytes, str, int]]:
    """Yields id, content, path and offset of the documents of a shard."""
    total = sum(self._sizes.values())
    cap = min(total, self.max_bytes or total)
    start, stop = (
      cap * i // num_shards for i in (shard_index, shard_index + 1)
    )
    position = 0  # First byte of the file in the files.
    for path, size in self._sizes.items():
      if start < position + size and position < stop:
        found = self._scan(path, max(start - position, 0), stop - position)
        for offset, end, data in found:
          if position + end <= cap:
            yield self._name(path, offset), data, path, offset
      position += size

  def _scan(
    self, path: str, start: int, stop: int
  ) -> Iterator[tuple[int, int, bytes]]:
    """Yields offset, end and content of a file's documents in a range."""
    for offset, line in _lines(path, start):
      if offset >= stop:
        return
      if line.strip():
        yield offset, offset + len(line), line

  def _name(self, path: str, offset: int) -> str:
    """Returns the id of the document at an offset of a file."""
    return f'{self._ids[path]}:{offset}'

  def locate(self, document_id: str) -> str:
    """Returns a document's file, and its line if the file has several."""
    unit = document_id.partition('::')[0]
    files = {name: path for path, name in self._ids.items()}
    if unit in files:
      return files[unit]
    name, _, offset = unit.rpartition(':')
    return self._where(files[name], int(offset))

  @abc.abstractmethod
  def _documents(
    self, name: str, data: bytes, path: str, offset: int
  ) -> Iterator[document_source.Entry]:
    """Yields ids and readers of the documents of one unit of a file.

    Args:
      name: id of the unit.
      data: its content.
      path: path of the file.
      offset: first byte of the unit in the file.
    """

  def _where(self, path: str, offset: int) -> str:
    """Returns a file and the number of its line at an offset."""
    if self.skips_bad:  # No message is printed, so no line is counted.
      return path
    count, left = 1, offset
    with paths.open_to_read(path) as file:
      while left and (block := file.read(min(left, _BLOCK))):
        count += block.count(b'\n')
        left -= len(block)
    return f'{path}, line {count}'

  def _content(self) -> Iterator[object]:
    for path in self._sizes:
      yield self._ids[path]
      # A store has checksums of the whole files.
      yield self._files[path].get('digest') or _sample(path)


@document_source.register('text')
class TextSource(FileSource):
  """`text:GLOB[#UNIT]`: each file, paragraph or line is one document."""

  form = 'text:GLOB[#paragraphs|#lines]'

  def _take_fields(self, fields: option_strings.Part) -> None:
    self._unit = fields.text
    if self._unit not in ('', 'paragraphs', 'lines'):
      raise fields.error('must be paragraphs or lines')

  def _scan(
    self, path: str, start: int, stop: int
  ) -> Iterator[tuple[int, int, bytes]]:
    if self._unit == 'lines':
      yield from super()._scan(path, start, stop)
    elif self._unit:
      yield from _paragraphs(path, start, stop)
    elif not start:
      yield 0, self._sizes[path], b''  # Read when it is wanted.

  def _name(self, path: str, offset: int) -> str:
    return super()._name(path, offset) if self._unit else self._ids[path]

  def _documents(
    self, name: str, data: bytes, path: str, offset: int
  ) -> Iterator[document_source.Entry]:
    yield name, functools.partial(self._read, data, path, offset)

  def _read(self, data: bytes, path: str, offset: int) -> str:
    """Returns the text of a document."""
    if self._unit:
      where = functools.partial(self._where, path, offset)
      return document_source.decode(data.strip(b'\r\n'), self.name, where)
    with paths.open_to_read(path) as file:
      data = file.read().removeprefix(codecs.BOM_UTF8)
      return document_source.decode(data, self.name, path)


@document_source.register('jsonl')
class JsonlSource(FileSource):
  """`jsonl:GLOB[#FIELD]`: each line is an object with the text in a field."""

  form = 'jsonl:GLOB[#FIELD]'

  default_field = 'text'

  def _take_fields(self, fields: option_strings.Part) -> None:
    self._field = fields.text or self.default_field

  def _documents(
    self, name: str, data: bytes, path: str, offset: int
  ) -> Iterator[document_source.Entry]:
    yield name, functools.partial(self._read, data, path, offset)

  def _read(self, data: bytes, path: str, offset: int) -> str:
    """Returns the text or the JSON of a line."""
    text = self._value(data, path, offset, self._field, str)
    return document_source.encodable(text)

  def _value(
    self,
    data: bytes,
    path: str,
    offset: int,
    field: str,
    kind: type | tuple[type, ...],
  ) -> Any:
    """Returns a field of a line.

    Raises:
      UserError: the line is no object, or the field is missing or of another
        type; names the file and the line.
    """
    where = functools.partial(self._where, path, offset)
    try:
      value = json.loads(document_source.decode(data, self.name, where))[field]
    except (ValueError, KeyError, TypeError) as error:
      value = error
    if not isinstance(value, kind):
      what = {str: 'text', list: 'a list'}.get(kind, 'a text or label')
      raise errors.UserError(
        f'source {self.name!r}: {where()}, is not a JSON object with {what} in'
        f' {field!r} ({value!r:.200}); name the field after a #, as in'
        ' jsonl:GLOB#FIELD'
      )
    return value


@document_source.register('pairs')
class PairSource(JsonlSource):
  """`pairs:GLOB#INPUTS,TARGETS`: two fields of each line."""

  form = 'pairs:GLOB#INPUTS,TARGETS'
  document_kind = 'pairs'

  def _take_fields(self, fields: option_strings.Part) -> None:
    self._fields = [field.text for field in fields.divide(',')]
    if len(self._fields) != 2 or not all(self._fields):
      raise fields.error('must be two fields, as in pairs:GLOB#INPUTS,TARGETS')

  def _read(self, data: bytes, path: str, offset: int) -> str:
    pair = [self._value(data, path, offset, name, str) for name in self._fields]
    return document_source.encodable(json.dumps(pair, ensure_ascii=False))


@document_source.register('labels')
class LabelSource(JsonlSource):
  """`labels:GLOB#TEXT[,TEXT],LABEL`: texts and their label in each line.

  A text is a string, or a list of words whose label is a list with a label for
  each. A label is a string or an integer.
  """

  form = 'labels:GLOB#TEXT,LABEL'
  document_kind = 'labels'

  def _take_fields(self, fields: option_strings.Part) -> None:
    *self._texts, self._field = [field.text for field in fields.divide(',')]
    if not self._texts or not all([*self._texts, self._field]):
      raise fields.error(
        'must be the fields of texts and label, as in labels:GLOB#TEXT,LABEL'
      )

  def _read(self, data: bytes, path: str, offset: int) -> str:
    value = functools.partial(self._value, data, path, offset)
    texts = [value(name, (str, list)) for name in self._texts]
    content = [texts, value(self._field, (str, int, list))]
    return document_source.encodable(json.dumps(content, ensure_ascii=False))


@document_source.register('chat')
class ChatSource(JsonlSource):
  """`chat:GLOB[#FIELD]`: a list of messages in each line."""

  form = 'chat:GLOB[#FIELD]'
  document_kind = 'chat'

  default_field = 'messages'

  def _read(self, data: bytes, path: str, offset: int) -> str:
    messages = self._value(data, path, offset, self._field, list)
    return document_source.encodable(json.dumps(messages, ensure_ascii=False))


def _lines(path: str, start: int) -> Iterator[tuple[int, bytes]]:
  """Yields offset and content of the lines that begin at `start` or later.

  The first line of a file comes without a byte-order mark.
  """
  with paths.open_to_read(path) as file:
    offset = 0
    if start:  # The byte before may be the end of a line.
      file.seek(start - 1)
      offset = start - 1 + len(file.readline())
    for line in file:
      yield offset, line if offset else line.removeprefix(codecs.BOM_UTF8)
      offset += len(line)


def _paragraphs(
  path: str, start: int, stop: int
) -> Iterator[tuple[int, int, bytes]]:
  """Yields offset, end and content of the paragraphs of a range.

  The last empty line before a paragraph begins in the range, so a reader need
  not look back to know whether a line begins a paragraph. The first paragraph
  of a file is in the range that has the first byte.
  """
  inside: list[bytes] = []
  first, begun = 0, not start
  for offset, line in _lines(path, start):
    if line.strip():
      if begun:
        first = first if inside else offset
        inside.append(line)
      continue
    if inside:
      yield first, offset, b''.join(inside)
      inside = []
    if offset >= stop:
      return
    begun = True
  if inside:
    yield first, first + sum(map(len, inside)), b''.join(inside)


def _relative(path: str, root: str) -> str:
  """Returns the path below a folder, without any '::'."""
  relative = os.path.relpath(path, root).replace(os.sep, '/')
  return relative.replace('::', ':_:')


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
