"""State leaves by path, and their comparison with a stored state.

Independent of the storage format.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.sharding import placement

# Shape and dtype by path.
Stored = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def total_bytes(abstract_state: Any) -> int:
  """Returns the uncompressed bytes of all arrays in a state."""
  leaves = jax.tree.leaves(jax.tree.map(stored_form, abstract_state))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def differences(stored: Stored, abstract: Any, *, partial: bool) -> list[str]:
  """Lists the differences between a stored and an abstract state.

  Args:
    stored: shapes and dtypes of the stored arrays.
    abstract: tree to restore; leaves have a shape and a dtype.
    partial: whether to ignore additional stored leaves, and differences between
      floating dtypes.

  Returns:
    One line per differing leaf, sorted by path.
  """
  leaves = {
    placement.path_string(path): stored_form(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
  }
  lines = []
  for path, leaf in leaves.items():
    if path not in stored:
      lines.append(f'{path} is not in the checkpoint')
      continue
    shape, dtype = stored[path]
    # Orbax casts silently. Weights may be cast, but not the state of a job:
    # resuming is bit-identical to an uninterrupted job.
    may_cast = partial and all(
      jnp.issubdtype(d, np.floating) for d in (dtype, leaf.dtype)
    )
    if shape != leaf.shape or (dtype != leaf.dtype and not may_cast):
      lines.append(
        f'{path} is {dtype}{list(shape)} in the checkpoint and'
        f' {leaf.dtype}{list(leaf.shape)} here'
      )
  if not partial:
    lines += [
      f'{path} is only in the checkpoint' for path in stored.keys() - leaves
    ]
  return sorted(lines)


def stored_form(leaf: Any) -> Any:
  """Returns the stored form of a leaf: PRNG keys become integers."""
  # A typed key has no NumPy dtype and no size in bytes.
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, leaf)
  return leaf


def with_sharding(leaf: Any) -> Any:
  """Returns the leaf; a missing sharding becomes the first local device."""
  if getattr(leaf, 'sharding', None) is not None:
    return leaf
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
