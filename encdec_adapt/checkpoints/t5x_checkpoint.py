"""Reads arrays by name from a checkpoint of t5x.

Source of the layout: google-research/t5x, `checkpoints.py`. A file
`checkpoint`, msgpack as Flax writes it, holds the tree: arrays that were not
partitioned themselves, and in place of others a TensorStore spec with a path
relative to the folder. Later versions leave the tree to Orbax, in `state/`.
"""

from collections.abc import Callable
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
_PARAMETERS = 'target/'
# Before a name in place of an array, in trees that Orbax wrote until 2023.
_PLACEHOLDER = 'PLACEHOLDER://'


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A t5x checkpoint with unread parameters.

  Attributes:
    arrays: parameter ('encoder/encoder_norm/scale') -> shape and dtype.
    state: names outside the parameters: the optimizer state.
    read: reads parameters by name, in their stored dtypes.
  """

  arrays: state_leaves.Stored
  state: list[str]
  read: Callable[[list[str]], dict[str, np.ndarray]]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint | None:
  """Opens a checkpoint; None if t5x did not write this folder.

  Args:
    path: folder of a single step, such as `checkpoint_1000000`.

  Raises:
    UserError: it is damaged, or TensorFlow's.
  """
  folder = paths.absolute(path)
  state = folder / 'state'
  if (state / '_METADATA').exists():
    return _from_orbax(state)
  trees = (place for place in (folder, state) if (place / _FILE).is_file())
  tree_folder = next(trees, None)
  return tree_folder and _from_tree(tree_folder)


def _from_orbax(path: paths.Path) -> Checkpoint | None:
  folder = orbax_folder.OrbaxFolder(path)
  full_names, state = _split({name: name for name in folder.arrays})

  def read(names: list[str]) -> dict[str, np.ndarray]:
    arrays = folder.read(full_names[name] for name in names)
    return {name: arrays[full_names[name]] for name in names}

  arrays = {name: folder.arrays[full] for name, full in full_names.items()}
  return Checkpoint(arrays, state, read) if arrays else None


def _from_tree(folder: paths.Path) -> Checkpoint | None:
  file = folder / _FILE
  content = file.read_bytes()
  if content.startswith(b'model_checkpoint_path'):
    raise errors.UserError(
      f'{file} names checkpoints of TensorFlow, such as those of Mesh'
      ' TensorFlow, which are not supported; give the model as t5x or'
      ' transformers has it.'
    )
  try:
    leaves = traverse_util.flatten_dict(
      serialization.msgpack_restore(content),
      sep='/',
      is_leaf=lambda _, value: 'kvstore' in value,
    )
    leaves, state = _split(leaves)
    # Opens all arrays, and then reads all, concurrently.
    stores = {name: _open(folder, leaf) for name, leaf in leaves.items()}
  except Exception as error:  # msgpack has no common exception type.
    raise _damaged(file, error) from error
  for name, store in stores.items():
    if isinstance(store, ts.Future):
      stores[name] = _result(store, folder, name)

  def read(names: list[str]) -> dict[str, np.ndarray]:
    reads = {name: stores[name].read() for name in names}
    arrays = {name: _result(x, folder, name) for name, x in reads.items()}
    return {name: x.view(_dtype(x.dtype)) for name, x in arrays.items()}

  arrays = {
    name: (tuple(store.shape), _dtype(store.dtype.numpy_dtype))
    for name, store in stores.items()
  }
  return Checkpoint(arrays, state, read) if arrays else None


def _split(leaves: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
  leaves = {name.removeprefix('optimizer/'): x for name, x in leaves.items()}
  parameters = {
    name.removeprefix(_PARAMETERS): leaf
    for name, leaf in leaves.items()
    if name.startswith(_PARAMETERS)
  }
  others = [name for name in leaves if not name.startswith(_PARAMETERS)]
  return parameters, [name for name in others if name != 'version']


def _open(folder: paths.Path, leaf: Any) -> ts.TensorStore | ts.Future:
  """Opens the array of a leaf: an array, a TensorStore spec or a placeholder.

  The driver and bucket of a spec are those of the place where it was written.
  """
  if isinstance(leaf, np.ndarray):
    return ts.array(leaf)
  if isinstance(leaf, str):
    leaf = {'path': leaf.removeprefix(_PLACEHOLDER)}
  # Outside `kvstore` before TensorStore 0.1.14.
  path = leaf.get('kvstore', {}).get('path') or leaf['path']
  path = paths.join(folder, path.rstrip('/')) + '/'
  local = {'driver': 'file', 'path': path}
  kvstore = path if paths.is_bucket(path) else local
  return ts.open({'driver': 'zarr', 'kvstore': kvstore}, open=True, read=True)


def _dtype(dtype: np.dtype) -> np.dtype:
  # Version 2 stored bfloat16 as uint16, before TensorStore had the type.
  return np.dtype(ml_dtypes.bfloat16 if dtype == np.uint16 else dtype)


def _result(future: ts.Future, folder: paths.Path, name: str) -> Any:
  try:
    return future.result()
  except Exception as error:  # TensorStore raises many types.
    raise _damaged(f'{folder}: {name}', error) from error


def _damaged(place: str | paths.Path, error: Exception) -> errors.UserError:
  return errors.UserError(
    f'{place} cannot be read as part of a t5x checkpoint ({error}). It is'
    ' incomplete or damaged: fetch it again.'
  )
