"""Peak FLOP/s of devices, for model FLOPs utilization (MFU).

This module must not import `planner`, which uses the table.
"""

from collections.abc import Sequence

import jax

# A substring of `device_kind` (the first match is used); the name of the chip
# in `planner.chips` if its figures apply; dense bf16 FLOP/s from the vendor's
# data sheet.
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
  """Returns the total FLOP/s of devices from the vendor's data sheet.

  Args:
    devices: devices of one kind.

  Returns:
    None for a device kind missing from the table, such as CPUs: their clock and
    available cores are unknown, and a timed matmul is slower than the fastest
    form chosen by the compiler in a step.
  """
  kind = devices[0].device_kind
  return next((n * len(devices) for name, _, n in KINDS if name in kind), None)
