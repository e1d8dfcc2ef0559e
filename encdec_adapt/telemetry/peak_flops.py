"""Peak FLOP/s of devices, which utilisation (MFU) is measured against.

This module must not import `planning`, which reads the table.
"""

from collections.abc import Sequence
import time

import jax
import jax.numpy as jnp

# A substring of `device_kind`, of which the first match counts; the name of the
# chip in `planning.chips` if its figures apply; dense bf16 FLOP/s from the
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
  """Returns the FLOP/s of all devices: data sheet, or measured for the CPU.

  Args:
    devices: devices of one kind. CPU devices share the host's cores, so they
      count once however many there are.

  Returns:
    None for a device kind that is not in the table.
  """
  if devices[0].platform == 'cpu':
    return measured_peak()
  kind = devices[0].device_kind
  return next((n * len(devices) for name, _, n in KINDS if name in kind), None)


def measured_peak(size: int = 1024, repeats: int = 5) -> float:
  """Measures the FLOP/s of a square fp32 product on the first local device.

  Args:
    size: rows and columns; large enough to keep all cores busy.
    repeats: timed runs, of which the best counts.
  """
  device = jax.local_devices()[0]
  matrix = jax.device_put(jnp.ones((size, size), jnp.float32), device)
  product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
  # Compiled ahead, so that no run pays for it. The best run counts, as other
  # processes of the machine only add time.
  best = float('inf')
  for _ in range(repeats + 1):  # The first run warms up.
    start = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2 * size**3 / best
