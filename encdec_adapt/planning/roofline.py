"""Roofline estimate of a step from its FLOPs, memory traffic and collectives.

The compiler states cycles for everything but kernels and collectives, which
are scaled by `chips.Chip.cycle_share`. Kernels are added by their FLOPs at
`KERNEL_EFFICIENCY`, collectives by bytes over the links they cross. A
collective that the compiler overlaps costs only what exceeds the other work of
its computation; other collectives, and copies from and to the host's memory,
cost all of their time. `calibration` has the errors of such estimates.
"""

import collections
from collections.abc import Iterable, Sequence
import itertools
import math
import re
from typing import Any

from jax.sharding import Mesh
import numpy as np

from encdec_adapt.planning import chips, hlo, programs

# Share of the peak that splash attention reaches on long rows with head
# dimensions of 128 and 256: an assumption, not a measurement.
KERNEL_EFFICIENCY = 0.5
Row = dict[str, Any]


def describe(
  job: programs.Job,
  where: chips.Slice,
  products: float,
  kernels: Sequence[Row],
  traffic: Sequence[Row],
  compute: float,
  moved: float,
  host: float,
) -> dict[str, Any]:
  """Returns the parts of a plan that are about work and time.

  Args:
    job: the program and its mesh.
    where: chips of the mesh.
    products: FLOPs of products on one device, without kernels.
    kernels: kernels with their `flops` and `seconds` on one device.
    traffic: collectives with their `seconds`, and `exposed` ones, which no
      other work hides.
    compute: seconds of everything but kernels and collectives.
    moved: bytes of the arguments that one device reads and writes.
    host: bytes copied from the host's memory and back; not hidden.

  Returns:
    JSON with `flops`, `collectives`, `kernels`, `roofline` (seconds by cause,
    of which `memory_s` is a lower limit) and `mfu`.
  """
  chip, model = where.chip, job.flops() / job.mesh.size
  in_kernels = sum(row['seconds'] for row in kernels)
  exposed = sum(row['exposed'] for row in traffic)
  memory, copied = moved / chip.hbm_bandwidth, host / chip.host_bandwidth
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


def kernel_row(name: str, calls: int, flops: float, where: chips.Slice) -> Row:
  """Returns `name`, `calls`, `flops` and `seconds` of a kernel."""
  seconds = flops / where.chip.flops / KERNEL_EFFICIENCY
  return {'name': name, 'calls': calls, 'flops': flops, 'seconds': seconds}


def compute_seconds(totals: hlo.Totals, where: chips.Slice) -> dict[str, float]:
  """Returns seconds of each computation, without kernels and collectives."""
  clock = where.chip.clock / where.chip.cycle_share
  return {name: cycles / clock for name, cycles in totals.cycles.items()}


def collectives(
  totals: hlo.Totals, mesh: Mesh, where: chips.Slice, kernels: float
) -> list[Row]:
  """Returns a compiled program's collectives by kind and mesh axes.

  Args:
    totals: totals of the program.
    mesh: mesh that it was compiled for.
    where: chips of the mesh.
    kernels: seconds of all kernels.

  Returns:
    The longest first: `kind`; `axes`, joined by '+' (for a permutation those
    along which data moves, 'slices' for data that leaves a slice); number of
    runs in a step; bytes that one device sends; `seconds` at the bandwidth of
    the links; and `exposed` ones of these, which no other work hides.
  """
  network = Network(mesh, where)
  busy = collections.Counter(compute_seconds(totals, where))
  calls = sum(kernel.times for kernel in totals.kernels)
  for kernel in totals.kernels:
    busy[kernel.computation] += kernels * kernel.times / calls
  timed = [(one, *network.cost(one)) for one in totals.collectives.values()]
  overlapped = collections.Counter()
  for one, _, _, seconds in timed:
    overlapped[one.computation] += one.overlapped * one.times * seconds
  rows: dict[tuple[str, str], Row] = {}
  for one, axes, sent, seconds in timed:
    share = 1.0
    if one.overlapped and seconds:
      whole = overlapped[one.computation]
      share = max(0.0, 1 - busy[one.computation] / whole)
    row = rows.setdefault(
      (one.kind, axes),
      {'kind': one.kind, 'axes': axes}
      | dict.fromkeys(('count', 'bytes', 'seconds', 'exposed'), 0),
    )
    row['count'] += one.times
    row['bytes'] += sent * one.times
    row['seconds'] += seconds * one.times
    row['exposed'] += share * seconds * one.times
  return sorted(rows.values(), key=lambda row: -row['seconds'])


