"""Accelerators that can be planned for: what the vendors state of them.

Compute, memory and interconnect of TPUs are of Google Cloud's pages "TPU v4",
"TPU v5e", "TPU v5p" and "TPU v6e" (system architecture); of GPUs of NVIDIA's
data sheets (dense, without sparsity). Memory that a program can use is what
the TPU compiler allows it; of GPUs, nine tenths, as JAX preallocates more
than that only on request.
"""

from collections.abc import Sequence
import dataclasses
import importlib.util
import re

import jax

from encdec_adapt.cli import errors
from encdec_adapt.telemetry import peak_flops

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of accelerator.

  Attributes:
    name: as in a topology, such as 'v5e'.
    kind: 'tpu' or 'gpu'.
    flops: dense bf16 FLOP/s.
    hbm_bytes: memory that a program can use.
    hbm_bandwidth: bytes/s.
    clock: cycles/s of the compiler's estimates (TPU): peak FLOP/s over FLOPs
      a cycle of the matrix units.
    link_bandwidth: bytes/s that a chip sends into one dimension of the torus,
      both ways together (TPU), or to the other GPUs of a node (half of what
      is stated of NVLink, which counts what is received, too).
    network_bandwidth: bytes/s of one chip's share of the data-center network.
    host_bandwidth: bytes/s of one chip to its host's memory, or from there: of
      GPUs one direction of their PCI Express; Google states none, and 16 GB/s
      are our assumption.
    dimensions: of the torus.
    wraps_at: extent of a dimension from which it closes to a ring.
    host_chips: chips of one host.
    devices_as: libtpu's name of the configuration in which a chip is one
      device, where that is not what it has by default.
    cycle_share: share of the cycles estimated by the compiler that published
      training took, apart from kernels and collectives: set so that the
      estimates of those runs are right in the mean (`planning.calibration`);
      1 where none was published.
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
  cycle_share: float = 1.0


# A cycle of TPU v4, v5e and v5p does 2 * 128 * 128 FLOPs in each matrix unit,
# of which a chip has 8, 4 and 8; v6e 2 * 256 * 256 in each of 4 (2 on paper,
# each taking two passes): these reproduce the stated peaks.
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
      'a100', 'gpu', 312e12, 72 * _GIB, 2039e9, 300e9, 25e9,
      host_bandwidth=32e9,
    ),
    Chip(
      'h100', 'gpu', 989e12, 72 * _GIB, 3350e9, 450e9, 50e9,
      host_bandwidth=64e9,
    ),
    Chip(
      'h200', 'gpu', 989e12, 126 * _GIB, 4800e9, 450e9, 50e9,
      host_bandwidth=64e9,
    ),
  )
}  # fmt: skip


# Slices that are rented, by dimensions of the torus; libtpu takes others with
# even extents, too. Source: Cloud TPU documentation, "TPU versions".
SHAPES = {
  2: '1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16 and 16x16',
  3: (
    '2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x12, 8x8x16,'
    ' 8x16x16 and larger multiples of 4'
  ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Connected chips, some times over.

  Attributes:
    chip: of this kind.
    extents: of the torus, or the number of GPUs.
    count: number of slices, joined by the data-center network.
  """

  chip: Chip
  extents: tuple[int, ...]
  count: int = 1

  @property
  def name(self) -> str:
    """As it is written on the command line."""
    return f'{self.chip.name}:{"x".join(map(str, self.extents))}'

  @property
  def devices(self) -> int:
    """Chips of all slices."""
    total = self.count
    for extent in self.extents:
      total *= extent
    return total


def parse(topology: str, slices: int = 1) -> Slice:
  """Reads 'v5e:4x4', 'v5p:8x8x8', 'h100:64'.

  Raises:
    UserError: the chip is unknown, the extents are not of its torus, or
      there is no slice.
  """
  name, _, extents = topology.partition(':')
  chip = CHIPS.get(name)
  if chip is None:
    raise errors.UserError(
      f'topology={topology} is not known; it is CHIP:EXTENTS with one of'
      f' {", ".join(CHIPS)}, for example v5e:4x4, v5p:8x8x8 or h100:64.'
    )
  wanted = chip.dimensions or 1
  if not re.fullmatch('x'.join([r'0*[1-9]\d*'] * wanted), extents, re.ASCII):
    raise errors.UserError(
      f'topology={topology}: {chip.name} has {wanted} dimension(s), each of at'
      f' least 1 chip, such as {chip.name}:{"x".join(["4"] * wanted)}.'
    )
  if slices < 1:
    raise errors.UserError(
      f'topology={topology}: the number of slices is {slices}; it is at'
      ' least 1.'
    )
  return Slice(chip, tuple(int(n) for n in extents.split('x')), slices)


def slice_of(devices: Sequence[jax.Device]) -> Slice | None:
  """What a job runs on; None for devices that are not known.

  Args:
    devices: all of the job's.
  """
  kind = devices[0].device_kind
  names = (name for known, name, _ in peak_flops.KINDS if known in kind)
  name = next(names, None)
  if name is None:
    return None
  chip = CHIPS[name]
  if not chip.dimensions:
    return Slice(chip, (len(devices),))
  count = len({device.slice_index for device in devices})
  places = zip(*(device.coords for device in devices), strict=True)
  extents = [max(place) - min(place) + 1 for place in places]
  return Slice(chip, tuple(extents[: chip.dimensions]), count)


def devices_of(where: Slice) -> Sequence[jax.Device]:
  """Descriptions of a TPU slice's devices, without the hardware.

  Raises:
    UserError: libtpu is not installed, or knows no such slice.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise errors.UserError(
      'planning for a TPU needs its compiler, libtpu, which runs on any'
      f" machine: pip install 'jax[tpu]=={jax.__version__}'."
    )
  from jax.experimental import topologies  # Loads libtpu.

  options = {}
  if where.chip.devices_as:
    options['chip_config_name'] = where.chip.devices_as
  if set(where.extents) == {1}:
    options['chips_per_host_bounds'] = (1, 1, 1)
  try:
    found = topologies.get_topology_desc(
      platform='tpu',
      topology_name=where.name,
      num_slices=where.count,
      **options,
    ).devices
  except Exception as error:  # JAX raises what libtpu does, of many types.
    reason = str(error).strip().splitlines()
    raise errors.UserError(
      f'--topology={where.name} with {where.count} slice(s) cannot be built:'
      f' {reason[0] if reason else type(error).__name__}. Slices of'
      f' {where.chip.name} are {SHAPES[where.chip.dimensions]}.'
    ) from error
  if len(found) != where.devices:
    raise errors.UserError(
      f'--topology={where.name} with {where.count} slice(s) is'
      f' {where.devices} chips, and libtpu makes {len(found)} devices of it;'
      ' memory and speed are known of whole chips. Take another topology.'
    )
  return found
