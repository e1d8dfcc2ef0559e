"""Roofline estimate of a step from its FLOPs, memory traffic and collectives.

XLA:TPU reports cycles for everything but kernels and collectives; they are
scaled by `chips.Chip.cycle_share`. `timeline` computes the time on GPUs.
Kernels take their FLOPs at a share of the peak, collectives their bytes over
the bandwidth of the links. A collective overlapped by XLA:TPU costs only the
excess over the other work of its computation; other collectives and host
transfers are fully exposed. `calibration` lists the errors of such estimates.
This module must not import the analytic model, which uses it.
"""

import collections
from collections.abc import Iterable, Sequence
import itertools
import math
import re
from typing import Any

from jax.sharding import Mesh
import numpy as np

from encdec_adapt.planner import chips, hlo, programs

# Share of peak FLOP/s of splash attention on long rows with head dimensions of
# 128 and 256: an assumption, not a measurement.
KERNEL_EFFICIENCY = 0.5
# Shares of a GPU's peak FLOP/s and memory bandwidth reached by matmuls and
# memory traffic; fitted to published runs with
# `tests.benchmarks.calibration --fit`.
GPU_PRODUCTS = 0.72
GPU_MEMORY = 0.8
# Shares of peak FLOP/s of tokamax's kernels, forward and backward, by head
# dimension. From its authors' timings of 4096-token rows on H100 (tokamax
# 0.0.17, data/autotuning/nvidia_h100_80gb_hbm3), averaged over causal and full
# attention. No kernel computes gradients for 256 (`ops.attention_gradients`).
_GPU_KERNELS = {64: (0.47, 0.46), 128: (0.63, 0.63), 256: (0.65,)}
Row = dict[str, Any]


def describe(
  job: programs.Job,
  hardware: chips.Slice,
  products: float,
  kernels: Sequence[Row],
  traffic: Sequence[Row],
  compute: float,
  moved: float,
  host: float,
) -> dict[str, Any]:
  """Returns the entries of a plan for work and time.

  Args:
    job: the program and its mesh.
    hardware: chips of the mesh.
    products: per-device FLOPs of matmuls, without kernels.
    kernels: kernels with their per-device `flops` and `seconds`.
    traffic: collectives with their `seconds`, and the `exposed` (not
      overlapped) part of these.
    compute: seconds of everything but kernels and collectives.
    moved: bytes of arguments that a device reads and writes.
    host: bytes copied between host and device; not overlapped.

  Returns:
    JSON with `flops`, `collectives`, `kernels`, `roofline` (seconds by cause;
    `memory_s` is a lower bound) and `mfu`.
  """
  chip, model = hardware.chip, job.flops() / job.mesh.size
  in_kernels = sum(row['seconds'] for row in kernels)
  exposed = sum(row['exposed'] for row in traffic)
  memory, copied = moved / chip.hbm_bandwidth, host / chip.host_bandwidth
  # Reads of arguments overlap with compute, so the longer counts; host
  # transfers do not overlap and are added.
  step = max(compute + in_kernels + exposed, memory) + copied
  return {
    'flops': {
      'products': products,
      'kernels': sum(row['flops'] for row in kernels),
      'model': model,
    },
    'collectives': traffic,
    'kernels': kernels,
    'roofline': {
      'compute_s': compute,
      'kernels_s': in_kernels,
      'collectives_s': sum(row['seconds'] for row in traffic),
      'exposed_s': exposed,
      'memory_s': memory,
      'host_s': copied,
      'step_s': step,
    },
    'mfu': model / chip.flops / step,
  }


def kernel_row(
  name: str, calls: int, flops: float, hardware: chips.Slice, head_dim: int
) -> Row:
  """Returns `name`, `calls`, `flops` and `seconds` of a kernel."""
  share = KERNEL_EFFICIENCY
  if hardware.chip.kind == 'gpu':
    size = min(n for n in _GPU_KERNELS if n >= min(head_dim, 256))
    share = _GPU_KERNELS[size]['_d' in name]
  seconds = flops / hardware.chip.flops / share
  return {'name': name, 'calls': calls, 'flops': flops, 'seconds': seconds}


def compute_seconds(
  totals: hlo.Totals, hardware: chips.Slice
) -> dict[str, float]:
  """Returns seconds per computation, without kernels and collectives."""
  # The compiler overestimates cycles on most chips; see `Chip.cycle_share`.
  clock = hardware.chip.clock / hardware.chip.cycle_share
  return {name: cycles / clock for name, cycles in totals.cycles.items()}


