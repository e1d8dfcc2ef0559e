"""Append-only files, such as metrics, on file systems and object stores.

On a file system a write goes to the kernel at once. Objects in a bucket cannot
be appended to: writes are buffered and uploaded as NAME, and after every
`PART` bytes as NAME-000001 and so on, so that no object is uploaded again and
again as it grows. Everything written is safe after `flush`; otherwise it is
uploaded with the first write `EVERY` seconds after the last upload, or later
while the bucket does not answer.
"""

import io
import sys
import time

from encdec_adapt.files import paths

PART = 1 << 20
EVERY = 30.0


class _Parts:
  """An append-only file in a bucket."""

  def __init__(self, path: paths.Path):
    self._path, self._number = path, len(_parts(path))
    self._part, self._unwritten = io.BytesIO(), False
    self._flushed, self._failing = time.monotonic(), False

  def write(self, data: bytes) -> None:
    """Appends whole records: no part begins within one."""
    self._part.write(data)
    self._unwritten = True
    full = self._part.tell() >= PART
    if (
      full and not self._failing
    ) or time.monotonic() - self._flushed >= EVERY:
      try:
        self.flush()
      except OSError as error:  # The next upload has all of the part again.
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
    """Uploads what was written so far."""
    if self._unwritten:
      paths.write(_part(self._path, self._number), self._part.getvalue())
      self._unwritten = False
    self._flushed = time.monotonic()

  def close(self) -> None:
    """Uploads the rest."""
    self.flush()


def append(path: paths.Path) -> _Parts | io.RawIOBase:
  """Opens a file for appending whole records.

  Args:
    path: need not exist; on a file system its folder must.

  Returns:
    An object with `write`, `flush` and `close`.
  """
  if paths.is_bucket(path):
    return _Parts(path)
  return open(path, 'ab', buffering=0)


def exists(path: paths.Path) -> bool:
  """Returns whether anything was written to the file."""
  return path.exists() or bool(_parts(path))


def read(path: paths.Path) -> bytes:
  """Reads all that was written and flushed."""
  if not paths.is_bucket(path):
    return path.read_bytes()
  return b''.join(part.read_bytes() for part in _parts(path))


def replace(path: paths.Path, data: bytes) -> None:
  """Replaces the content; a kill may duplicate records but loses none.

  Args:
    path: file to replace.
    data: new content of the file.
  """
  parts = _parts(path)
  paths.write(path, data)
  for part in parts[1:]:
    part.unlink()


def _part(path: paths.Path, number: int) -> paths.Path:
  return path if not number else path.with_name(f'{path.name}-{number:06d}')


def _parts(path: paths.Path) -> list[paths.Path]:
  """Lists the objects of a file in a bucket, in order."""
  if not paths.is_bucket(path):
    return []
  first = [path] if path.exists() else []
  return first + sorted(path.parent.glob(f'{path.name}-*'))
