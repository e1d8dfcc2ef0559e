"""Peak FLOP/s of devices, which utilisation (MFU) is measured against.

This module must not import `planner`, which reads the table.
"""

from collections.abc import Sequence

import jax

# A substring of `device_kind`, of which the first match counts; the name of the
# chip in `planner.chips` if its figures apply; dense bf16 FLOP/s from the
# vendor's data sheet.
KINDS = (
  ('TPU7x', 'tpu7x', 2307e12 / 2),  # A device is half of a chip.
  ('TPU v6', 'v6e', 918e12),
  ('TPU v5 lite', 'v5e', 197e12),
  ('TPU v5e', 'v5e', 197e12),
  ('TPU v5', 'v5p', 459e12),
  ('TPU v4', 'v4', 275e12),
  ('H100 PCIe', None, 756e12),
  ('H100 NVL', None, 835e12),
  ('H100', 'h100', 989e12),
  ('GH200', None, 989e12),
  ('H200', 'h200', 989e12),
  ('A100-SXM4-40', None, 312e12),
  ('A100-PCIE-40', None, 312e12),
  ('A100', 'a100', 312e12),
  ('GB200', None, 2500e12),
  ('B200', 'b200', 2250e12),
  ('L40S', None, 362e12),
  ('L40', None, 181e12),
  ('NVIDIA L4', 'l4', 121e12),
)


def peak(devices: Sequence[jax.Device]) -> float | None:
  """Returns the FLOP/s of all devices, by the vendor's data sheet.

  Args:
    devices: devices of one kind.

  Returns:
    None for a device kind that is not in the table. CPUs are not: their clock
    and the cores that a job gets are unknown, and a timed product is slower
    than the fastest form that the compiler uses in a step.
  """
  kind = devices[0].device_kind
  return next((n * len(devices) for name, _, n in KINDS if name in kind), None)
