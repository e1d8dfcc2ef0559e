"""Append-only files, such as metrics, on file systems and object stores.

`Log` is an append-only file of JSON lines, continued by a resumed job.

On a file system, a write goes to the kernel at once. Objects in a bucket cannot
be appended to: writes are buffered and uploaded as NAME, and after every `PART`
bytes as NAME-000001 and so on, so that no large object is uploaded repeatedly.
Data is safe after `flush`; otherwise it is uploaded by the first write `EVERY`
seconds after the last upload, or later while the bucket does not answer. This
module must not know the contents of records.
"""

from collections.abc import Iterable
import io
import json
import sys
import time
from typing import Any

from encdec_adapt.files import disk, paths

PART = 1 << 20  # Maximum bytes of an object before the next object.
EVERY = 30.0


class _Parts:
  """An append-only file in a bucket."""

  def __init__(self, path: paths.Path):
    # Always start a new part, so that a resumed job uploads only new records.
    self._path, self._number = path, len(_parts(path))
    self._part, self._unwritten = io.BytesIO(), False
    self._flushed, self._failing = time.monotonic(), False

  def write(self, data: bytes) -> None:
    """Appends whole records; parts never split a record."""
    self._part.write(data)
    self._unwritten = True
    full = self._part.tell() >= PART
    is_due = time.monotonic() - self._flushed >= EVERY
    # While the bucket fails, retry only every `EVERY` seconds: a slow attempt
    # per record would block the job.
    if is_due or (full and not self._failing):
      try:
        self.flush()
      except OSError as error:
        # Not raised: the next upload includes the whole part.
        print(
          f'Warning: {self._path} is written later: {error}', file=sys.stderr
        )
        self._failing, self._flushed = True, time.monotonic()
        return
      self._failing = False
      if full:
        self._number += 1
        self._part = io.BytesIO()

  def flush(self) -> None:
    """Uploads all records written so far."""
    if self._unwritten:
      paths.write(_part(self._path, self._number), self._part.getvalue())
      self._unwritten = False
    self._flushed = time.monotonic()

  close = flush


def append(path: paths.Path) -> _Parts | io.RawIOBase:
  """Opens a file for appending whole records.

  Args:
    path: may be missing; on a file system, its folder must exist.

  Returns:
    An object with `write`, `flush` and `close`.
  """
  if paths.is_bucket(path):
    return _Parts(path)
  return open(path, 'ab', buffering=0)


class Log:
  """An append-only file of JSON lines, continued by a resumed job.

  Attributes:
    path: the file.
    lines: (record, location) of every complete line: the record is None if it
      is not JSON; the location is file and line number, for messages.
    torn: whether the last line is incomplete.
  """

  def __init__(self, path: paths.Path):
    """Reads the file, if it exists."""
    self.path, self._content, self._file = path, read(path), None
    *lines, end = self._content.split(b'\n')
    self.torn = bool(end)
    numbers: dict[bytes, int] = {}
    # Deduplicate: a kill while replacing the parts in a bucket leaves duplicate
    # lines.
    for number, line in enumerate(lines, 1):
      numbers.setdefault(line, number)
    self.lines = [
      (_record(line), f'{path}, line {number}')
      for line, number in numbers.items()
    ]

  def keep(self, records: Iterable[Any]) -> None:
    """Sets the content of the file to records, and opens it for appending."""
    content = _encode(records)
    # Usually nothing is dropped: avoid a rewrite that could be interrupted.
    if content != self._content:
      replace(self.path, content)
    self._content, self._file = content, append(self.path)

  def write(self, *records: Any) -> None:
    """Appends records atomically.

    Raises:
      UserError: the disk is full or missing.
    """
    with disk.writing(self.path):
      self._file.write(_encode(records))

  def flush(self) -> None:
    """Flushes all records, so that SIGKILL loses nothing.

    Raises:
      UserError: the disk is full or missing.
    """
    with disk.writing(self.path):
      self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _record(line: bytes) -> Any:
  try:
    return json.loads(line)
  except ValueError:
    return None


def _encode(records: Iterable[Any]) -> bytes:
  return ''.join(json.dumps(record) + '\n' for record in records).encode()


def read(path: paths.Path) -> bytes:
  """Reads all flushed content; empty if there is no file."""
  return b''.join(part.read_bytes() for part in _parts(path))


def replace(path: paths.Path, data: bytes) -> None:
  """Replaces the content; a kill may duplicate records but loses none.

  Args:
    path: file to replace.
    data: new content of the file.
  """
  parts = _parts(path)
  # Write first, so that no records are lost with the deleted parts.
  paths.write(path, data)
  for part in parts[1:]:
    part.unlink()


def _part(path: paths.Path, number: int) -> paths.Path:
  return path if not number else path.with_name(f'{path.name}-{number:06d}')


def _parts(path: paths.Path) -> list[paths.Path]:
  parts = [path] if path.exists() else []
  if paths.is_bucket(path):
    # Zero-padded numbers sort as text.
    parts += sorted(path.parent.glob(f'{path.name}-*'))
  return parts
