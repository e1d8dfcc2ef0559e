"""Files that grow, such as metrics, where files cannot: in a bucket.

On a file system a write goes to the kernel at once. In a bucket what was
written is gathered and put as NAME, and after every `PART` bytes as
NAME-000001 and so on, so that no object is put again and again as it grows.
What matters is there after `flush`; the rest follows with the next write that
is `EVERY` seconds after the last, or, where the bucket is away then, later.
"""

import io
import sys
import time

from encdec_adapt.files import paths

PART = 1 << 20
EVERY = 30.0


class _Parts:
  """A file that grows in a bucket."""

  def __init__(self, path: paths.Path):
    self._path, self._number = path, len(_parts(path))
    self._part, self._unwritten = io.BytesIO(), False
    self._flushed, self._away = time.monotonic(), False

  def write(self, data: bytes) -> None:
    """Adds whole records: no part begins within one."""
    self._part.write(data)
    self._unwritten = True
    full = self._part.tell() >= PART
    if (full and not self._away) or time.monotonic() - self._flushed >= EVERY:
      try:
        self.flush()
      except OSError as error:  # It is whole, and put again.
        print(
          f'Warning: {self._path} is written later: {error}', file=sys.stderr
        )
        self._away, self._flushed = True, time.monotonic()
        return
      self._away = False
      if full:
        self._number += 1
        self._part = io.BytesIO()

  def flush(self) -> None:
    """Puts what was written so far."""
    if self._unwritten:
      paths.write(_part(self._path, self._number), self._part.getvalue())
      self._unwritten = False
    self._flushed = time.monotonic()

  def close(self) -> None:
    """Puts the rest."""
    self.flush()


def append(path: paths.Path) -> _Parts | io.RawIOBase:
  """Opens a file to add whole records at its end, by `write`.

  Args:
    path: need not exist; its folder has to, on a file system.

  Returns:
    What has `write`, `flush` and `close`.
  """
  if paths.is_bucket(path):
    return _Parts(path)
  return open(path, 'ab', buffering=0)


def exists(path: paths.Path) -> bool:
  """Whether anything was written there."""
  return path.exists() or bool(_parts(path))


def read(path: paths.Path) -> bytes:
  """All that was written and flushed."""
  if not paths.is_bucket(path):
    return path.read_bytes()
  return b''.join(part.read_bytes() for part in _parts(path))


def replace(path: paths.Path, data: bytes) -> None:
  """Writes the file anew. Killed halfway, it leaves records twice, none less.

  Args:
    path: of the file.
    data: what it holds from now on.
  """
  parts = _parts(path)
  paths.write(path, data)
  for part in parts[1:]:
    part.unlink()


def _part(path: paths.Path, number: int) -> paths.Path:
  return path if not number else path.with_name(f'{path.name}-{number:06d}')


def _parts(path: paths.Path) -> list[paths.Path]:
  """The objects of a file in a bucket, in order."""
  if not paths.is_bucket(path):
    return []
  first = [path] if path.exists() else []
  return first + sorted(path.parent.glob(f'{path.name}-*'))
