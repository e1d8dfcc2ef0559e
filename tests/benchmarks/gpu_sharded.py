"""A training step on all devices of a machine against the same on one.

    python -m tests.benchmarks.gpu_sharded --devices=8

A small pair, sharded over all devices and on the first alone, in processes of
their own: the losses of the first steps, which depend on all gradients, differ
by rounding. `--backends` are attention backends; those with kernels run in
bfloat16, the others in float32. The exit status is 1 if losses differ.
"""

from collections.abc import Sequence
import sys
from typing import Any

from encdec_adapt.ops import attention
from tests.benchmarks import results, training_step

# Relative difference of losses.
TOLERANCES = {'float32': 1e-5, 'bfloat16': 1e-2}
_FULL_PRECISION = {'JAX_DEFAULT_MATMUL_PRECISION': 'highest'}
_FIRST_DEVICE = {'CUDA_VISIBLE_DEVICES': '0', 'JAX_NUM_CPU_DEVICES': '1'}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compares and prints."""
  arguments, model = results.parser(
    __doc__, backends=['chunked'], devices=2, steps=4
  ).parse_known_args(argv)
  rows = [_compare(name, model, arguments) for name in arguments.backends]
  return results.report('gpu_sharded', rows, arguments)


def _compare(backend: str, model: list[str], arguments) -> dict[str, Any]:
  """Returns the largest difference of losses with a backend."""
  kernels = attention.BACKENDS[backend].kernels
  dtype = 'bfloat16' if kernels else 'float32'
  losses = []
  for devices in ({}, _FIRST_DEVICE):
    worker = training_step.Worker(
      'ours',
      dtype,
      [f'--attention={backend}', '--batch_size=16', '--examples=2', *model],
      {**({} if kernels else _FULL_PRECISION), **devices},
    )
    losses.append([worker.step()['loss'] for _ in range(arguments.steps)])
    worker.close()
  error = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
  return {
    'backend': backend,
    'dtype': dtype,
    'devices': arguments.devices,
    'loss, last': losses[0][-1],
    'error': error,
    'passed': error <= TOLERANCES[dtype],
  }


if __name__ == '__main__':
  sys.exit(not all(row['passed'] for row in main()['rows']))
