"""Flags of XLA in tests; the one place that asks which jaxlib is there."""

from importlib import metadata


def cpu(devices: int) -> str:
  """Flags for fake CPU devices and for programs that compile fast.

  The tests run tiny models, and most of their time is compiling: without
  LLVM's optimisations, and where jaxlib still has a choice (before 0.11),
  without the emitters of fusions, which take a third of it.
  """
  flags = [
    f'--xla_force_host_platform_device_count={devices}',
    '--xla_backend_optimization_level=0',
    '--xla_cpu_parallel_codegen_split_count=1',
    # XLA ends a process whose devices wait for each other for 40 s, as eight of
    # them may on two busy cores.
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
  ]
  major, minor = metadata.version('jaxlib').split('.')[:2]
  if (int(major), int(minor)) < (0, 11):
    flags.append('--xla_cpu_use_fusion_emitters=false')
  return ' '.join(flags)
