"""Freed buffers of a CPU's steps stay in the process."""

import subprocess
import sys

import pytest

from tests import tiny

# Page faults of ten calls with temporary arrays of 64 MB.
_FAULTS = """
import resource, sys
from encdec_adapt.cluster import host_memory
if sys.argv[1] == 'keep':
  host_memory.share_arena()
  host_memory.keep_freed()
import jax, jax.numpy as jnp
def step(x):
  return jax.nn.softmax(x @ x.T, axis=0) @ x
step, x = jax.jit(step), jnp.ones((4096, 16))
for _ in range(3):
  step(x).block_until_ready()
start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
  step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='glibc is Linux only')
def test_steps_map_no_pages_anew():
  def faults(word):
    output = subprocess.check_output(
      [sys.executable, '-c', _FAULTS, word], env=tiny.environment(), text=True
    )
    return int(output)

  assert faults('keep') * 10 < faults('return')
