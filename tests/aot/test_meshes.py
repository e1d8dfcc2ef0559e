"""Arrangement of TPU slices' devices in a mesh; nothing is compiled."""

import numpy as np
import pytest

from encdec_adapt.configs import gemma2
from encdec_adapt.planner import chips
from encdec_adapt.sharding import mesh as mesh_lib
from tests.planner import toy

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


@pytest.mark.parametrize('argument', gemma2.ON_TPU)
def test_the_groups_of_shipped_meshes_are_boxes(argument):
  asked = dict(item.split('=') for item in argument.split(','))
  slices = int(asked.get('slices', 1))
  config = gemma2.get_config(argument).mesh
  sizes = {axis: config[axis] for axis in mesh_lib.AXES}
  mesh, _ = _mesh(asked['topology'], slices, **sizes)
  for group in mesh.devices[:, :, 0, 0]:  # The whole slice always is a box.
    places = np.array([device.coords for device in group])
    assert np.prod(places.max(0) - places.min(0) + 1) == len(group)
    assert slices == 1 or len({device.slice_index for device in group}) == 1
