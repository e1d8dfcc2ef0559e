"""Lazily restored arrays of a checkpoint.

`model_on_disk` opens the checkpoints.
"""

import collections
from collections.abc import Mapping
import functools
import math

import numpy as np

from encdec_adapt.checkpoints import manager
from encdec_adapt.files import lazy_array
from encdec_adapt.models import parameters
from encdec_adapt.training import state as state_lib

# Bytes to restore at once: small arrays share the cost of opening the
# checkpoint, while host memory stays bounded.
_GROUP_BYTES = 128 << 20


def open_arrays(
  checkpoint: manager.Checkpoint,
  table: Mapping[str, parameters.ParamInfo],
  groups: int = 1,
) -> dict[str, lazy_array.LazyArray]:
  """Returns the arrays of a checkpoint, restored lazily in groups.

  Opening a checkpoint takes longer than restoring a small array.

  Args:
    checkpoint: the checkpoint; optimizer state is ignored.
    table: path of every parameter -> its shape.
    groups: most groups in host memory: as many as the parameters that an
      export joins in a tensor (`weights.joined`).

  Raises:
    UserError: the checkpoint has other parameters.
  """
  # Partial: there may be optimizer state. Checked here so that no conversion
  # fails halfway through its output.
  checkpoint.require_same({'params': state_lib.unflatten(table)}, partial=True)
  folder = checkpoint.open_state()
  names = {path: f'params/{path}' for path in table}
  # Start with a full group, so that the first name opens a new group.
  group_of, size = {}, _GROUP_BYTES
  # Sorted by path, as exports read them: each group is restored once.
  for name in sorted(names.values()):
    shape, dtype = folder.arrays[name]
    nbytes = math.prod(shape) * dtype.itemsize
    if size + nbytes > _GROUP_BYTES:
      group, size = [], 0
    group.append(name)
    group_of[name], size = group, size + nbytes
  last: collections.deque[dict[str, np.ndarray]] = collections.deque()

  def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
    if not any(name in arrays for arrays in last):
      if len(last) == groups:
        last.popleft()  # First, so that memory holds no more.
      last.append(folder.read(group_of[name]))
    (array,) = (arrays[name] for arrays in last if name in arrays)
    return array[index]

  return {
    path: lazy_array.LazyArray(
      *folder.arrays[name], functools.partial(read, name)
    )
    for path, name in names.items()
  }
