"""Attention backends on this device against the reference in float32.

    python -m tests.benchmarks.gpu_numerics --output=gpu_numerics.json

Results and gradients of every backend that runs here, for packed and padded
rows and every mask of a pair, at the head dimensions of the shipped models.
Errors are
relative to the largest value of the reference. A backend that refuses a call,
as one of tokamax does where tokamax is missing or too old, is recorded with
its reason; the exit status is 1 if an error is above its tolerance.
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
# Soft-caps of the models that have the head dimension.
SOFTCAPS = {256: 50.0}
ARRAYS = 'output', 'dq', 'dk', 'dv'


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compares and prints."""
  arguments = results.parser(
    __doc__,
    dtype='bfloat16',
    head_dims=[256, 128, 64],
    # Not a multiple of a block.
    length=1000,
    batch=2,
    heads=8,
    kv_heads=4,
    window=200,
    examples=3,
    padding=50,
  ).parse_args(argv)
  rows = []
  specs = gpu_kernels.make_masks(arguments, arguments.examples)
  for head_dim in arguments.head_dims:
    for mask, spec in specs.items():
      # The last queries are padding and see no key.
      segments = spec.q_segments.at[:, -arguments.padding :].set(0)
      spec = spec.replace(q_segments=segments, kv_segments=segments)
      for backend in backends():
        rows.append(_compare(backend, head_dim, mask, spec, arguments))
  return results.report('gpu_numerics', rows, arguments)


def backends() -> list[str]:
  """Returns the backends that run here, kernels first."""
  names = attention.on_platform(jax.default_backend())
  names.remove('reference')
  return sorted(names, key=lambda name: not attention.BACKENDS[name].kernels)


def _compare(backend, head_dim, mask, spec, arguments) -> dict[str, Any]:
  """Returns the errors of a backend, or why it refuses the call."""
  n, k = arguments.heads, arguments.kv_heads
  # Queries, keys, values and the cotangent.
  arrays = [
    jax.random.normal(
      jax.random.key(seed),
      (arguments.batch, arguments.length, heads, head_dim),
      arguments.dtype,
    )
    for seed, heads in enumerate((n, k, k, n))
  ]
  run = functools.partial(_run, spec=spec, softcap=SOFTCAPS.get(head_dim))
  row = {'backend': backend, 'mask': mask, 'head dim': head_dim}
  precision = 'highest' if arguments.dtype == 'float32' else None
  try:
    with jax.default_matmul_precision(precision):
      outputs = run(*arrays, backend=backend)
  except (ImportError, NotImplementedError, ValueError) as error:
    return row | {'refused': str(error)}
  arrays = [x.astype(jnp.float32) for x in arrays]
  with jax.default_matmul_precision('highest'):
    expected = run(*arrays, backend='reference')
  pairs = zip(ARRAYS, outputs, expected, strict=True)
  errors = {
    name: float(jnp.abs(x - y).max() / jnp.abs(y).max()) for name, x, y in pairs
  }
  # A comparison with nan is false.
  passed = all(e <= TOLERANCES[arguments.dtype] for e in errors.values())
  return row | errors | {'passed': passed}


@functools.partial(jax.jit, static_argnames=('softcap', 'backend'))
def _run(q, k, v, cotangent, *, spec, softcap, backend):
  """Returns the output of an attention and its gradients."""
  attend = functools.partial(
    attention.attention,
    spec=spec,
    scale=q.shape[-1] ** -0.5,
    softcap=softcap,
    backend=backend,
  )
  output, backward = jax.vjp(attend, q, k, v)
  return output, *backward(cotangent)


if __name__ == '__main__':
  rows = main()['rows']
  sys.exit(any(not row.get('passed', True) for row in rows))
