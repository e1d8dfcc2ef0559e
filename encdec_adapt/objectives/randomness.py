"""Random generators of the data, keyed by the identity of an example.

A generator depends on (seed, pass, source, example id) and nothing else: not
on the worker, the shard, the order of reading or earlier draws. So records are
byte-identical for any number of workers and after any restart, and every pass
draws again.

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
  """Returns the parts, each after its length."""
  found = []
  for part in parts:
    data = str(part).encode('utf-8', 'surrogatepass')
    found += len(data).to_bytes(8, 'little'), data
  return b''.join(found)


class Keyed:
  """One generator that is set to key after key, which is faster than many.

  A generator is valid until the next call.
  """

  def __init__(self, seed: int, pass_index: int, source: str):
    """Takes the part of the key that all examples share; see `generator`."""
    shared = _joined((seed, pass_index, source))
    self._shared = hashlib.blake2b(shared, digest_size=16)
    self._philox = np.random.Philox(key=0)
    self._generator = np.random.Generator(self._philox)
    self._start = self._philox.state

  def __call__(self, example_id: str) -> np.random.Generator:
    """Returns the generator of an example: draws as that of `generator`."""
    key = self._shared.copy()
    key.update(_joined((example_id,)))
    self._start['state']['key'][:] = np.frombuffer(key.digest(), '<u8')
    self._philox.state = self._start
    return self._generator


def generator(
  seed: int, pass_index: int, source: str, example_id: str
) -> np.random.Generator:
  """Returns the random generator of one example in one pass.

  Args:
    seed: seed of the record set.
    pass_index: 0, 1, ..
    source: name of the source of the example.
    example_id: id of the example within the source.

  Returns:
    A counter-based (Philox) generator with a key of its own.
  """
  key = digest(seed, pass_index, source, example_id)
  return np.random.Generator(np.random.Philox(key=key))
