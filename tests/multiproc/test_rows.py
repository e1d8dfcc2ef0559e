"""Batches of two processes on meshes with any order of devices."""

import json

import pytest

from tests import tiny

pytestmark = pytest.mark.multiproc

# Each process reads the rows that it holds, and checks the part of each device.
_MEMBER = """
import json, pathlib, sys
import jax
import numpy as np
from encdec_adapt.cluster import distributed
from encdec_adapt.sharding import mesh as mesh_lib, placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import state, step

distributed.initialize(sys.argv[1], 2, int(sys.argv[3]))
rows, length = 16, 8
fields = {
  'tokens': np.arange(rows * length, dtype=np.int32).reshape(rows, length),
  'weights': np.arange(rows, dtype=np.float32),
}
held = []
for sizes, order in json.loads(sys.argv[4]):
  mesh_lib._arranged = lambda sizes, devices: (
    np.array(devices)[order].reshape(sizes)
  )
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(*sizes))
  where = state.Placement(None, mesh, rules_lib.RULES['fsdp'])
  shards = placement.row_shards(mesh, where.rules)
  local = shards.rows(rows)
  placed = step.place_batch({k: x[local] for k, x in fields.items()}, where)
  for name, value in fields.items():
    assert placed[name].shape == value.shape
    assert placed[name].dtype == value.dtype
    assert len(placed[name].addressable_shards) == 4
    for shard in placed[name].addressable_shards:
      np.testing.assert_array_equal(shard.data, value[shard.index])
  total = jax.jit(lambda batch: batch['tokens'].sum())(placed)
  assert int(total) == fields['tokens'].sum()
  held.append(shards.indices)
folder, me = pathlib.Path(sys.argv[5]), sys.argv[3]
(folder / f'{me}.json').write_text(json.dumps(held))
distributed.barrier('the end')
"""

# Mesh (replica, fsdp, sequence, tensor), order of the devices, of which 0 to 3
# are process 0's, and the shards of rows that each process holds.
CASES = [
  ((1, 8, 1, 1), (0, 1, 2, 3, 4, 5, 6, 7), [[0, 1, 2, 3], [4, 5, 6, 7]]),
  ((2, 2, 1, 2), (0, 1, 2, 3, 4, 5, 6, 7), [[0, 1], [2, 3]]),
  # Not contiguous, as on a torus.
  ((1, 8, 1, 1), (0, 4, 5, 1, 2, 6, 7, 3), [[0, 3, 4, 7], [1, 2, 5, 6]]),
  # Shared by both, all or some of them.
  ((1, 1, 1, 8), (0, 1, 2, 3, 4, 5, 6, 7), [[0], [0]]),
  ((1, 2, 1, 4), (0, 1, 4, 5, 2, 3, 6, 7), [[0, 1], [0, 1]]),
  ((1, 2, 4, 1), (0, 1, 4, 5, 2, 3, 6, 7), [[0, 1], [0, 1]]),
  ((1, 4, 1, 2), (0, 4, 1, 2, 5, 6, 3, 7), [[0, 1, 3], [0, 2, 3]]),
  ((2, 2, 2, 1), (0, 4, 1, 2, 5, 6, 3, 7), [[0, 1, 3], [0, 2, 3]]),
  # One process holds more of them than the other.
  ((1, 2, 2, 2), (0, 1, 2, 4, 3, 5, 6, 7), [[0, 1], [0, 1]]),
  ((1, 4, 2, 1), (0, 4, 1, 5, 2, 3, 6, 7), [[0, 1, 2], [0, 1, 3]]),
]


def test_every_device_gets_its_rows_on_any_mesh(tmp_path):
  given = json.dumps([case[:2] for case in CASES])
  arguments = _MEMBER, tmp_path, 2, given, tmp_path
  assert tiny.wait_all(tiny.start_programs(*arguments, devices=4)) == [0, 0]
  held = [json.loads((tmp_path / f'{i}.json').read_text()) for i in range(2)]
  pairs = [list(pair) for pair in zip(*held, strict=True)]
  assert pairs == [case[2] for case in CASES]
