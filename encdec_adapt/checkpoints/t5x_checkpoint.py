"""Reads arrays by name from a checkpoint of t5x.

Source of the layout: google-research/t5x, `checkpoints.py`. A file
`checkpoint`, msgpack as Flax writes it, holds the tree: arrays that were not
partitioned themselves, and in place of others a TensorStore spec with a path
relative to the folder. Later versions leave the tree to Orbax, in `state/`.
"""

from collections.abc import Callable, Iterable
import dataclasses
import os
from typing import Any

from flax import serialization, traverse_util
import ml_dtypes
import numpy as np
import tensorstore as ts

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import orbax_folder, state_leaves
from encdec_adapt.files import paths

_FILE = 'checkpoint'
_ORBAX = 'state'
# How the file begins: a map of two keys, one of which is first.
_BEGINNINGS = (b'\x82\xa7version', b'\x82\xa9optimizer')
_VERSIONS = (2, 3)
_PARAMETERS = 'target/'
# Before a name in the place of an array in trees of Orbax of 2023.
_PLACEHOLDER = 'PLACEHOLDER://'


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A t5x checkpoint with unread parameters.

  Attributes:
    arrays: parameter ('encoder/encoder_norm/scale') -> shape and dtype.
    state: names outside the parameters, such as the optimizer state.
    read: reads parameters by name, in their stored dtypes.
  """

  arrays: state_leaves.Stored
  state: tuple[str, ...]
  read: Callable[[Iterable[str]], dict[str, np.ndarray]]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
  """Opens a checkpoint; None if t5x did not write this folder.

  Args:
    path: folder of a single step, such as `checkpoint_1000000`.

  Raises:
    UserError: it is damaged, or of a version that is not supported.
  """
  folder = paths.absolute(path)
  file, state = folder / _FILE, folder / _ORBAX
  if file.is_file():
    with file.open('rb') as stream:
      is_t5x = stream.read(16).startswith(_BEGINNINGS)
    return _from_tree(folder) if is_t5x else None
  if (state / '_METADATA').exists():
    return _from_orbax(orbax_folder.OrbaxFolder(state))
  return _from_tree(state) if (state / _FILE).is_file() else None


def _from_orbax(folder: orbax_folder.OrbaxFolder) -> Checkpoint | None:
  """Opens arrays of Orbax; None if they are not a state of t5x."""
  stored, state = _split(dict.fromkeys(folder.arrays))
  if not stored:
    return None
  full_names = {
    name.removeprefix('optimizer/').removeprefix(_PARAMETERS): name
    for name in folder.arrays
  }

  def read(names: Iterable[str]) -> dict[str, np.ndarray]:
    names = list(names)
    arrays = folder.read([full_names[name] for name in names])
    return {name: arrays[full_names[name]] for name in names}

  arrays = {name: folder.arrays[full_names[name]] for name in stored}
  return Checkpoint(arrays, state, read)


def _from_tree(folder: paths.Path) -> Checkpoint:
  """Opens the tree in `checkpoint`, and the arrays that it refers to."""
  file = folder / _FILE
  try:
    tree = serialization.msgpack_restore(file.read_bytes())
    version = tree.get('version', _VERSIONS[-1])
    leaves = traverse_util.flatten_dict(
      tree, sep='/', is_leaf=lambda _, value: 'kvstore' in value
    )
  except Exception as error:  # msgpack has no common exception type.
    raise _damaged(file, error) from error
  if version not in _VERSIONS:
    raise errors.UserError(
      f'{file} has version {version!r} of t5x checkpoints; supported are'
      f' {_VERSIONS}. Save it again with a later t5x.'
    )
  leaves, state = _split(leaves)
  pending = {
    name: ts.open(_spec(folder, leaf), open=True, read=True)
    for name, leaf in leaves.items()
    if not isinstance(leaf, np.ndarray)
  }
  # Arrays and stores are alike in `shape`, `dtype` and slices.
  stored = {name: leaf for name, leaf in leaves.items() if name not in pending}
  for name, store in pending.items():
    stored[name] = _result(store, folder, name)

  def converted(dtype: np.dtype) -> np.dtype:
    # TensorStore had no bfloat16 when version 2 was written.
    is_bits = version == 2 and dtype == np.uint16
    return np.dtype(ml_dtypes.bfloat16 if is_bits else dtype)

  def read(names: Iterable[str]) -> dict[str, np.ndarray]:
    names = set(names)
    reads = {name: stored[name].read() for name in names & pending.keys()}
    arrays = {name: stored[name] for name in names - pending.keys()}
    for name, future in reads.items():
      arrays[name] = _result(future, folder, name)
    return {name: x.view(converted(x.dtype)) for name, x in arrays.items()}

  arrays = {}
  for name, array in stored.items():
    dtype = array.dtype
    dtype = dtype.numpy_dtype if isinstance(dtype, ts.dtype) else dtype
    arrays[name] = tuple(array.shape), converted(dtype)
  return Checkpoint(arrays, state, read)


def _split(leaves: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Splits the leaves of a tree in parameters and names of others."""
  leaves = {name.removeprefix('optimizer/'): x for name, x in leaves.items()}
  parameters = {
    name.removeprefix(_PARAMETERS): leaf
    for name, leaf in leaves.items()
    if name.startswith(_PARAMETERS)
  }
  others = (x for x in leaves if not x.startswith(_PARAMETERS))
  return parameters, tuple(x for x in others if x != 'version')


def _spec(folder: paths.Path, leaf: Any) -> dict[str, Any]:
  """Returns the TensorStore spec of an array in the folder.

  The stored driver and bucket are those where it was written, and its chunks
  are stated by the array itself.
  """
  if isinstance(leaf, str):
    leaf = {'path': leaf.removeprefix(_PLACEHOLDER)}
  # Beside `kvstore` before TensorStore 0.1.14.
  path = leaf.get('kvstore', {}).get('path') or leaf.get('path', '')
  path = paths.join(folder, path.rstrip('/')) + '/'
  local = {'driver': 'file', 'path': path}
  kvstore = path if paths.is_bucket(path) else local
  return {'driver': leaf.get('driver', 'zarr'), 'kvstore': kvstore}


def _result(future: ts.Future, folder: paths.Path, name: str) -> Any:
  try:
    return future.result()
  except Exception as error:  # TensorStore raises many types.
    raise _damaged(f'{folder}, {name}', error) from error


def _damaged(place: str | paths.Path, error: Exception) -> errors.UserError:
  return errors.UserError(
    f'{place} cannot be read as part of a t5x checkpoint ({error}). It is'
    ' incomplete or damaged: fetch it again.'
  )
