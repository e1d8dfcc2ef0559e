"""Device meshes with the axes `replica, fsdp, sequence, tensor`."""

from collections.abc import Sequence
import dataclasses
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
import numpy as np

from encdec_adapt.base import keys
from encdec_adapt.sharding import rules as rules_lib

AXES = ('replica', 'fsdp', 'sequence', 'tensor')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Keys of `config.mesh`: mesh axis sizes and sharding rules."""

  replica: int = keys.key(
    1, 'Copies of the parameters; their gradients are all-reduced.'
  )
  fsdp: int = keys.key(
    -1,
    'Shards of parameters, optimizer state and batch. One axis of the mesh'
    ' may be -1: the devices that remain.',
  )
  sequence: int = keys.key(1, 'Shards of the length of activations.')
  tensor: int = keys.key(1, 'Shards of heads, mlp and vocabulary.')
  rules: str = keys.key(
    'fsdp',
    "'fsdp'; 'fsdp_replica', which shards all but the tables over replica"
    " too; 'whole_slice', which shards the tables too; or 'data_parallel'."
    ' Tables are sharded over at most 64 devices.',
    one_of=tuple(rules_lib.RULES),
  )

  def __post_init__(self):
    keys.check(self, 'config.mesh.')

  def sizes(self, devices: int) -> tuple[int, ...]:
    """Returns the sizes of the four axes for a number of devices.

    Raises:
      ValueError: the product of the axes is not `devices`.
    """
    sizes = [getattr(self, axis) for axis in AXES]
    described = ', '.join(f'{axis}={getattr(self, axis)}' for axis in AXES)
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
      raise ValueError(
        f'mesh ({described}): sizes are at least 1, and at most one axis is'
        ' -1 (the remaining devices).'
      )
    fixed = math.prod(size for size in sizes if size != -1)
    if devices % fixed or (-1 not in sizes and fixed != devices):
      raise ValueError(
        f'mesh ({described}) does not multiply to the {devices} devices'
        ' present; change config.mesh so that it does, or set one axis to'
        ' -1.'
      )
    return tuple(devices // fixed if size == -1 else size for size in sizes)


def in_groups(devices: int, largest: int) -> MeshConfig:
  """Returns a mesh of replicated `fsdp` groups of limited size.

  Args:
    devices: number of devices, at least 1.
    largest: maximum devices per group, at least 1.
  """
  fsdp = max(n for n in range(1, largest + 1) if devices % n == 0)
  return MeshConfig(replica=devices // fsdp, fsdp=fsdp)


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Builds the mesh over `devices` (default: all).

  On TPU, an `fsdp` group is a box of the torus, and only `replica` spans
  several slices, because the network between slices is slow.

  Axis types are Auto, which sharding constraints need; `jax.make_mesh`
  defaults to Explicit.

  Raises:
    ValueError: see `MeshConfig.sizes`; or `replica` is not a multiple of the
      number of slices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = config.sizes(len(devices))
  return Mesh(
    _arranged(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
  )


def _arranged(sizes: tuple[int, ...], devices: Sequence[jax.Device]):
  if devices[0].platform != 'tpu':
    return np.array(devices).reshape(sizes)
  slices = len({getattr(d, 'slice_index', 0) for d in devices})
  if slices == 1:
    # Torus axes may be split between mesh axes; otherwise shapes such as
    # fsdp=8, tensor=2 on 4x4 chips would be refused.
    return mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
  if sizes[0] % slices:
    raise ValueError(
      f'config.mesh.replica is {sizes[0]} on {slices} slices; it must be a'
      ' multiple of them, so that parameters are sharded inside a slice.'
    )
  return mesh_utils.create_hybrid_device_mesh(
    (sizes[0] // slices, *sizes[1:]),
    (slices, 1, 1, 1),
    devices=devices,
    allow_split_physical_axes=True,
  )
