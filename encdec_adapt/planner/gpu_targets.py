"""GPU descriptions for XLA, to compile without a GPU.

Fields are those of XLA's `GpuTargetConfigProto`. a100, h100, h200 and b200 are
xla/backends/gpu/target_config/specs/{a100_sxm_80,h100_sxm,h200,b200}.txtpb of
openxla/xla at 4336d12e0706168f6a382ddb231f3a83853b0657 (h100 and b200 at
0774019d97e77dc433ce97604295f6fc0f5b3b65 and
300ec95ab85fa9f40af388054f7d43707407cb52). l4 is from NVIDIA's data sheet of L4
and the tables of compute capability 8.9 in the CUDA programming guide. This
module must not import jax.
"""

_SAME = (
  'threads_per_block_limit: 1024 threads_per_warp: 32'
  ' shared_memory_per_block: 49152 block_dim_limit_x: 2147483647'
  ' block_dim_limit_y: 65535 block_dim_limit_z: 65535'
  ' registers_per_core_limit: 65536 registers_per_block_limit: 65536'
)
_FIELDS = (
  'core_count fpus_per_core threads_per_core_limit shared_memory_per_core'
  ' shared_memory_per_block_optin l2_cache_size clock_rate_ghz'
  ' memory_bandwidth device_memory_size'
).split()
# Device name, compute capability, and `_FIELDS`.
_TARGETS = {
  'a100': (
    'NVIDIA A100-SXM4-80GB', (8, 0), 108, 64, 2048, 167936, 166912, 41943040,
    1.41, 2039040000000, 85100068864,
  ),
  'h100': (
    'NVIDIA H100 80GB HBM3', (9, 0), 132, 128, 2048, 233472, 232448, 52428800,
    1.98, 3352320000000, 84942979072,
  ),
  'h200': (
    'NVIDIA H200 141GB HBM3e', (9, 0), 132, 128, 2048, 233472, 232448,
    52428800, 1.98, 4800000000000, 151397597184,
  ),
  'b200': (
    'NVIDIA B200', (10, 0), 148, 128, 2048, 233472, 232448, 132644864, 1.965,
    7672320000000, 191514411008,
  ),
  'l4': (
    'NVIDIA L4', (8, 9), 58, 128, 1536, 102400, 101376, 50331648, 2.04,
    300000000000, 24000000000,
  ),
}  # fmt: skip
# CUDA and cuDNN versions of the compiler's wheels.
_RUNTIMES = {'cuda13': ((13, 0), (9, 14)), 'cuda12': ((12, 8), (9, 7))}


def text(chip: str, software: str) -> str:
  """Returns the description of a GPU as a text proto.

  Args:
    chip: name in `planner.chips`.
    software: the compiler's package, such as 'jax_cuda13_pjrt'.
  """
  device, (major, minor), *values = _TARGETS[chip]
  pairs = zip(_FIELDS, values, strict=True)
  fields = ' '.join(f'{field}: {value}' for field, value in pairs)
  # Instructions such as Hopper's wgmma need sm_90a, not sm_90.
  extension = ' feature_extension: ACCELERATED_FEATURES' if major >= 9 else ''
  cuda, dnn = next(v for name, v in _RUNTIMES.items() if name in software)
  return (
    f'gpu_device_info {{ {_SAME} {fields} cuda_compute_capability {{'
    f' major: {major} minor: {minor}{extension} }} }} platform_name: "CUDA"'
    f' runtime_version {{ major: {cuda[0]} minor: {cuda[1]} }} dnn_version_info'
    f' {{ major: {dnn[0]} minor: {dnn[1]} }} device_description_str: "{device}"'
  )
