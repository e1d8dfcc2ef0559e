"""Content of files that may be compressed: .gz and .zst, others as they are.

A compressed file has to be read from its beginning. Its parts are named by
positions in the file as it lies on disk, in blocks of a fixed size, so that all
readers divide it alike.

This module imports `zstandard` only when a .zst file is read.
"""

from collections.abc import Callable, Iterator
import functools
import io
import itertools
import os
from typing import Any
import zlib

from encdec_adapt.base import errors, packages
from encdec_adapt.files import paths

# Bytes of a file that are read at a time: readers of its parts divide it there.
_BLOCK = 1 << 14


def is_compressed(path: paths.AnyPath) -> bool:
  """Returns whether the name of a file says that it is compressed."""
  return os.fspath(path).endswith(('.gz', '.zst'))


def blocks(path: paths.AnyPath, start: int = 0) -> Iterator[tuple[int, bytes]]:
  """Reads the content of a file.

  Args:
    path: path of the file.
    start: first byte of a file that is not compressed.

  Yields:
    Bytes of the file that have been read, and the content that they added.

  Raises:
    UserError: the compressed data are damaged or end too early, or the package
      that reads them is not installed.
    OSError: the file cannot be read.
  """
  make, decoder, end = _decoders(os.fspath(path)), None, start
  with paths.open_to_read(path) as file:
    if start:
      file.seek(start)
    while data := file.read(_BLOCK):
      end += len(data)
      content = b'' if make else data
      # A file may be several streams in a row, as `cat a.gz b.gz` makes.
      while make and data:
        if decoder is None or decoder.eof:
          decoder = make()
        try:
          content += decoder.decompress(data)
        except Exception as error:  # zlib and zstandard have their own.
          raise errors.UserError(
            f'{path} is damaged, or not compressed as its name says ({error})'
          ) from error
        data = decoder.unused_data
      yield end, content
  if decoder is not None and not decoder.eof:
    raise errors.UserError(
      f'{path} ends in the middle of its compressed data; copy it again'
    )


def lines(
  path: paths.AnyPath, start: int = 0
) -> Iterator[tuple[int, int, bytes]]:
  """Reads the lines of a file; see `blocks`.

  Yields:
    Begin of the block with the first byte of the line, end of the block with
    its last byte, both in the file on disk, and the line with its line end.
  """
  position = begin = start
  pieces: list[bytes] = []
  for end, block in blocks(path, start):
    for piece in io.BytesIO(block):
      if not pieces:
        begin = position
      pieces.append(piece)
      if piece.endswith(b'\n'):
        yield begin, end, b''.join(pieces)
        pieces = []
    position = end
  if pieces:
    yield begin, position, b''.join(pieces)


def read(path: paths.AnyPath, nbytes: int | None = None) -> bytes:
  """Reads the content of a file, or its first bytes; see `blocks`."""
  parts = itertools.islice(blocks(path), nbytes and -(-nbytes // _BLOCK))
  return b''.join(content for _, content in parts)[:nbytes]


def _decoders(path: str) -> Callable[[], Any] | None:
  if path.endswith('.gz'):
    return functools.partial(zlib.decompressobj, wbits=31)
  if not path.endswith('.zst'):
    return None
  packages.require(path, 'data', 'zstandard')
  import zstandard

  # Large dumps are often made with `zstd --long=31`.
  return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
