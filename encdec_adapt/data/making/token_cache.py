"""Token ids of a shard's documents, kept between passes over them.

All passes over a shard are made by one process after the other, so the ids
need not outlive it: they are in a temporary file beside the records, of which
nothing is left when the process ends, however it does. A document is known by
the digest of its text: whatever a pass draws, each text is tokenised once.

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
  """Tokens of texts, for one vocabulary; a context manager."""

  def __init__(self, folder: str | os.PathLike[str] | None):
    """Opens a temporary file.

    Args:
      folder: local folder to write to; None for the system's temporary one.
    """
    self._file = tempfile.TemporaryFile(dir=folder)
    self._size = 0
    self._places: dict[bytes, tuple[int, int]] = {}  # digest: (start, bytes)

  def encode(
    self, text: str, encode: Callable[[str], np.ndarray]
  ) -> np.ndarray:
    """Returns the tokens of a text.

    Args:
      text: text of a document.
      encode: returns the tokens of a text, int32 [n]; called if it is new.

    Raises:
      UserError: the disk is full or fails.
    """
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    try:
      if key in self._places:
        start, size = self._places[key]
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
    self._places[key] = self._size, len(data)
    self._size += len(data)
    return tokens

  def __exit__(self, *unused):
    with contextlib.suppress(OSError):  # Nothing that is written now counts.
      self._file.close()
