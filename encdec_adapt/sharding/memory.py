"""Memory kinds of arrays: device or host.

No other module queries memory kinds, which differ between backends and JAX
versions.
"""

from jax.sharding import Mesh, NamedSharding

# Page-locked host memory, directly accessible to devices.
HOST = 'pinned_host'


def check_host(mesh: Mesh) -> None:
  """Checks that devices can read arrays in host memory.

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
  """Returns the same sharding with host memory."""
  return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
  """Returns the same sharding with device memory."""
  # The kind is 'device' on accelerators and differs on CPUs.
  device = sharding.mesh.devices.flat[0]
  return sharding.with_memory_kind(device.default_memory().kind)