def collectives(
  totals: hlo.Totals, mesh: Mesh, hardware: chips.Slice, kernels: float
) -> list[Row]:
  """Returns a compiled program's collectives by kind and mesh axes.

  Args:
    totals: totals of the program.
    mesh: mesh of the compiled program.
    hardware: chips of the mesh.
    kernels: seconds of all kernels.

  Returns:
    Rows, longest first: `kind`; `axes`, joined by '+' (for a permutation the
    axes along which data moves; 'slices' across slices); `count`, runs per
    step; `bytes` sent per device; `seconds` at link bandwidth; `exposed`
    seconds, not overlapped with other work.
  """
  network = Network(mesh, hardware)
  busy = collections.Counter(compute_seconds(totals, hardware))
  # Only the total of the kernels' seconds is known; calls share it equally.
  calls = sum(kernel.times for kernel in totals.kernels)
  for kernel in totals.kernels:
    busy[kernel.computation] += kernels * kernel.times / calls
  timed = [(c, *network.cost(c)) for c in totals.collectives.values()]
  # Overlapped collectives of a computation compete for the same work, which
  # hides an equal share of each.
  overlapped = collections.Counter()
  for collective, _, _, seconds in timed:
    if collective.overlapped:
      overlapped[collective.computation] += collective.times * seconds
  entries = []
  for collective, axes, sent, seconds in timed:
    share = 1.0
    if collective.overlapped and seconds:
      computation = collective.computation
      share = max(0.0, 1 - busy[computation] / overlapped[computation])
    exposed = share * seconds * collective.times
    entries.append((collective, axes, sent, seconds, exposed))
  return rows_of(entries)


def rows_of(
  entries: Iterable[tuple[hlo.Collective, str, float, float, float]],
) -> list[Row]:
  """Aggregates collectives by kind and mesh axes, as in `collectives`.

  Args:
    entries: collective, axes, bytes sent per device and seconds of a single
      run, exposed seconds of all runs.
  """
  rows: dict[tuple[str, str], Row] = {}
  for collective, axes, sent, seconds, exposed in entries:
    row = rows.setdefault(
      (collective.kind, axes),
      {'kind': collective.kind, 'axes': axes}
      | dict.fromkeys(('count', 'bytes', 'seconds', 'exposed'), 0),
    )
    row['count'] += collective.times
    row['bytes'] += sent * collective.times
    row['seconds'] += seconds * collective.times
    row['exposed'] += exposed
  return sorted(rows.values(), key=lambda row: -row['seconds'])


