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
