"""`train` on CPUs that stand for accelerators with a memory of so many bytes.

Process i of a job has the i-th of the numbers in MEMORY, and the last one
counts for all after it.
"""

import os

from encdec_adapt import train
from encdec_adapt.cli import command
from encdec_adapt.cluster import distributed
from encdec_adapt.models import execution
from encdec_adapt.telemetry import environment

_on = execution.ComputeConfig.on


def _as_gpu(self, platform, earlier=None):
  return _on(self, 'gpu', earlier)


def stand_in(limit, setattr=setattr, use=lambda: 0):
  """CPUs have `limit()` bytes, `use()` taken; `compute.remat` follows."""
  setattr(execution.ComputeConfig, 'on', _as_gpu)
  setattr(environment, 'memory_limit_and_use', lambda: (limit(), use()))


def _of_process():
  limits = [int(x) for x in os.environ['MEMORY'].split(',')]
  return limits[min(distributed.count_and_index()[1], len(limits) - 1)]


if __name__ == '__main__':
  stand_in(_of_process)
  command.main(__doc__, train.define_flags, train.main)
