"""Attention backends on this device against the reference in float32.

    python -m tests.benchmarks.gpu_numerics --output=gpu_numerics.json

Results and gradients of every backend that runs here, for packed and padded
rows and every mask of a pair, at the head dimensions of the shipped models.
Errors are relative to the largest value of the reference. A backend that
refuses a call, as one of tokamax does where tokamax is missing or too old, is
recorded with its reason; the exit status is 1 if an error is above its
tolerance.
"""

from collections.abc import Sequence
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from encdec_adapt.ops import attention
from tests.benchmarks import gpu_kernels, results

# float32 is compared in full precision; products in bfloat16 round scores and
# their gradients to 8 bits.
TOLERANCES = {'float32': 1e-4, 'bfloat16': 2e-2}
SOFTCAPS = {256: (50.0, None)}  # Of the models with that head dimension.


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compares and prints."""
  # Lengths of some blocks, no multiples of them; the last queries see no key.
  sizes = dict(length=2100, window=200, batch=2, heads=8, kv_heads=4)
  arguments = results.parser(
    __doc__, dtype='bfloat16', head_dims=[256, 128, 64], padding=50, **sizes
  ).parse_args(argv)
  names = attention.on_platform(jax.default_backend())
  rows = []
  for head_dim in arguments.head_dims:
    for mask, spec in gpu_kernels.make_masks(arguments, examples=3).items():
      segments = spec.q_segments.at[:, -arguments.padding :].set(0)
      spec = spec.replace(q_segments=segments, kv_segments=segments)
      for softcap in SOFTCAPS.get(head_dim, (None,)):
        row = {'head dim': head_dim, 'mask': mask, 'soft-cap': softcap or ''}
        for name in names:
          if name != 'reference':
            errors = _compare(name, head_dim, softcap, spec, arguments)
            rows.append(row | {'backend': name} | errors)
  return results.report('gpu_numerics', rows, arguments)


def _compare(backend, head_dim, softcap, spec, arguments) -> dict[str, Any]:
  """Returns the errors of a backend, or why it refuses the call."""
  n, k = arguments.heads, arguments.kv_heads
  shape = arguments.batch, arguments.length, n + k + k + n, head_dim
  arrays = jax.random.normal(jax.random.key(0), shape, arguments.dtype)
  # Queries, keys, values, and the cotangent of the output.
  arrays = jnp.split(arrays, (n, n + k, n + k + k), axis=2)
  run = functools.partial(_run, spec=spec, softcap=softcap)
  precision = 'highest' if arguments.dtype == 'float32' else None
  try:
    with jax.default_matmul_precision(precision):
      outputs = run(*arrays, backend=backend)
  except jax.errors.JaxRuntimeError as error:
    return {'failed': str(error), 'passed': False}
  # A kernel for another jax may raise anything.
  except Exception as error:
    return {'refused': f'{type(error).__name__}: {error}'}
  with jax.default_matmul_precision('highest'):
    arrays = [x.astype(jnp.float32) for x in arrays]
    expected = run(*arrays, backend='reference')
  pairs = zip(('output', 'dq', 'dk', 'dv'), outputs, expected, strict=True)
  errors = {
    name: float(jnp.abs(x - y).max() / jnp.abs(y).max()) for name, x, y in pairs
  }
  # A comparison with nan is false.
  passed = all(e <= TOLERANCES[arguments.dtype] for e in errors.values())
  return errors | {'passed': passed}


# Not autotuned, which takes longer than all else.
@functools.partial(
  jax.jit,
  static_argnames=('softcap', 'backend'),
  compiler_options={'xla_gpu_autotune_level': 0},
)
def _run(q, k, v, cotangent, *, spec, softcap, backend):
  """Returns the output of an attention and its gradients."""
  options = dict(scale=q.shape[-1] ** -0.5, softcap=softcap, backend=backend)
  attend = functools.partial(attention.attention, spec=spec, **options)
  output, backward = jax.vjp(attend, q, k, v)
  return output, *backward(cotangent)


if __name__ == '__main__':
  rows = main()['rows']
  sys.exit(any(not row.get('passed', True) for row in rows))
