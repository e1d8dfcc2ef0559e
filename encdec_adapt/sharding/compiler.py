"""XLA's compiler: options and memory, the same for jobs and for plans.

TPU options were chosen by compiling ahead of time, GPU options follow the
vendors' guides (JAX, "GPU performance tips"; NVIDIA JAX Toolbox). Those of
several GPUs have not been measured.
"""

import re

import jax
from jax.sharding import AbstractMesh, Mesh

_TPU = {
  # MiB from which XLA replaces a gather and its product with a loop of
  # permutations and partial products ("collective matmul"). Off, because
  # plans estimate those loops to be slower; see planner/README.md.
  'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'
}
# Without these, the compiler of v6e runs gathers one after another between the
# products. Compiled ahead of time for 2B-2B on v6e:4x4, 2.3 s of a step's
# gathers were exposed without them and 0.7 s with them.
_V6E = {
  'xla_enable_async_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion': 'true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
  'xla_tpu_overlap_compute_collective_tc': 'true',
}
# The scheduler, off by default, overlaps collectives with other work. Double
# buffering of loops is left off: compiled for 2B-2B on 8 H100, a step was four
# times as much code, with as many bytes exposed in each layer. The threshold,
# of bytes of a shard, sums gradients of two or so weights at a time while the
# next are computed; by default most of a layer's are summed at its end, with
# nothing left to hide them.
GPU = {
  'xla_gpu_enable_latency_hiding_scheduler': True,
  'xla_gpu_reduce_scatter_combine_threshold_bytes': 8_000_000,
}
# XLA of jax 0.11 runs a kernel whose result a scan saves a second time, inside
# the fusion that saves it: tokamax's forward kernels of 2B-2B.
_ANY_GPU = {}
if (0, 11) <= jax.__version_info__ < (0, 12):
  _ANY_GPU = {'xla_gpu_enable_dynamic_slice_fusion': False}
# Lets collectives of one layer overlap the next layer of a scan. XLA has no
# such options since jax 0.11 and refuses names that it does not know.
if jax.__version_info__ < (0, 11):
  GPU |= {
    'xla_gpu_enable_pipelined_all_gather': True,
    'xla_gpu_enable_pipelined_all_reduce': True,
    'xla_gpu_enable_pipelined_reduce_scatter': True,
  }


def options(mesh: Mesh | AbstractMesh) -> dict[str, str | bool | int] | None:
  """Returns `compiler_options` of `jax.jit` for programs on a mesh.

  One GPU has nothing to overlap. None for other platforms, and for an abstract
  mesh, which nothing can be compiled for.
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
  """Returns bytes of device memory that the compiler needed, or None.

  Args:
    message: error of the compiler. A lack of vmem or smem gives None: no plan
      reduces what a program needs of those.
  """
  match = _NEEDED_SIZE.search(message)
  if not match:
    return None
  return float(match['number']) * 1024 ** ' KMGT'.index(match['unit'])


def ran_out_of_memory(message: str) -> bool:
  """Returns whether an error says that device memory was short."""
  return bool(needed_bytes(message) or _EXHAUSTED.search(message))


def device_bytes(program: jax.stages.Compiled) -> float:
  """Returns bytes of arguments, results, code and temporary arrays."""
  sizes = program.memory_analysis()
  # Results that reuse the memory of donated arguments are counted with these.
  results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  code = sizes.generated_code_size_in_bytes
  held = sizes.argument_size_in_bytes + results + code
  return float(held + sizes.temp_size_in_bytes)
