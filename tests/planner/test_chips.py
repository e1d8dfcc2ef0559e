"""Chips, topologies, and the devices that stand for them."""

import itertools
import re
import types

import jax
import jax.numpy as jnp
import pytest

from encdec_adapt.base import errors
from encdec_adapt.planner import chips, gpu_targets, hlo
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.telemetry import peak_flops
from tests.planner import toy


def _devices(kind, extents, slices=1):
  return [
    types.SimpleNamespace(device_kind=kind, coords=place, slice_index=index)
    for index in range(slices)
    for place in itertools.product(*map(range, extents))
  ]


@pytest.mark.parametrize(
  'kind, extents, slices, name',
  [
    ('TPU v5 lite', (4, 2, 1), 1, 'v5e:4x2'),
    ('TPU v5', (2, 2, 4), 2, 'v5p:2x2x4'),
    ('TPU v6 lite', (4, 4, 1), 1, 'v6e:4x4'),
    ('NVIDIA H200', (8,), 1, 'h200:8'),
    ('NVIDIA L4', (1,), 1, 'l4:1'),
  ],
)
def test_devices_are_known_by_their_topology(kind, extents, slices, name):
  devices = _devices(kind, extents, slices)
  found = chips.slice_of(devices)
  assert (found.name, found.count) == (name, slices)
  assert found.devices == len(devices)
  assert chips.parse(name, slices) == found


def test_other_devices_have_no_topology():
  others = 'A100-SXM4-40GB', 'GH200', 'GB200', 'L40'
  for kind in ('cpu', *(f'NVIDIA {x}' for x in others)):
    assert chips.slice_of(_devices(kind, (8,))) is None


def test_chips_have_the_peak_of_their_devices_and_matrix_units():
  peaks = {name: peak for _, name, peak in peak_flops.KINDS if name}
  assert peaks == {name: chip.flops for name, chip in chips.CHIPS.items()}
  # Of 128 x 128.
  units = {'v4': 8, 'v5e': 4, 'v5p': 8, 'v6e': 16, 'tpu7x': 16}
  for name, count in units.items():
    chip = chips.CHIPS[name]
    flops = count * 2 * 128 * 128 * chip.clock
    assert flops == pytest.approx(chip.flops, rel=0.01)


def test_gpus_have_the_figures_of_their_descriptions():
  for chip in chips.CHIPS.values():
    if chip.kind == 'gpu':
      text = gpu_targets.text(chip.name, 'jax_cuda13_pjrt 0.12')
      values = dict(re.findall(r'(\w+): ([\d.]+)', text))
      bandwidth = float(values['memory_bandwidth'])
      assert chip.hbm_bandwidth == pytest.approx(bandwidth, rel=0.001)
      # Nine tenths, rounded to GiB.
      usable = 0.9 * float(values['device_memory_size'])
      assert chip.hbm_bytes == pytest.approx(usable, rel=0.02)


@toy.needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize(
  'topology', ['v5e:1x1', 'v5e:8x16', 'v6e:16x16', 'v4:2x2x1', 'v5p:8x8x8']
)
def test_topologies_are_built(topology):
  where = chips.parse(topology)
  assert len(chips.devices_of(where)) == where.devices


@toy.needs_libtpu
@pytest.mark.aot
def test_a_slice_that_nobody_offers_is_refused():
  with pytest.raises(errors.UserError, match='v5e are 1x1, 2x2, 2x4, 4x4'):
    chips.devices_of(chips.parse('v5e:3x5'))


@toy.needs_libtpu
@pytest.mark.aot
def test_a_program_compiles_for_two_devices_a_chip():
  where = chips.parse('tpu7x:2x2x1')
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(fsdp=4, tensor=2), chips.devices_of(where)
  )
  assert mesh.size == where.devices == 8

  def array(*axes):
    spec = jax.sharding.PartitionSpec(*axes)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)

  options = compiler.options(mesh)
  product = jax.jit(lambda a, b: a @ b, compiler_options=options)
  traced = product.trace(array('fsdp', None), array(None, 'tensor'))
  text = traced.lower(lowering_platforms=('tpu',)).compile().as_text()
  assert hlo.totals(text).flops == 2 * 512**3 / 8
