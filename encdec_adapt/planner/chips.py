"""Supported target accelerators, with vendor specifications.

Compute, memory and interconnect of TPUs are from Google Cloud's pages "TPU v4",
"TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)", of GPUs from NVIDIA's
data sheets (dense, without sparsity; L4 has PCI Express instead of NVLink).
Usable memory is the TPU compiler's limit per program; for GPUs nine tenths, the
fraction that the launchers give JAX. This module must not import jobs or
models.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import importlib.metadata
import math
import os

import jax
import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.planner import gpu_targets
from encdec_adapt.telemetry import peak_flops

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of accelerator; all numbers are per JAX device.

  Attributes:
    name: name in a topology, such as 'v5e'.
    kind: 'tpu' or 'gpu'.
    flops: peak dense bf16 FLOP/s.
    hbm_bytes: memory available to a program.
    hbm_bandwidth: bytes/s.
    link_bandwidth: bytes/s sent along a torus dimension, both directions
      together (TPU), or to the other GPUs of a node (half of the NVLink
      figure, which includes received bytes).
    network_bandwidth: bytes/s of a device's share of the data-center network.
    clock: cycles/s of the compiler's estimates (TPU): peak FLOP/s over FLOPs
      per cycle of the matrix units.
    dimensions: number of torus dimensions.
    wraps_at: minimum extent of a torus dimension with wraparound links.
    host_chips: chips per host.
    host_bandwidth: bytes/s to or from host memory: one direction of PCI Express
      for GPUs; an assumption for TPUs, which specify none.
    devices_as: libtpu's configuration name for a single device per chip, unless
      that is the default.
    chip_devices: devices per chip.
    cycle_share: ratio of published step times to the compiler's cycles,
      without kernels and collectives, fitted to the runs of
      `planner.calibration`; 1 without a published speed.
  """

  name: str
  kind: str
  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float
  clock: float = 0.0
  dimensions: int = 0
  wraps_at: int = 0
  host_chips: int = 8
  host_bandwidth: float = 16e9
  devices_as: str = ''
  chip_devices: int = 1
  cycle_share: float = 1.0


# A matrix unit of TPU v4, v5e and v5p does 2 * 128 * 128 FLOPs per cycle; a
# chip has 8, 4 and 8 of them. v6e counts as 4 units of 2 * 256 * 256 (2 on
# paper, with two passes each). These reproduce the specified peaks.
CHIPS = {
  chip.name: chip
  for chip in (
    Chip(
      'v4', 'tpu', 275e12, 30.75 * _GIB, 1228e9, 100e9, 6.25e9,
      clock=1.05e9, dimensions=3, wraps_at=4, host_chips=4,
      devices_as='megacore',
    ),
    Chip(
      'v5e', 'tpu', 197e12, 15.75 * _GIB, 819e9, 100e9, 3.125e9,
      clock=1.5e9, dimensions=2, wraps_at=16, host_chips=4, cycle_share=0.81,
    ),
    Chip(
      'v5p', 'tpu', 459e12, 95.74 * _GIB, 2765e9, 200e9, 6.25e9,
      clock=1.75e9, dimensions=3, wraps_at=4, host_chips=4, cycle_share=0.82,
    ),
    Chip(
      'v6e', 'tpu', 918e12, 31.25 * _GIB, 1640e9, 200e9, 12.5e9,
      clock=1.75e9, dimensions=2, wraps_at=16, host_chips=4, cycle_share=0.75,
    ),
    Chip(
      'tpu7x', 'tpu', 2307e12 / 2, 94.75 * _GIB, 7380e9 / 2, 200e9 / 2,
      12.5e9 / 2, clock=2.2e9, dimensions=3, wraps_at=4, host_chips=4,
      host_bandwidth=8e9, chip_devices=2,
    ),
    Chip('a100', 'gpu', 312e12, 72 * _GIB, 2039e9, 300e9, 25e9,
         host_bandwidth=32e9),
    Chip('h100', 'gpu', 989e12, 72 * _GIB, 3350e9, 450e9, 50e9,
         host_bandwidth=64e9),
    Chip('h200', 'gpu', 989e12, 126 * _GIB, 4800e9, 450e9, 50e9,
         host_bandwidth=64e9),
    Chip('b200', 'gpu', 2250e12, 160 * _GIB, 7672e9, 900e9, 50e9,
         host_bandwidth=64e9),
    Chip('l4', 'gpu', 121e12, 20 * _GIB, 300e9, 32e9, 1.5625e9,
         host_bandwidth=32e9),
  )
}  # fmt: skip


