"""Options of XLA: a plan compiles with those that training runs with."""

from jax.sharding import AbstractMesh, Mesh

_TPU = {
  # No collective matrix products: a plan's totals would miscount the loops
  # that they are cut into.
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000',
}


def options(mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
  """For `jax.jit(compiler_options=)` of a program that runs on a mesh.

  None where nothing is asked of the compiler, or no device is there to compile
  for.
  """
  if isinstance(mesh, AbstractMesh):
    return None
  return dict(_TPU) if mesh.devices.flat[0].platform == 'tpu' else None
