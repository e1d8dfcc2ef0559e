"""The only randomness in data: keyed by what an example is.

A generator depends on (seed, pass, source, example id) and on nothing else:
not on the worker, the shard, the order of reading or the number of draws
before it. So records are byte-identical for any number of workers and after
any restart, and another pass draws everything anew.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import hashlib

import numpy as np


def digest(*parts: object) -> int:
  """A 128-bit integer from the parts; ('a', 'bc') and ('ab', 'c') differ."""
  key = hashlib.blake2b(digest_size=16)
  for part in parts:
    data = str(part).encode('utf-8', 'surrogatepass')
    key.update(len(data).to_bytes(8, 'little'))
    key.update(data)
  return int.from_bytes(key.digest(), 'little')


def generator(
  seed: int, pass_index: int, source: str, example_id: str
) -> np.random.Generator:
  """The random generator of one example in one pass.

  Args:
    seed: of the record set.
    pass_index: 0, 1, ..: each pass draws anew.
    source: name of the source that the example is from.
    example_id: of the example within the source.

  Returns:
    A counter-based (Philox) generator with its own key.
  """
  key = digest(seed, pass_index, source, example_id)
  return np.random.Generator(np.random.Philox(key=key))
