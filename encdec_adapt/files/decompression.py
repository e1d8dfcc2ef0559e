"""Reads .gz, .zst and uncompressed files.

A compressed file must be read from its beginning. Positions refer to the
compressed file, in blocks of a fixed size, so that all readers split it alike.

This module imports `zstandard` only to read a .zst file.
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

# Bytes of a block; readers split files at block boundaries.
_BLOCK = 1 << 14


def is_compressed(path: paths.AnyPath) -> bool:
  """Returns whether a file has the suffix of a compressed file."""
  return os.fspath(path).endswith(('.gz', '.zst'))


def blocks(path: paths.AnyPath, start: int = 0) -> Iterator[tuple[int, bytes]]:
  """Reads the content of a file.

  Args:
    path: path of the file.
    start: first byte to read of an uncompressed file.

  Yields:
    Position in the file, and the content of the last block.

  Raises:
    UserError: the compressed data are damaged or truncated, or the package for
      them is not installed.
    OSError: the file cannot be read.
  """
  make, decoder, end = _decoders(os.fspath(path)), None, start
  with paths.open_to_read(path) as file:
    if start:
      file.seek(start)
    while data := file.read(_BLOCK):
      end += len(data)
      content = b'' if make else data
      # A file may have several streams, as from `cat a.gz b.gz`.
      while make and data:
        if decoder is None or decoder.eof:
          decoder = make()
        try:
          content += decoder.decompress(data)
        except Exception as error:  # zlib and zstandard have separate types.
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
    Start of the block with the line's first byte, end of the block with its
    last byte, both in the file on disk, and the line with its line end.
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

  # Large dumps often use `zstd --long=31`.
  return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
