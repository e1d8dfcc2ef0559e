"""Reads arrays by name from any Orbax checkpoint.

Only this module, `manager` and `streaming` import Orbax.
"""

from collections.abc import Iterable
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import state_leaves, step_folders
from encdec_adapt.files import paths
from encdec_adapt.sharding import placement

# Marker files of an Orbax checkpoint; `checkpoint` until 2024.
_MARKS = ('_METADATA', '_CHECKPOINT_METADATA', 'checkpoint')
_ITEM = 'default'  # CheckpointManager's subfolder for a single item.


def is_orbax_folder(path: str | os.PathLike[str]) -> bool:
  """Returns whether the folder is an Orbax checkpoint."""
  return any((paths.at(path) / name).exists() for name in _MARKS)


class OrbaxFolder:
  """Arrays of an Orbax checkpoint by name; reads only the requested arrays.

  Attributes:
    path: path of the folder.
    arrays: name ('layer_0/mlp/linear') -> shape and dtype.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads names, shapes and dtypes of the arrays.

    Args:
      path: path of the folder.

    Raises:
      UserError: the folder cannot be read as arrays.
    """
    self.path = step_folders.absolute(path)
    if not (self.path / '_METADATA').exists() and (self.path / _ITEM).is_dir():
      self.path /= _ITEM
    try:
      metadata = ocp.PyTreeCheckpointHandler().metadata(self.path)
      leaves, self._structure = jax.tree_util.tree_flatten_with_path(
        metadata.tree
      )
      self.arrays: state_leaves.Stored = {
        placement.path_string(keys): (tuple(leaf.shape), np.dtype(leaf.dtype))
        for keys, leaf in leaves
      }
    except Exception as error:  # Orbax has no exception type for this.
      raise errors.UserError(
        f'{path} cannot be read as a folder of Orbax ({error}). It is'
        ' incomplete or damaged: fetch it again.'
      ) from error

  def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads arrays in their stored dtypes, without synchronizing processes.

    Args:
      names: array names, keys of `arrays`.

    Raises:
      UserError: the arrays cannot be read.
    """
    names = set(names)
    # Orbax skips leaves with a placeholder; 0 marks the leaves to read.
    item = [0 if name in names else ocp.PLACEHOLDER for name in self.arrays]
    # As NumPy arrays: otherwise Orbax applies the stored shardings, with
    # devices this process may lack.
    restore_args = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(item)
    arguments = ocp.args.PyTreeRestore(
      item=self._structure.unflatten(item),
      restore_args=self._structure.unflatten(restore_args),
    )
    # By default Orbax ends a restore with a barrier across all processes.
    process = jax.process_index()
    this_process = ocp.options.MultiprocessingOptions(
      primary_host=process, active_processes={process}
    )
    try:
      with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(), multiprocessing_options=this_process
      ) as checkpointer:
        restored = checkpointer.restore(self.path, args=arguments)
    except Exception as error:
      raise errors.UserError(
        f'{self.path}: {min(names)} cannot be read ({error}). The folder is'
        ' incomplete or damaged: fetch it again.'
      ) from error
    return {
      placement.path_string(keys): np.asarray(leaf)
      for keys, leaf in jax.tree_util.tree_leaves_with_path(restored)
      if placement.path_string(keys) in names
    }
