"""Random generators of the data, keyed by the identity of an example.

A generator depends on (seed, pass, source, example id) only: not on the worker,
the shard, the order of reading or earlier draws. So records are byte-identical
for any number of workers and after any restart, and every pass draws again.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable
import hashlib

import numpy as np


def digest(*parts: object) -> int:
  """Hashes parts to 128 bits; ('a', 'bc') and ('ab', 'c') differ."""
  key = hashlib.blake2b(_joined(parts), digest_size=16)
  return int.from_bytes(key.digest(), 'little')


def _joined(parts: Iterable[object]) -> bytes:
  """Joins the parts, each after its length."""
  # `surrogatepass`: names of files may have bytes that are not UTF-8.
  encoded = [str(part).encode('utf-8', 'surrogatepass') for part in parts]
  return b''.join(len(part).to_bytes(8, 'little') + part for part in encoded)


class Keyed:
  """A generator that is set to key after key: cheaper than a new one for each.

  The generator is valid until the next call.
  """

  def __init__(self, seed: int, pass_index: int, source: str):
    """Takes the part of the key that all examples share; see `generator`."""
    shared = _joined((seed, pass_index, source))
    # A hash object can be copied: the common part is hashed once, and only the
    # id of an example is added to a copy.
    self._shared = hashlib.blake2b(shared, digest_size=16)
    self._philox = np.random.Philox(key=0)
    self._generator = np.random.Generator(self._philox)
    self._start = self._philox.state

  def __call__(self, example_id: str) -> np.random.Generator:
    """Returns the generator of an example, which draws as `generator`'s."""
    key = self._shared.copy()
    key.update(_joined((example_id,)))
    self._start['state']['key'][:] = np.frombuffer(key.digest(), '<u8')
    # All of the state: a counter and half of a 64-bit draw may be left over.
    self._philox.state = self._start
    return self._generator


def generator(
  seed: int, pass_index: int, source: str, example_id: str
) -> np.random.Generator:
  """Returns the random generator of an example in a pass.

  Args:
    seed: seed of the record set.
    pass_index: 0, 1, ..
    source: name of the source of the example.
    example_id: id of the example within the source.

  Returns:
    A counter-based (Philox) generator under the key of the example.
  """
  key = digest(seed, pass_index, source, example_id)
  return np.random.Generator(np.random.Philox(key=key))
