"""Arrangement of TPU slices' devices in a mesh; nothing is compiled."""

import numpy as np
import pytest

from configs import gemma2
from encdec_adapt.planning import chips
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from tests.planning import toy

pytestmark = [pytest.mark.aot, toy.needs_libtpu]


def _mesh(topology, slices=1, **sizes):
  where = chips.parse(topology, slices)
  config = mesh_lib.MeshConfig(**sizes)
  return mesh_lib.make_mesh(config, chips.devices_of(where)), where


@pytest.mark.parametrize(
  'topology, sizes',
  [
    ('v5e:4x4', dict(replica=2)),
    ('v5e:4x4', dict(replica=2, fsdp=4, tensor=4)),
    ('v5p:4x4x4', dict(replica=2, fsdp=4, sequence=4, tensor=4)),
    ('v5p:4x4x4', dict(replica=8, tensor=4)),
  ],
)
def test_replica_alone_spans_slices(topology, sizes):
  mesh, _ = _mesh(topology, 2, **sizes)
  slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
  expected = np.arange(sizes['replica']) // (sizes['replica'] // 2)
  expected = np.broadcast_to(expected[:, None, None, None], slices.shape)
  np.testing.assert_array_equal(slices, expected)


@pytest.mark.parametrize('argument', gemma2.PLANNED)
def test_the_groups_of_shipped_meshes_are_boxes(argument):
  asked = dict(item.split('=') for item in argument.split(','))
  slices = int(asked.get('slices', 1))
  config = gemma2.get_config(argument).mesh
  sizes = {axis: config[axis] for axis in mesh_lib.AXES}
  mesh, _ = _mesh(asked['topology'], slices, **sizes)
  assert len(mesh.devices) > 1  # One group is the whole slice: always a box.
  for group in mesh.devices[:, :, 0, 0]:
    places = np.array([device.coords for device in group])
    assert np.prod(places.max(0) - places.min(0) + 1) == len(group)
    assert slices == 1 or len({device.slice_index for device in group}) == 1


@pytest.mark.parametrize(
  'topology, slices, sizes, readers',
  [
    ('v5e:4x4', 1, dict(), 1),
    # Groups of `tensor` or `sequence` on two hosts or on all four.
    ('v5e:4x4', 1, dict(fsdp=4, tensor=4), 2),
    ('v5e:4x4', 1, dict(fsdp=4, sequence=4), 2),
    ('v5e:4x4', 1, dict(fsdp=1, sequence=4, tensor=4), 4),
    ('v5e:4x4', 2, dict(replica=2, fsdp=4, tensor=4), 2),
  ],
)
def test_processes_read_the_rows_of_their_devices(
  topology, slices, sizes, readers
):
  """Together the whole batch; each row once per process of its group."""
  mesh, where = _mesh(topology, slices, **sizes)
  replica, fsdp, *group = mesh.devices.shape
  groups = mesh.devices.reshape(replica * fsdp, -1)
  processes = {device.process_index for device in groups.flat}
  assert len(processes) == where.devices // where.chip.host_chips
  rows, read = 2 * len(groups), []
  for process in sorted(processes):
    shards = placement.row_shards(mesh, rules_lib.named('fsdp'), process)
    found = shards.rows(rows)
    assert found == [
      row
      for row in range(rows)
      if process in {device.process_index for device in groups[row // 2]}
    ]
    assert shards.shard_rows(len(found)) == 2
    read += found
  assert sorted(read) == sorted([*range(rows)] * readers)
