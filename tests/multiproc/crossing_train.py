"""`train`, on devices ordered so that groups of the mesh cross processes.

A TPU slice's order follows its torus, and there a `tensor` or `sequence`
group may lie on several hosts. Of two processes with four devices each, in a
mesh of fsdp=4 and tensor=2, both hold rows of the first and the last group,
and each those of one more: process 0 of shards 0, 1, 3, process 1 of 0, 2, 3.
"""

import numpy as np

from encdec_adapt import train
from encdec_adapt.cli import command
from encdec_adapt.sharding import mesh

ORDER = ((0, 4), (1, 2), (5, 6), (3, 7))


def arranged(sizes, devices):
  """Devices in the shape of the mesh, as `mesh` would arrange a slice's."""
  return np.array(devices)[np.ravel(ORDER)].reshape(sizes)


if __name__ == '__main__':
  mesh._arranged = arranged
  command.main(__doc__, train.define_flags, train.main)
