"""Random generators of the data, keyed by the identity of an example.

A generator depends on (seed, pass, source, example id) and nothing else: not
on the worker, the shard, the order of reading or earlier draws. So records are
byte-identical for any number of workers and after any restart, and every pass
draws again.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import hashlib

import numpy as np


def digest(*parts: object) -> int:
  """Hashes parts to 128 bits; ('a', 'bc') and ('ab', 'c') differ."""
  key = hashlib.blake2b(digest_size=16)
  for part in parts:
    data = str(part).encode('utf-8', 'surrogatepass')
    key.update(len(data).to_bytes(8, 'little'))
    key.update(data)
  return int.from_bytes(key.digest(), 'little')


class Keyed:
  """One generator that is set to key after key, which is faster than many.

  A generator is valid until the next call.
  """

  def __init__(self, seed: int, pass_index: int, source: str):
    """Takes the part of the key that all examples share; see `generator`."""
    self._shared = seed, pass_index, source
    self._philox = np.random.Philox(key=0)
    self._generator = np.random.Generator(self._philox)
    self._start = self._philox.state

  def __call__(self, example_id: str) -> np.random.Generator:
    """Returns the generator of an example: draws as that of `generator`."""
    key = digest(*self._shared, example_id)
    self._start['state']['key'][:] = key & (2**64 - 1), key >> 64
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