# Available slices by number of torus dimensions; libtpu also accepts others
# with even extents. Source: Cloud TPU documentation, "TPU versions".
SHAPES = {
  2: '1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16 and 16x16',
  3: (
    '2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x12, 8x8x16,'
    ' 8x16x16 and larger multiples of 4'
  ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Slices of connected chips.

  Attributes:
    chip: the kind of chip.
    extents: chips along each torus dimension, or the number of GPUs.
    count: number of slices, connected by the data-center network.
  """

  chip: Chip
  extents: tuple[int, ...]
  count: int = 1

  @property
  def name(self) -> str:
    """The topology, in command-line form."""
    return f'{self.chip.name}:{"x".join(map(str, self.extents))}'

  @property
  def chips(self) -> int:
    """Number of chips in all slices."""
    return math.prod(self.extents) * self.count

  @property
  def devices(self) -> int:
    """Number of devices in all slices."""
    return self.chips * self.chip.chip_devices


def parse(topology: str, slices: int = 1, hbm_gib: float = 0.0) -> Slice:
  """Parses a topology such as v5e:4x4, v5p:8x8x8 or h100:64.

  Args:
    topology: chip and extents.
    slices: number of slices, at least 1.
    hbm_gib: memory limit of a program, in GiB; 0 for the chip's. Capped at the
      chip's memory on TPUs.

  Raises:
    UserError: the chip is unknown, or the extents do not match it.
  """
  part = option_strings.Part('the topology', topology)
  name, dimensions = part.partition(':')
  chip = CHIPS.get(name.text)
  if chip is None:
    raise name.error(
      f'must be one of {", ".join(CHIPS)}, as in v5e:4x4, v5p:8x8x8 or h100:64.'
      ' State another one in planner/chips.py, and a GPU in'
      ' planner/gpu_targets.py too.'
    )
  extents, count = dimensions.divide('x'), chip.dimensions or 1
  if len(extents) != count or not dimensions:
    raise dimensions.error(
      f'must have {count} dimension(s), as in {name.text}:'
      f'{"x".join(["4"] * count)}.'
    )
  if hbm_gib:
    memory = hbm_gib * _GIB
    if chip.kind == 'tpu':
      memory = min(memory, chip.hbm_bytes)
    chip = dataclasses.replace(chip, hbm_bytes=memory)
  sizes = [
    extent.read(int, 'at least 1 chip', lambda n: n > 0) for extent in extents
  ]
  host = chip.host_chips
  if chip.kind == 'gpu' and sizes[0] > host and sizes[0] % host:
    raise dimensions.error(f'must be at most {host}, a host, or whole hosts.')
  return Slice(chip, tuple(sizes), slices)


def slice_of(devices: Sequence[jax.Device]) -> Slice | None:
  """Returns the slices of a job's devices; None for unknown devices.

  Args:
    devices: all devices of the job.
  """
  kind = devices[0].device_kind
  # The first match counts: 'TPU v5 lite' contains 'TPU v5' too.
  names = (name for text, name, _ in peak_flops.KINDS if text in kind)
  chip = CHIPS.get(next(names, None))
  if chip is None:
    return None
  if not chip.dimensions:
    return Slice(chip, (len(devices),))
  count = len({device.slice_index for device in devices})
  # JAX reports three coordinates on a 2D torus as well, and a slice of a larger
  # torus need not start at 0.
  axes = zip(*(device.coords for device in devices), strict=True)
  extents = [max(axis) - min(axis) + 1 for axis in axes]
  return Slice(chip, tuple(extents[: chip.dimensions]), count)


def compiler(kind: str) -> str | None:
  """Returns name and version of the installed 'tpu' or 'gpu' compiler."""
  gpu = 'jax_cuda13_pjrt', 'jax_cuda12_pjrt'
  for name in ('libtpu',) if kind == 'tpu' else gpu:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      return f'{name} {importlib.metadata.version(name)}'
  return None


def devices_of(hardware: Slice) -> Sequence[jax.Device]:
  """Returns abstract devices, or CPU stand-ins for GPUs without a compiler.

  The first call must be for the largest number of devices, before any other
  initialisation of JAX's backends.

  Raises:
    UserError: libtpu is not installed, or does not support the slice.
  """
  # Otherwise JAX asks for a GPU driver if a GPU plugin is installed.
  jax.config.update('jax_platforms', 'cpu')
  software = compiler(hardware.chip.kind)
  if hardware.chip.kind == 'gpu' and software:
    return _gpus(hardware, software)
  if hardware.chip.kind == 'gpu':
    if jax.config.jax_num_cpu_devices < hardware.devices:
      # JAX rejects the option after initialisation; then the existing devices
      # are used, as in tests (eight).
      with contextlib.suppress(RuntimeError):
        jax.config.update('jax_num_cpu_devices', hardware.devices)
    return np.array(jax.devices()[: hardware.devices])
  if software is None:
    raise errors.UserError(
      'planning for a TPU needs its compiler, libtpu, which runs on any'
      f" machine: pip install 'jax[tpu]=={jax.__version__}'."
    )
  # The compiler needs no TPU: it may run alongside another process with libtpu,
  # and need not wait for a metadata server, which only TPU VMs have.
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  # Imported late: this loads libtpu, which reads the variables above.
  from jax.experimental import topologies

  options = {}
  if hardware.chip.devices_as:
    options['chip_config_name'] = hardware.chip.devices_as
  # libtpu 0.0.42 rejects a single-chip slice without the host's bounds.
  if set(hardware.extents) == {1}:
    options['chips_per_host_bounds'] = (1, 1, 1)
  try:
    topology = topologies.get_topology_desc(
      hardware.name, 'tpu', num_slices=hardware.count, **options
    )
  except Exception as error:  # JAX raises libtpu's errors, of many types.
    reason = str(error).strip().splitlines()
    raise errors.UserError(
      f'--topology={hardware.name} with {hardware.count} slice(s) cannot be'
      f' built: {reason[0] if reason else type(error).__name__}. Slices of'
      f' {hardware.chip.name} are {SHAPES[hardware.chip.dimensions]}.'
    ) from error
  return topology.devices


def _gpus(hardware: Slice, software: str) -> Sequence[jax.Device]:
  # Imported late: this imports JAX's plugins.
  from jax.experimental import topologies

  # A cached program would lack the resource usage of its kernels.
  jax.config.update('jax_enable_compilation_cache', False)
  (count,) = hardware.extents
  hosts = -(-count // hardware.chip.host_chips)
  return topologies.get_topology_desc(
    platform='cuda',
    target_config=gpu_targets.text(hardware.chip.name, software),
    topology=f'{hardware.count}x{hosts}x{count // hosts}',
  ).devices
