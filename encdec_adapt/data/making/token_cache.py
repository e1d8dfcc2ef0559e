"""Token ids of a shard's documents, cached between passes over them.

One process makes all passes over a shard in turn, so the ids need not outlive
it. They are stored in an unnamed temporary file beside the records, which
vanishes with the process, even if killed. The key is a digest of the text: each
text is tokenised once, whatever a pass draws.

This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Callable
import contextlib
import hashlib
import os
import tempfile

import numpy as np

from encdec_adapt.base import errors


class TokenCache(contextlib.AbstractContextManager):
  """Cache of token ids by text; a context manager."""

  def __init__(self, folder: str | os.PathLike[str] | None):
    """Opens a temporary file.

    Args:
      folder: local folder; None for the system's temporary folder.
    """
    self._file = tempfile.TemporaryFile(dir=folder)
    self._size = 0
    self._slots: dict[bytes, tuple[int, int]] = {}  # digest: (start, bytes)

  def encode(
    self, text: str, encode: Callable[[str], np.ndarray]
  ) -> np.ndarray:
    """Returns the tokens of a text.

    Args:
      text: text of a document.
      encode: returns the tokens of a text, int32 [n]; called for new texts.

    Raises:
      UserError: the disk is full or fails.
    """
    # 16 bytes keep the index of a shard small and make collisions negligible.
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    try:
      if key in self._slots:
        start, size = self._slots[key]
        # `pread` bypasses the file's buffer, which may still hold the ids.
        self._file.flush()
        data = os.pread(self._file.fileno(), size, start)
        return np.frombuffer(data, np.int32)
      tokens = encode(text)
      data = tokens.astype(np.int32).tobytes()
      self._file.write(data)
    except OSError as error:
      raise errors.UserError(
        f'the tokens of {self._size:,} bytes cannot be kept between passes'
        f' ({error}); free some space where the records are made, or make one'
        ' pass at a time (config.data.passes)'
      ) from error
    self._slots[key] = self._size, len(data)
    self._size += len(data)
    return tokens

  def __exit__(self, *unused):
    # Closing flushes, which fails on a full disk; the file is not read again.
    with contextlib.suppress(OSError):
      self._file.close()
