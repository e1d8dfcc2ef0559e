"""XLA compiler options and memory use, shared by jobs and plans.

TPU options were chosen by ahead-of-time compilation. GPU options follow the
vendors' guides (JAX, "GPU performance tips"; NVIDIA JAX Toolbox); multi-GPU
options have not been measured.
"""

import re

import jax
from jax.sharding import AbstractMesh, Mesh

_TPU = {
  # Size in MiB from which XLA replaces an all-gather and its matmul with a loop
  # of permutes and partial matmuls ("collective matmul"). Off, because plans
  # estimate these loops to be slower; see planner/README.md.
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'
}
# Without these, the v6e compiler runs all-gathers serially between matmuls.
# Compiled ahead of time for 2B-2B on v6e:4x4, a step exposes 2.3 s of gathers
# without these options and 0.7 s with them.
_V6E = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  'xla_tpu_overlap_compute_collective_tc': 'true',
}
# The latency-hiding scheduler, off by default, overlaps collectives with
# compute. Loop double buffering stays off: compiled for 2B-2B on 8 H100, it
# quadrupled a step's code and exposed as many bytes in each layer. The
# threshold (bytes of a shard) reduces gradients of about two weights at a time
# while the next are computed; by default, most of a layer's gradients are
# reduced at its end, with no compute left to hide them.
GPU = {
  'xla_gpu_enable_latency_hiding_scheduler': True,
  'xla_gpu_reduce_scatter_combine_threshold_bytes': 8_000_000,
}
# If a scan saves a kernel's result, XLA of jax 0.11 runs the kernel again
# inside the fusion that saves it: tokamax's forward kernels in 2B-2B.
_ANY_GPU = {}
if (0, 11) <= jax.__version_info__ < (0, 12):
  _ANY_GPU = {'xla_gpu_enable_dynamic_slice_fusion': False}
# Lets collectives of one layer overlap the next layer of a scan. XLA dropped
# these options in jax 0.11 and rejects unknown names.
if jax.__version_info__ < (0, 11):
  GPU |= {
    'xla_gpu_enable_pipelined_all_gather': True,
    'xla_gpu_enable_pipelined_all_reduce': True,
    'xla_gpu_enable_pipelined_reduce_scatter': True,
  }


def options(mesh: Mesh | AbstractMesh) -> dict[str, str | bool | int] | None:
  """Returns `compiler_options` of `jax.jit` for programs on a mesh.

  Returns None for an abstract mesh, for which nothing can be compiled, and for
  platforms other than TPU and GPU. A single GPU has nothing to overlap.
  """
  if isinstance(mesh, AbstractMesh):
    return None
  device = mesh.devices.flat[0]
  if device.platform == 'gpu':
    return _ANY_GPU | (GPU if mesh.size > 1 else {})
  if device.platform != 'tpu':
    return None
  return _TPU | (_V6E if device.device_kind == 'TPU v6 lite' else {})


# RESOURCE_EXHAUSTED alone may also be a network error.
_EXHAUSTED = re.compile(
  'Ran out of memory|RESOURCE_EXHAUSTED.*(out of memory|allocat|hbm)',
  re.IGNORECASE | re.DOTALL,
)
# Device memory only, not vmem or smem.
_NEEDED_SIZE = re.compile(
  r'(?:Used |temporaries \()(?P<number>[\d.]+)(?P<unit>[KMGT])'
  r'\)? (?:of [\d.]+[KMGT]? |exceeds available )hbm',
  re.IGNORECASE,
)


def needed_bytes(message: str) -> float | None:
  """Returns the bytes of device memory that a program needed, or None.

  Args:
    message: compiler error. Exhausted vmem or smem gives None: no plan reduces
      their use.
  """
  match = _NEEDED_SIZE.search(message)
  if not match:
    return None
  return float(match['number']) * 1024 ** ' KMGT'.index(match['unit'])


def ran_out_of_memory(message: str) -> bool:
  """Returns whether an error reports exhausted device memory."""
  return bool(needed_bytes(message) or _EXHAUSTED.search(message))


def device_bytes(program: jax.stages.Compiled) -> float:
  """Returns the bytes of arguments, outputs, code and temporaries."""
  sizes = program.memory_analysis()
  # Outputs that alias donated arguments are counted as arguments.
  results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  code = sizes.generated_code_size_in_bytes
  held = sizes.argument_size_in_bytes + results + code
  return float(held + sizes.temp_size_in_bytes)
