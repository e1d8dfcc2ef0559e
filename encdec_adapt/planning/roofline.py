"""Roofline estimate of a step from its FLOPs, memory traffic and collectives.

The compiler states cycles for everything but kernels and collectives, which
are scaled by `chips.Chip.cycle_share`. Kernels are added by their FLOPs at
`KERNEL_EFFICIENCY`, collectives by bytes over the links they cross. A
collective that the compiler overlaps costs only what exceeds the other work of
its computation; other collectives, and copies from and to the host's memory,
cost all of their time. `calibration` has the errors of such estimates.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import re

from jax.sharding import Mesh
import numpy as np

from encdec_adapt.planning import chips, hlo

# Share of the peak that splash attention reaches on long rows with head
# dimensions of 128 and 256: an assumption, not a measurement.
KERNEL_EFFICIENCY = 0.5


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Sum of all collectives of one kind over the same mesh axes.

  Attributes:
    kind: kind, such as 'all-gather'.
    axes: mesh axes, joined by '+'; for a permutation those along which data
      moves; 'slices' for data that leaves a slice.
    count: number of runs in a step.
    bytes: bytes that one device sends in a step.
    seconds: time at the bandwidth of the links.
    exposed: seconds that no other work hides.
  """

  kind: str
  axes: str
  count: int
  bytes: float
  seconds: float
  exposed: float


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A step's time, in seconds.

  Attributes:
    compute: time of everything that the compiler has an estimate for.
    kernels: time of Pallas kernels.
    collectives: time of all collectives, hidden or not.
    exposed: time of collectives that is not hidden.
    memory: time to read and write the arguments; a lower limit.
    host: time of copies from and to the host's memory; not hidden.
    traffic: collectives by kind and axes.
  """

  compute: float
  kernels: float
  collectives: float
  exposed: float
  memory: float
  host: float
  traffic: tuple[Traffic, ...]

  @property
  def step(self) -> float:
    """Seconds of a step, all included."""
    inside = max(self.compute + self.kernels + self.exposed, self.memory)
    return inside + self.host


def estimate(
  totals: hlo.Totals,
  mesh: Mesh,
  where: chips.Slice,
  kernel_flops: float,
  moved: float,
  host: float,
) -> Estimate:
  """Estimates the time of a step.

  Args:
    totals: totals of the compiled program.
    mesh: mesh that it was compiled for.
    where: chips of the mesh.
    kernel_flops: FLOPs of all kernels on one device.
    moved: bytes of the arguments that one device reads and writes.
    host: bytes copied from the host's memory and back.
  """
  chip = where.chip
  kernels = kernel_flops / (chip.flops * KERNEL_EFFICIENCY)
  clock = chip.clock / chip.cycle_share
  compute = sum(totals.cycles.values()) / clock
  network = Network(mesh, where)
  busy = {name: cycles / clock for name, cycles in totals.cycles.items()}
  calls = sum(k.times for k in totals.kernels)
  for kernel in totals.kernels:
    share = kernels * kernel.times / calls
    busy[kernel.computation] = busy.get(kernel.computation, 0.0) + share
  overlapped: dict[str, float] = {}
  timed = []
  for one in totals.collectives.values():
    axes, sent, seconds = network.cost(one)
    timed.append((one, axes, sent * one.times, seconds * one.times))
    if one.overlapped:
      name = one.computation
      overlapped[name] = overlapped.get(name, 0.0) + seconds * one.times
  exposed = {
    name: max(0.0, seconds - busy.get(name, 0.0)) / seconds if seconds else 0.0
    for name, seconds in overlapped.items()
  }
  traffic = _summed(timed, exposed)
  return Estimate(
    compute=compute,
    kernels=kernels,
    collectives=sum(t.seconds for t in traffic),
    exposed=sum(t.exposed for t in traffic),
    memory=moved / chip.hbm_bandwidth,
    host=host / chip.host_bandwidth,
    traffic=traffic,
  )


def _summed(
  timed: Sequence[tuple[hlo.Collective, str, float, float]],
  exposed: Mapping[str, float],
) -> tuple[Traffic, ...]:
  """Sums collectives by kind and axes, the longest first."""
  rows: dict[tuple[str, str], list[float]] = {}
  for one, axes, sent, seconds in timed:
    row = rows.setdefault((one.kind, axes), [0, 0.0, 0.0, 0.0])
    share = exposed[one.computation] if one.overlapped else 1.0
    for i, value in enumerate((one.times, sent, seconds, share * seconds)):
      row[i] += value
  found = [Traffic(*key, *row) for key, row in rows.items()]
  return tuple(sorted(found, key=lambda t: -t.seconds))


class Network:
  """Links that groups of devices communicate over, and their speed."""

  def __init__(self, mesh: Mesh, where: chips.Slice):
    self.mesh, self.where = mesh, where
    self.devices = list(mesh.devices.flat)
    by_slice: dict[int, list[int]] = {}
    for index, device in enumerate(self.devices):
      key = getattr(device, 'slice_index', 0)
      by_slice.setdefault(key, []).append(index)
    # A compiled program is that of one slice: its devices, and one per slice.
    self.inside = next(iter(by_slice.values()))
    self.across = [members[0] for members in by_slice.values()]
    self.groups: dict[frozenset, str] = {}
    for groups, axes in _mesh_groups(mesh, self.inside):
      self.groups.setdefault(groups, axes)

  def cost(self, one: hlo.Collective) -> tuple[str, float, float]:
    """Returns axes, bytes that a device sends, and seconds of one run.

    Raises:
      UnknownProgramError: the replica groups are written in an unknown form.
    """
    if one.kind == 'collective-permute':
      pairs = replica_groups(one.groups, len(self.inside))
      return self._moved_along(pairs), one.bytes, self._moved(one.bytes, pairs)
    if one.groups == hlo.SLICES:
      parts = len(self.across) if one.kind == 'all-gather' else 1
      size = one.bytes * parts
      return hlo.SLICES, *self._exchange(one.kind, size, self.across)
    ids = replica_groups(one.groups, len(self.inside))
    size = ids.shape[1]
    if size == 1:
      return 'one device', 0.0, 0.0
    key = frozenset(frozenset(map(int, group)) for group in ids)
    axes = self.groups.get(key, f'{size} devices')
    members = [self.inside[i] for i in ids[0]]
    return axes, *self._exchange(one.kind, one.bytes, members)

  def _moved_along(self, pairs: np.ndarray) -> str:
    """Returns mesh axes in which the devices of pairs [pairs, 2] differ."""
    places = np.unravel_index(
      np.array(self.inside)[pairs], self.mesh.devices.shape
    )
    moved = [
      name
      for name, place in zip(self.mesh.axis_names, places, strict=True)
      if (place[:, 0] != place[:, 1]).any()
    ]
    return '+'.join(moved) or 'one device'

  def _moved(self, size: float, pairs: np.ndarray) -> float:
    """Returns the seconds that the slowest pair of devices takes to send."""
    rates = [
      self._bandwidth([self.devices[self.inside[i]] for i in pair])
      for pair in pairs
      if pair[0] != pair[1]
    ]
    return size / min(rates) if rates else 0.0

  def along(
    self, axes: Sequence[str], kind: str, size: float
  ) -> tuple[float, float]:
    """Returns bytes that a device sends over mesh axes, and seconds.

    Args:
      axes: names of mesh axes.
      kind: kind of collective, such as 'all-gather'.
      size: bytes of the unsharded array.
    """
    names = self.mesh.axis_names
    axes = [a for a in axes if self.mesh.shape[a] > 1]
    if not axes:
      return 0.0, 0.0
    ids = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
    first = tuple(slice(None) if name in axes else 0 for name in names)
    return self._exchange(kind, size, ids[first].ravel())

  def _exchange(
    self, kind: str, size: float, ids: Sequence[int]
  ) -> tuple[float, float]:
    count = len(ids)
    sent = size * (count - 1) / count * (2 if kind == 'all-reduce' else 1)
    return sent, sent / self._bandwidth([self.devices[i] for i in ids])

  def _bandwidth(self, members) -> float:
    """Returns bytes/s that each of some devices can send to the others."""
    chip = self.where.chip
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


def _mesh_groups(mesh: Mesh, inside: Sequence[int]):
  """Yields groups of a slice's devices along each set of mesh axes, and names.

  A device's number is its index in `inside`, which has positions in the mesh.
  """
  numbers = {position: number for number, position in enumerate(inside)}
  names = [a for a in mesh.axis_names if mesh.shape[a] > 1]
  ids = np.arange(mesh.size).reshape(mesh.devices.shape)
  for count in range(1, len(names) + 1):
    for chosen in itertools.combinations(names, count):
      inner = [mesh.axis_names.index(name) for name in chosen]
      outer = [i for i in range(ids.ndim) if i not in inner]
      size = math.prod(mesh.shape[name] for name in chosen)
      groups = ids.transpose(outer + inner).reshape(-1, size)
      mine = {
        frozenset(numbers[int(i)] for i in group if i in numbers)
        for group in groups
      }
      yield frozenset(mine - {frozenset()}), '+'.join(chosen)


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
    names = list(sizes)
    inner = [names.index(name) for name in chosen]
    outer = [i for i in range(len(names)) if i not in inner]
    ids = np.arange(devices).reshape(list(sizes.values()))
    size = math.prod(sizes[name] for name in chosen)
    return ids.transpose(outer + inner).reshape(-1, size)
  found = re.fullmatch(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if not found:
    raise hlo.UnknownProgramError(f'replica groups {text!r} are not understood')
  shape, dims, order = (
    [int(n) for n in part.split(',')] if part else None
    for part in found.groups()
  )
  ids = np.arange(devices).reshape(dims)
  return (ids.transpose(order) if order else ids).reshape(shape)
