"""Arrays of a checkpoint, restored when they are read.

Holds no models: `model_on_disk` opens checkpoints.
"""

from collections.abc import Mapping
import functools
import math

import numpy as np

from encdec_adapt.checkpoints import manager
from encdec_adapt.files import lazy_array
from encdec_adapt.models import parameters
from encdec_adapt.training import state as state_lib

# Bytes of a checkpoint that are restored at once: small arrays share the time
# that opening it takes, and host memory stays small beside a large array.
_GROUP_BYTES = 128 << 20


def open_arrays(
  checkpoint: manager.Checkpoint, table: Mapping[str, parameters.ParamInfo]
) -> dict[str, lazy_array.LazyArray]:
  """Returns the arrays of a checkpoint; restores a group of them at a time.

  Opening a checkpoint takes longer than restoring a small array.

  Args:
    checkpoint: the checkpoint, which may have optimizer state as well.
    table: path of every parameter in it to its shape.

  Raises:
    UserError: its parameters are others.
  """
  # Partial: there may be optimizer state. Differences are found before a
  # conversion has written half of its output.
  checkpoint.require_same({'params': state_lib.unflatten(table)}, partial=True)
  folder = checkpoint.open_state()
  names = {path: f'params/{path}' for path in table}
  # As if a group were full, so that the first name opens another.
  group_of, size = {}, _GROUP_BYTES
  # By path, the order in which exports read: each group is restored once.
  for name in sorted(names.values()):
    shape, dtype = folder.arrays[name]
    nbytes = math.prod(shape) * dtype.itemsize
    if size + nbytes > _GROUP_BYTES:
      group, size = [], 0
    group.append(name)
    group_of[name], size = group, size + nbytes
  last: dict[str, np.ndarray] = {}

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    if name not in last:
      last.clear()  # Before the next group: memory holds a single group.
      last.update(folder.read(group_of[name]))
    return last[name][index]

  return {
    path: lazy_array.LazyArray(
      *folder.arrays[name], functools.partial(read, name)
    )
    for path, name in names.items()
  }
