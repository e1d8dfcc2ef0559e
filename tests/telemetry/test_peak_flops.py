"""Peak FLOP/s of known devices."""

import types

import pytest

from encdec_adapt.telemetry import peak_flops


@pytest.mark.parametrize(
  'kind, tera',
  [
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA GH200 480GB', 989),
    ('TPU v9', None),  # An unknown device is not guessed.
    ('cpu', None),
  ],
)
def test_peak_of_devices(kind, tera):
  device = types.SimpleNamespace(platform='some', device_kind=kind)
  expected = None if tera is None else 4 * tera * 1e12
  assert peak_flops.peak([device] * 4) == expected
