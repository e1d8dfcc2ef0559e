"""Random generators for data, keyed by example.

A generator depends only on (seed, pass, source, example id), not on the worker,
the shard, the order of reading or earlier draws. Records are byte-identical for
any number of workers and after any restart, and every pass draws anew.

Must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Iterable
import hashlib

import numpy as np


def digest(*parts: object) -> int:
  """Hashes parts to 128 bits; ('a', 'bc') and ('ab', 'c') differ."""
  key = hashlib.blake2b(_joined(parts), digest_size=16)
  return int.from_bytes(key.digest(), 'little')


def _joined(parts: Iterable[object]) -> bytes:
  """Concatenates the parts with length prefixes."""
  # `surrogatepass`: file names may have bytes that are not UTF-8.
  encoded = [str(part).encode('utf-8', 'surrogatepass') for part in parts]
  return b''.join(len(part).to_bytes(8, 'little') + part for part in encoded)


class Keyed:
  """Random generators of the examples of a source in a pass.

  One counter-based generator (Philox) gets the key of each example, which is
  cheaper than making new ones; it is valid until the next call.
  """

  def __init__(self, seed: int, pass_index: int, source: str):
    """Hashes the shared part of the key.

    Args:
      seed: seed of the record set.
      pass_index: 0, 1, ..
      source: name of the examples' source.
    """
    shared = _joined((seed, pass_index, source))
    # The shared part is hashed once; each example id updates a copy of it.
    self._shared = hashlib.blake2b(shared, digest_size=16)
    self._philox = np.random.Philox(key=0)
    self._generator = np.random.Generator(self._philox)
    self._start = self._philox.state

  def __call__(self, example_id: str) -> np.random.Generator:
    """Returns the generator of an example, by its id within the source."""
    key = self._shared.copy()
    key.update(_joined((example_id,)))
    self._start['state']['key'][:] = np.frombuffer(key.digest(), '<u8')
    # Resets all state, also the counter and a buffered half of a 64-bit draw.
    self._philox.state = self._start
    return self._generator
