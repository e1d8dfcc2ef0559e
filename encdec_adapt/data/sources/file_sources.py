"""Sources that are files: ranges of their bytes, and plain text.

The files of a glob, ordered by name and concatenated, are a range of bytes, of
which every shard reads an equal part: whole files where there are many, a part
of a file where there are few. A document belongs to the shard that has its
first byte (a paragraph: the first byte of the empty line before it). Its id is
its file and the offset of its first byte there, or the file alone where that is
one document. The byte-order mark of a file is dropped; elsewhere U+FEFF is
text.

Files that end in .gz or .zst are decompressed, by every shard from their
beginning: a document stands where the compressed block of its first byte begins
(`files/decompression.py`), and offsets in ids are those in the text. Files of
JSON lines and parquet are in `row_sources.py`.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import codecs
from collections.abc import Iterator
import functools
import glob
import hashlib
import os
import re
from typing import Any, NamedTuple

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.sources import document_source
from encdec_adapt.files import decompression, hub, paths

# Bytes of each of the three samples of a fingerprint: reading all of a large
# source would take minutes at every start.
_SAMPLE_BYTES = 1 << 16


class _Line(NamedTuple):
  """A line of a file.

  Attributes:
    begin: position in the file on disk; of a compressed file, of a block.
    end: end of the line there, or of the block in which it ends.
    offset: first byte in the text of the file.
    data: content of the line.
  """

  begin: int
  end: int
  offset: int
  data: bytes


class Unit(NamedTuple):
  """A part of a file that documents are made from.

  Attributes:
    id: id of the unit.
    data: content of the unit, a row of a parquet file as its fields; empty for
      a file, which is read later.
    path: path of the file.
    offset: first byte of the unit in the text of the file, or number of a row.
    room: bytes of it within the cap, if it ends behind that.
  """

  id: str
  data: bytes | dict[str, Any]
  path: str
  offset: int
  room: int | None = None


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
    if hub.is_address(self.pattern):
      expanded = hub.fetch_matching(self.pattern)
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
    # The split ignores the rest of an id after its last '::' (`in_split`).
    self._ids = {
      path: _encodable(os.path.relpath(path, root)).replace('::', ':_:')
      for path in self._sizes
    }

  @abc.abstractmethod
  def _take_fields(self, fields: option_strings.Part) -> None:
    """Parses the part of a source's name that follows the #."""

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields the documents that begin in the shard's range of the files."""
    for unit in self._units(shard_index, num_shards):
      yield from self._documents(unit)

  def _units(self, shard_index: int, num_shards: int) -> Iterator[Unit]:
    total = sum(self._sizes.values())
    cap = min(total, self.max_bytes or total)
    start, stop = (
      cap * i // num_shards for i in (shard_index, shard_index + 1)
    )
    position = 0  # Offset of the file's first byte in all files.
    for path, size in self._sizes.items():
      # A shard opens, and downloads from a bucket, no other files.
      if start < position + size and position < stop:
        first = max(start - position, 0)
        for offset, end, data in self._scan(path, first, stop - position):
          # The last document begins within the cap, but may end behind it.
          room = cap - position - offset if position + end > cap else None
          if room is None or self.divisible:
            yield Unit(self._name(path, offset), data, path, offset, room)
      position += size

  def _scan(
    self, path: str, start: int, stop: int
  ) -> Iterator[tuple[int, int, Any]]:
    """Yields offset, end on disk and content of a file's units in a range."""
    for line in _lines(path, start):
      if line.begin >= stop:
        return
      if line.data.strip():
        yield line.offset, line.end, line.data

  def _name(self, path: str, offset: int) -> str:
    """Returns the id of the document at an offset of a file."""
    return f'{self._ids[path]}:{offset}'

  def locate(self, document_id: str) -> str:
    """Returns a document's file, and its line if the file has several."""
    # A template's name, or the number of a draw, may follow the '::'.
    unit = document_id.partition('::')[0]
    files = {name: path for path, name in self._ids.items()}
    if unit in files:
      return files[unit]
    name, _, offset = unit.rpartition(':')
    return self._line_location(files[name], int(offset))

  def _documents(self, unit: Unit) -> Iterator[document_source.Entry]:
    """Yields ids and readers of the documents of a unit."""
    yield unit.id, functools.partial(self._read_within, unit)

  def _read_within(self, unit: Unit) -> str:
    text = self._read(unit)
    return text if unit.room is None else self._cut(text, unit.room)

  def _read(self, unit: Unit) -> str:
    """Returns the text of a document."""
    # Lines are counted from the file's first byte, so only for an error.
    location = functools.partial(self._line_location, unit.path, unit.offset)
    return document_source.decode(unit.data, self.name, location)

  def _line_location(self, path: str, offset: int) -> str:
    if self.skips_bad:  # No message is printed, so no line is counted.
      return path
    line, remaining = 1, offset
    for _, block in decompression.blocks(path):
      line += block.count(b'\n', 0, remaining)
      remaining -= len(block)
      if remaining <= 0:
        break
    return f'{path}, line {line}'

  def _content(self) -> Iterator[object]:
    for path in self._sizes:
      yield self._ids[path]
      # A bucket's listing has a checksum of each file, which costs no request.
      yield self._files[path].get('digest') or _sample(path)


