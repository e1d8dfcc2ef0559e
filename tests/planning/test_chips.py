"""Topologies as they are written."""

import importlib.util
import itertools
import re
import types

import pytest

from encdec_adapt import plan
from encdec_adapt.cli import errors
from encdec_adapt.planning import chips
from encdec_adapt.telemetry import peak_flops


@pytest.mark.parametrize(
  'text, slices, devices',
  [('v5e:4x4', 1, 16), ('v5p:8x8x8', 2, 1024), ('h100:64', 1, 64)],
)
def test_devices_are_counted(text, slices, devices):
  where = chips.parse(text, slices)
  assert (where.name, where.devices) == (text, devices)


@pytest.mark.parametrize(
  'text, slices, message',
  [
    ('v5litepod-16', 1, 'one of v4, v5e'),
    ('v9:4x4', 1, 'v9:4x4 is not known'),
    ('v5e:4x4x4', 1, r'2 dimension\(s\).* such as v5e:4x4'),
    ('v5p:4x4', 1, 'v5p:4x4x4'),
    ('v5e:0x4', 1, 'v5e:0x4: .* at least 1 chip'),
    ('v5e:4xq', 1, 'v5e:4xq: .* such as v5e:4x4'),
    ('h100', 1, r'h100: .* 1 dimension\(s\).* such as h100:4'),
    ('v5e:4x4', 0, 'slices is 0'),
  ],
)
def test_what_is_no_topology_is_refused(text, slices, message):
  with pytest.raises(errors.UserError, match=message):
    chips.parse(text, slices)


def test_the_matrix_units_give_the_peak():
  units = {'v4': 8, 'v5e': 4, 'v5p': 8, 'v6e': 16}  # Of 128 x 128.
  for name, count in units.items():
    chip = chips.CHIPS[name]
    flops = count * 2 * 128 * 128 * chip.clock
    assert flops == pytest.approx(chip.flops, rel=0.01)


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
  known = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    'find_spec',
    lambda name, *rest: None if name == 'libtpu' else known(name, *rest),
  )
  with pytest.raises(errors.UserError, match=r"pip install 'jax\[tpu\]=="):
    chips.devices_of(chips.parse('v5e:2x2'))


def _devices(kind, extents, slices):
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
  ],
)
def test_devices_are_known_by_their_topology(kind, extents, slices, name):
  devices = _devices(kind, extents, slices)
  found = chips.slice_of(devices)
  assert (found.name, found.count) == (name, slices)
  assert found.devices == len(devices)


@pytest.mark.parametrize(
  'kind', ['cpu', 'NVIDIA A100-SXM4-40GB', 'NVIDIA GH200', 'NVIDIA H100 PCIe']
)
def test_devices_that_are_not_known_have_no_topology(kind):
  assert chips.slice_of(_devices(kind, (8,), 1)) is None


def test_a_chip_has_the_peak_of_its_devices():
  peaks = {name: peak for _, name, peak in peak_flops.KINDS if name}
  assert peaks == {name: chip.flops for name, chip in chips.CHIPS.items()}


@pytest.mark.aot
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)
@pytest.mark.parametrize('name', ['v5e', 'v6e', 'v4', 'v5p'])
def test_every_shape_that_is_named_is_built(name):
  shapes = chips.SHAPES[chips.CHIPS[name].dimensions]
  for shape in re.findall(r'\d+(?:x\d+)+', shapes):
    where = chips.parse(f'{name}:{shape}')
    assert len(plan.describe_devices(where)) == where.devices