class Network:
  """Links between groups of devices, and their bandwidth."""

  def __init__(self, mesh: Mesh, hardware: chips.Slice):
    self.mesh, self.hardware = mesh, hardware
    self.devices = list(mesh.devices.flat)
    slices = [getattr(device, 'slice_index', 0) for device in self.devices]
    # A compiled program covers a single slice and numbers its devices from 0.
    # Data crosses slices among `peers`, one device per slice.
    self.slice = np.flatnonzero(np.equal(slices, slices[0]))
    self.peers = np.unique(slices, return_index=True)[1]
    numbers = {position: i for i, position in enumerate(self.slice)}
    self.axes: dict[frozenset, str] = {}
    names = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    # Fewest axes first: an axis across slices adds no devices of this slice.
    for count in range(1, len(names) + 1):
      for axes in itertools.combinations(names, count):
        groups = [
          [numbers[position] for position in group if position in numbers]
          for group in self._groups(axes)
        ]
        self.axes.setdefault(_as_sets(groups), '+'.join(axes))

  def _groups(self, axes: Sequence[str]) -> np.ndarray:
    """Returns device positions along mesh axes: [groups, size]."""
    return _grouped(self.mesh.devices.shape, self.mesh.axis_names, axes)

  def cost(self, collective: hlo.Collective) -> tuple[str, float, float]:
    """Returns axes, bytes sent per device, and seconds of a single run.

    Raises:
      UnknownProgramError: the replica groups have an unknown form.
    """
    kind, size = collective.kind, collective.bytes
    if collective.groups == hlo.SLICES:
      # `size` is the operand: a single slice's part of the gathered array.
      parts = len(self.peers) if kind == 'all-gather' else 1
      return hlo.SLICES, *self._send(kind, size * parts, self.peers)
    ids = replica_groups(collective.groups, len(self.slice))
    if kind == 'collective-permute':
      return self._permute(size, self.slice[ids])
    count = ids.shape[1]
    if count == 1:
      return 'one device', 0.0, 0.0
    axes = self.axes.get(_as_sets(ids), f'{count} devices')
    # All groups are alike on a mesh, so the first group represents them.
    return axes, *self._send(kind, size, self.slice[ids[0]])

  def _permute(
    self, size: float, pairs: np.ndarray
  ) -> tuple[str, float, float]:
    """Returns the cost of a collective permute.

    Args:
      size: bytes sent per device.
      pairs: positions of source and target devices: [pairs, 2].
    """
    indices = np.unravel_index(pairs, self.mesh.devices.shape)
    moved = [
      name
      for name, index in zip(self.mesh.axis_names, indices, strict=True)
      if (index[:, 0] != index[:, 1]).any()
    ]
    # All pairs send at once: the slowest determines the time.
    rates = [self._bandwidth(pair) for pair in pairs if pair[0] != pair[1]]
    seconds = size / min(rates) if rates else 0.0
    return '+'.join(moved) or 'one device', size, seconds

  def cost_along(
    self, axes: Sequence[str], kind: str, size: float
  ) -> tuple[float, float]:
    """Returns bytes sent per device over mesh axes, and seconds.

    Args:
      axes: names of mesh axes.
      kind: kind of collective, such as 'all-gather'.
      size: bytes of the unsharded array.
    """
    return self._send(kind, size, self._groups(axes)[0])

  def _send(
    self, kind: str, size: float, group: Sequence[int]
  ) -> tuple[float, float]:
    """Returns bytes sent per device of a group, and seconds."""
    count = len(group)
    if count == 1:
      return 0.0, 0.0
    # In a ring each device sends all parts but one. An all-reduce is a
    # reduce-scatter and an all-gather.
    sent = size * (count - 1) / count * (2 if kind == 'all-reduce' else 1)
    return sent, sent / self._bandwidth(group)

  def _bandwidth(self, group: Sequence[int]) -> float:
    """Returns the send bandwidth of each device in a group, bytes/s."""
    chip, members = self.hardware.chip, [self.devices[i] for i in group]
    if len({getattr(d, 'slice_index', 0) for d in members}) > 1:
      return chip.network_bandwidth
    if chip.kind == 'gpu':
      nodes = collections.Counter(d.id // chip.host_chips for d in members)
      if len(nodes) == 1:
        return chip.link_bandwidth
      # All members of a node receive parts, and exchange them over NVLink.
      shared = min(nodes.values()) * chip.network_bandwidth
      return min(shared, chip.link_bandwidth)
    coordinates = np.array([d.coords for d in members])
    total = 0.0
    for axis, extent in enumerate(self.hardware.extents):
      positions = np.unique(coordinates[:, axis])
      if len(positions) > 1:
        # Devices in between belong to other groups, which share the links.
        spacing = int(np.diff(positions).max())
        # Wraparound links exist only from some extent on, and close a ring only
        # for a group that spans the torus. The ends of an open line send in one
        # direction, which halves the bandwidth of all.
        closed = extent >= chip.wraps_at and extent % 4 == 0
        ring = closed and len(positions) * spacing == extent
        total += chip.link_bandwidth * (1.0 if ring else 0.5) / spacing
    # The two halves of a TPU7x chip: "six times a 1D ICI link" (vendor).
    return total or 6 * chip.link_bandwidth


def _as_sets(groups: Iterable[Sequence[int]]) -> frozenset[frozenset[int]]:
  return frozenset(frozenset(group) for group in groups if len(group))


def _grouped(
  shape: Sequence[int], names: Sequence[str], chosen: Sequence[str]
) -> np.ndarray:
  """Returns device indices grouped along axes: [groups, size].

  Args:
    shape: size of each axis.
    names: name of each axis.
    chosen: axes of a group, outermost first.
  """
  inner = [list(names).index(name) for name in chosen]
  ids = np.arange(math.prod(shape)).reshape(shape)
  size = math.prod(shape[axis] for axis in inner)
  return np.moveaxis(ids, inner, range(-len(inner), 0)).reshape(-1, size)


def replica_groups(text: str, devices: int) -> np.ndarray:
  """Parses replica groups into device indices: [groups, size].

  Args:
    text: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`,
      `mesh['a'=2,'b'=2] {'a'}` or `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0))
      {'a'}`; empty for a single group of all devices.
    devices: number of devices.

  Raises:
    UnknownProgramError: the text has another form.
  """
  if not text or text == '{}':
    return np.arange(devices)[None]
  if text.startswith('{{'):
    groups = re.findall(r'\{([\d,]+)\}', text)
    return np.array([[int(n) for n in g.split(',')] for g in groups])
  if text.startswith('mesh['):
    sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", text)}
    chosen = re.findall(r"'(\w+)'", text[text.index(']') :])
    groups = _grouped(tuple(sizes.values()), tuple(sizes), chosen)
    # The device order of the mesh, unless it is the identity.
    order = re.search(r'device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)', text)
    if order:
      groups = _transposed(devices, *order.groups()).ravel()[groups]
    return groups
  match = re.fullmatch(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if not match:
    raise hlo.UnknownProgramError(f'replica groups {text!r} are not understood')
  shape, dims, order = match.groups()
  return _transposed(devices, dims, order).reshape(_integers(shape))


def _transposed(devices: int, dims: str, order: str | None) -> np.ndarray:
  """Returns the device indices as an array of shape `dims`, transposed.

  Args:
    devices: number of devices, the product of `dims`.
    dims: shape before the transpose, such as '4,2'.
    order: permutation of dimensions, such as '1,0'; None for none.
  """
  ids = np.arange(devices).reshape(_integers(dims))
  return ids.transpose(_integers(order)) if order else ids


def _integers(text: str) -> list[int]:
  return [int(n) for n in text.split(',')]