@document_source.register('text')
class TextSource(FileSource):
  """`text:GLOB[#UNIT]`: each file, paragraph or line is a document."""

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
      # Its bytes are read by `_read`, if its split is read at all.
      yield 0, self._sizes[path], b''

  def _name(self, path: str, offset: int) -> str:
    return super()._name(path, offset) if self._unit else self._ids[path]

  def _read(self, unit: Unit) -> str:
    if self._unit:
      return super()._read(unit._replace(data=unit.data.strip(b'\r\n')))
    data = decompression.read(unit.path, unit.room).removeprefix(
      codecs.BOM_UTF8
    )
    if unit.room is not None:  # Without a character that is cut off.
      data = re.sub(rb'[\xc0-\xff][\x80-\xbf]*\Z', b'', data)
    return document_source.decode(data, self.name, unit.path)


def _lines(path: str, start: int) -> Iterator[_Line]:
  """Yields the lines that begin at byte `start` of a file or later.

  The first line of a file comes without a byte-order mark.
  """
  is_compressed = decompression.is_compressed(path)
  # The byte before decides whether a line begins at `start` itself: what is
  # read from there to the end of a line begins earlier.
  offset = 0 if is_compressed else max(start - 1, 0)
  for begin, end, data in decompression.lines(path, offset):
    if not is_compressed:
      begin, end = offset, offset + len(data)
    if begin >= start:
      text = data if offset else data.removeprefix(codecs.BOM_UTF8)
      yield _Line(begin, end, offset, text)
    offset += len(data)


def _paragraphs(
  path: str, start: int, stop: int
) -> Iterator[tuple[int, int, bytes]]:
  """Yields offset, end on disk and content of the paragraphs of a range.

  The last empty line before a paragraph begins in the range, so a reader need
  not look back to know whether a line begins a paragraph. The first paragraph
  of a file is in the range that has the first byte.
  """
  paragraph: list[_Line] = []

  def joined() -> tuple[int, int, bytes]:
    data = b''.join(line.data for line in paragraph)
    return paragraph[0].offset, paragraph[-1].end, data

  # Text before the range's first empty line belongs to the range before.
  is_ours = not start
  for line in _lines(path, start):
    if line.data.strip():
      if is_ours:
        paragraph.append(line)
      continue
    if paragraph:
      yield joined()
      paragraph = []
    # An empty line behind the range begins a paragraph of the next range, but
    # it ended the last paragraph of this range above.
    if line.begin >= stop:
      return
    is_ours = True
  if paragraph:
    yield joined()


def _encodable(path: str) -> str:
  return os.fsencode(path).decode('utf-8', 'backslashreplace')


def _fixed_folder(pattern: str) -> str:
  # Ids are relative to it, so that they survive a move of the files.
  folder = os.path.dirname(pattern)
  while glob.has_magic(folder):
    folder = os.path.dirname(folder)
  return folder or '.'


def _sample(path: str) -> str:
  size = os.path.getsize(path)
  digest = hashlib.blake2b(str(size).encode(), digest_size=16)
  with open(path, 'rb') as file:
    for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
      file.seek(start)
      digest.update(file.read(_SAMPLE_BYTES))
  return digest.hexdigest()
