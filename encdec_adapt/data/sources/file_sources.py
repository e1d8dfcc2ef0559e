"""File sources: byte ranges, and plain text.

The files of a glob, sorted by name and concatenated, form a range of bytes;
every shard reads an equal part of it: whole files if there are many, parts of a
file if there are few. A document belongs to the shard with its first byte (for
a paragraph, the first byte of the preceding empty line). Its id is its file and
the offset of its first byte, or just the file if it is a single document. A
file's byte-order mark is dropped; elsewhere U+FEFF is text.

Every shard decompresses .gz and .zst files from their start: a document's
position is the start of the compressed block with its first byte
(`files/decompression.py`), and offsets in ids refer to the text. JSON lines and
parquet files are in `row_sources.py`.

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

# Bytes of each of a fingerprint's three samples: reading a whole large source
# would take minutes at every start.
_SAMPLE_BYTES = 1 << 16


class _Line(NamedTuple):
  """A line of a file.

  Attributes:
    begin: position in the file on disk; in a compressed file, its block's.
    end: end of the line on disk, or of the block with its end.
    offset: offset of the first byte in the file's text.
    data: content of the line.
  """

  begin: int
  end: int
  offset: int
  data: bytes


class Unit(NamedTuple):
  """A part of a file, from which documents are made.

  Attributes:
    id: id of the unit.
    data: content of the unit: bytes, or the fields of a parquet row; empty for
      a whole file, which is read later.
    path: path of the file.
    offset: offset of the unit in the file's text, or row number.
    room: bytes of the unit within the cap, if it ends beyond the cap.
  """

  id: str
  data: bytes | dict[str, Any]
  path: str
  offset: int
  room: int | None = None


class FileSource(document_source.Source):
  """Files of a glob; each line is a document."""

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
    # The split ignores the part of an id after its last '::' (`group`).
    self._ids = {
      path: _encodable(os.path.relpath(path, root)).replace('::', ':_:')
      for path in self._sizes
    }

  @abc.abstractmethod
  def _take_fields(self, fields: option_strings.Part) -> None:
    """Parses the part of a source's name after the #."""

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields the documents that start in the shard's range of the files."""
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
      # A shard opens or downloads no other files.
      if start < position + size and position < stop:
        first = max(start - position, 0)
        for offset, end, data in self._scan(path, first, stop - position):
          # The last document starts within the cap, but may end beyond it.
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
    # A template's name or a draw's number may follow the '::'.
    unit = document_id.partition('::')[0]
    files = {name: path for path, name in self._ids.items()}
    if unit in files:
      return files[unit]
    name, _, offset = unit.rpartition(':')
    # Other names are of other sources, or of pieces.
    if name in files and unit == self._name(files[name], int(offset)):
      return self._line_location(files[name], int(offset))
    return document_id

  def _documents(self, unit: Unit) -> Iterator[document_source.Entry]:
    yield unit.id, functools.partial(self._read_within, unit)

  def _read_within(self, unit: Unit) -> str:
    text = self._read(unit)
    return text if unit.room is None else self._cut(text, unit.room)

  def _read(self, unit: Unit) -> str:
    # Counting lines reads the file from its start, so only for errors.
    location = functools.partial(self._line_location, unit.path, unit.offset)
    return document_source.decode(unit.data, self.name, location)

  def _line_location(self, path: str, offset: int) -> str:
    if self.skips_bad:  # No message, so no line count.
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
      # A bucket's listing has file checksums, at no extra request.
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
      # `_read` reads the bytes, if the split is read at all.
      yield 0, self._sizes[path], b''

  def _name(self, path: str, offset: int) -> str:
    return super()._name(path, offset) if self._unit else self._ids[path]

  def _read(self, unit: Unit) -> str:
    if self._unit:
      return super()._read(unit._replace(data=unit.data.strip(b'\r\n')))
    data = decompression.read(unit.path, unit.room).removeprefix(
      codecs.BOM_UTF8
    )
    if unit.room is not None:  # Drops a truncated character.
      data = re.sub(rb'[\xc0-\xff][\x80-\xbf]*\Z', b'', data)
    return document_source.decode(data, self.name, unit.path)


def _lines(path: str, start: int) -> Iterator[_Line]:
  """Yields the lines of a file that start at byte `start` or later.

  The first line of a file has no byte-order mark.
  """
  is_compressed = decompression.is_compressed(path)
  # The byte before decides whether a line starts at `start` itself: the line
  # read from that byte starts before the range.
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

  A paragraph belongs to the range with the start of its preceding empty line,
  so a reader need not look back to find the start of a paragraph. The first
  paragraph of a file belongs to the range with the first byte.
  """
  paragraph: list[_Line] = []

  def joined() -> tuple[int, int, bytes]:
    data = b''.join(line.data for line in paragraph)
    return paragraph[0].offset, paragraph[-1].end, data

  # Text before the range's first empty line belongs to the previous range.
  is_ours = not start
  for line in _lines(path, start):
    if line.data.strip():
      if is_ours:
        paragraph.append(line)
      continue
    if paragraph:
      yield joined()
      paragraph = []
    # An empty line after the range starts a paragraph of the next range, after
    # ending this range's last paragraph above.
    if line.begin >= stop:
      return
    is_ours = True
  if paragraph:
    yield joined()


def _encodable(path: str) -> str:
  return os.fsencode(path).decode('utf-8', 'backslashreplace')


def _fixed_folder(pattern: str) -> str:
  # Ids are relative to this folder, so they survive a move of the files.
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
