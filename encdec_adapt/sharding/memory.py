"""The memory of an array: its device's own, or the host's.

The only file that asks what memories a backend has, which differs between
backends and versions of JAX.
"""

from jax.sharding import Mesh, NamedSharding

# Memory of the host from which a device copies without a detour.
HOST = 'pinned_host'


def check_host(mesh: Mesh) -> None:
  """Refuses a mesh whose devices cannot read arrays from the host's memory.

  Raises:
    ValueError: names the platform and the memories that it has.
  """
  device = mesh.devices.flat[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ValueError(
      f'platform {device.platform!r} has no memory {HOST!r} in this version'
      f' of JAX, only {", ".join(kinds)}.'
    )


def on_host(sharding: NamedSharding) -> NamedSharding:
  """The same shards, each in the memory of its device's host."""
  return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
  """The same shards, each in its device's own memory."""
  device = sharding.mesh.devices.flat[0]
  return sharding.with_memory_kind(device.default_memory().kind)