class Network:
  """Links that groups of devices communicate over, and their speed."""

  def __init__(self, mesh: Mesh, where: chips.Slice):
    self.mesh, self.where = mesh, where
    self.devices = list(mesh.devices.flat)
    slices = [getattr(device, 'slice_index', 0) for device in self.devices]
    # A compiled program is that of one slice: its devices, and one per slice.
    self.inside = np.flatnonzero(np.equal(slices, slices[0]))
    self.across = np.unique(slices, return_index=True)[1]
    self.axes: dict[frozenset, str] = {}
    names = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    numbers = {position: i for i, position in enumerate(self.inside)}
    for count in range(1, len(names) + 1):
      for axes in itertools.combinations(names, count):
        groups = [
          [numbers[position] for position in group if position in numbers]
          for group in self._groups(axes)
        ]
        self.axes.setdefault(_as_sets(groups), '+'.join(axes))

  def _groups(self, axes: Sequence[str]) -> np.ndarray:
    """Returns positions of the devices along mesh axes: [groups, size]."""
    return _grouped(self.mesh.devices.shape, self.mesh.axis_names, axes)

  def cost(self, one: hlo.Collective) -> tuple[str, float, float]:
    """Returns axes, bytes that a device sends, and seconds of one run.

    Raises:
      UnknownProgramError: the replica groups are written in an unknown form.
    """
    if one.groups == hlo.SLICES:
      parts = len(self.across) if one.kind == 'all-gather' else 1
      return hlo.SLICES, *self._send(one.kind, one.bytes * parts, self.across)
    ids = replica_groups(one.groups, len(self.inside))
    if one.kind == 'collective-permute':
      return self._permute(one.bytes, self.inside[ids])
    size = ids.shape[1]
    if size == 1:
      return 'one device', 0.0, 0.0
    axes = self.axes.get(_as_sets(ids), f'{size} devices')
    return axes, *self._send(one.kind, one.bytes, self.inside[ids[0]])

  def _permute(
    self, size: float, pairs: np.ndarray
  ) -> tuple[str, float, float]:
    """Returns the cost of sending from the first of each pair to the second.

    Args:
      size: bytes that a device sends.
      pairs: positions of the devices: [pairs, 2].
    """
    places = np.unravel_index(pairs, self.mesh.devices.shape)
    moved = [
      name
      for name, place in zip(self.mesh.axis_names, places, strict=True)
      if (place[:, 0] != place[:, 1]).any()
    ]
    rates = [self._bandwidth(pair) for pair in pairs if pair[0] != pair[1]]
    seconds = size / min(rates) if rates else 0.0
    return '+'.join(moved) or 'one device', size, seconds

  def along(
    self, axes: Sequence[str], kind: str, size: float
  ) -> tuple[float, float]:
    """Returns bytes that a device sends over mesh axes, and seconds.

    Args:
      axes: names of mesh axes.
      kind: kind of collective, such as 'all-gather'.
      size: bytes of the unsharded array.
    """
    return self._send(kind, size, self._groups(axes)[0])

  def _send(
    self, kind: str, size: float, group: Sequence[int]
  ) -> tuple[float, float]:
    """Returns bytes that each device of a group sends, and seconds."""
    count = len(group)
    if count == 1:
      return 0.0, 0.0
    sent = size * (count - 1) / count * (2 if kind == 'all-reduce' else 1)
    return sent, sent / self._bandwidth(group)

  def _bandwidth(self, group: Sequence[int]) -> float:
    """Returns bytes/s that each device of a group can send to the others."""
    chip, members = self.where.chip, [self.devices[i] for i in group]
    if len({getattr(d, 'slice_index', 0) for d in members}) > 1:
      return chip.network_bandwidth
    if chip.kind == 'gpu':
      nodes = {device.id // chip.host_chips for device in members}
      return chip.network_bandwidth if len(nodes) > 1 else chip.link_bandwidth
    coordinates = np.array([d.coords for d in members])
    total = 0.0
    for axis, extent in enumerate(self.where.extents):
      places = np.unique(coordinates[:, axis])
      if len(places) > 1:
        # Devices between them are of other groups and share the links.
        apart = int(np.diff(places).max())
        closed = extent >= chip.wraps_at and extent % 4 == 0
        ring = closed and len(places) * apart == extent
        total += chip.link_bandwidth * (1.0 if ring else 0.5) / apart
    # The two halves of a TPU7x chip: "six times a 1D ICI link" (vendor).
    return total or 6 * chip.link_bandwidth


def _as_sets(groups: Iterable[Sequence[int]]) -> frozenset[frozenset[int]]:
  """Returns groups of devices without their order; empty ones are left out."""
  return frozenset(frozenset(group) for group in groups if len(group))


def _grouped(
  shape: Sequence[int], names: Sequence[str], chosen: Sequence[str]
) -> np.ndarray:
  """Returns the numbers of the devices along some axes: [groups, size].

  Args:
    shape: size of each axis.
    names: name of each axis.
    chosen: axes along which the devices of a group lie, the outermost first.
  """
  inner = [list(names).index(name) for name in chosen]
  ids = np.arange(math.prod(shape)).reshape(shape)
  size = math.prod(shape[axis] for axis in inner)
  return np.moveaxis(ids, inner, range(-len(inner), 0)).reshape(-1, size)


def replica_groups(text: str, devices: int) -> np.ndarray:
  """Returns the device numbers of every group: [groups, size].

  Args:
    text: `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)` or
      `mesh['a'=2,'b'=2] {'a'}`; empty means one group of all.
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
    return _grouped(tuple(sizes.values()), tuple(sizes), chosen)
  found = re.fullmatch(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if not found:
    raise hlo.UnknownProgramError(f'replica groups {text!r} are not understood')
  shape, dims, order = (
    [int(n) for n in part.split(',')] if part else None
    for part in found.groups()
  )
  ids = np.arange(devices).reshape(dims)
  return ids.transpose(order or range(len(dims))).reshape(shape)
