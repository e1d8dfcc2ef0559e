"""Memory kinds of arrays: the device's memory, or the host's.

The only module that queries memory kinds, which differ between backends and
versions of JAX.
"""

from jax.sharding import Mesh, NamedSharding

# Page-locked host memory, which devices copy from directly.
HOST = 'pinned_host'


def check_host(mesh: Mesh) -> None:
  """Raises an error if devices cannot read arrays in the host's memory.

  Raises:
    ValueError: the platform has no such memory.
  """
  device = mesh.devices.flat[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ValueError(
      f'platform {device.platform!r} has no memory {HOST!r} in this version'
      f' of JAX, only {", ".join(kinds)}.'
    )


def on_host(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in the memory of the devices' hosts."""
  return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding in the devices' memory."""
  # The kind is 'device' on accelerators and differs on CPUs.
  device = sharding.mesh.devices.flat[0]
  return sharding.with_memory_kind(device.default_memory().kind)
