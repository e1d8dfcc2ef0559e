"""Options of XLA: a plan compiles with those that training runs with."""

from jax.sharding import AbstractMesh, Mesh

_TPU = {
  # No collective matrix products: a plan's totals would miscount the loops
  # that they are cut into.
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000',
}
# A v6e's compiler gathers one array after the other between the products unless
# it is told to fuse a gather into them. Measured ahead of time on 2B-2B,
# v6e:4x4 (python -m encdec_adapt.plan): 2.3 s of a step's gathers exposed
# without these, 0.7 s with them.
_V6E = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  'xla_tpu_overlap_compute_collective_tc': 'true',
}


def options(mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
  """For `jax.jit(compiler_options=)` of a program that runs on a mesh.

  None where nothing is asked of the compiler, or no device is there to compile
  for.
  """
  if isinstance(mesh, AbstractMesh):
    return None
  device = mesh.devices.flat[0]
  if device.platform != 'tpu':
    return None
  return _TPU | (_V6E if device.device_kind == 'TPU v6 lite' else {})
