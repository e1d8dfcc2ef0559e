"""Decoding and prefill of a pair on one accelerator, against its limits.

    python -m tests.benchmarks.gpu_generation --output=gpu_generation.json

The 2B-2B pair in bf16 with random weights and prompts of `--prompt` tokens. A
decoding step reads the decoder's weights and every row's caches: `of bandwidth`
is the time that these bytes take at the chip's memory bandwidth over the time
of a step. `kernels a step` counts kernels and copies on the GPU in a profile.
`MFU` of a prefill counts the encoder and the keys and values of the
encoding by `models.forward_flops`. `--int8` keeps kernels as 8-bit integers.
"""

from collections.abc import Callable, Sequence
import functools
import pathlib
import tempfile
import time
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.inference import decoding
from encdec_adapt.inference import engine as engine_lib
from encdec_adapt.models import execution, forward_flops, presets
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import setup
from tests.benchmarks import gpu_kernels, results

_PROFILED = 8  # Steps.


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    pair='2b_2b',
    rows=[1, 8, 64],
    prompt=1024,
    tokens=256,
    steps=64,
    dtype='bfloat16',
    int8=False,
  ).parse_args(argv)
  where = setup.place_model(
    presets.t5gemma(arguments.pair),
    execution.ComputeConfig(dtype=arguments.dtype).on('cpu'),
    mesh_lib.make_mesh(mesh_lib.MeshConfig(), devices=jax.devices()[:1]),
    rules_lib.RULES['fsdp'],
  )
  params = where.place(
    lambda key: jax.tree.map(
      lambda x: x.astype(arguments.dtype), where.model.init(key)
    ),
    jax.random.key(0),
  )
  rows = [_measure(where, params, n, arguments) for n in arguments.rows]
  return results.report('gpu_generation', rows, arguments)


def _measure(
  where: Any, params: Any, rows: int, arguments: Any
) -> dict[str, Any]:
  """Measures one number of rows."""
  engine = engine_lib.Engine(
    where.model,
    params,
    engine_lib.SpecialIds(2, (-1,), 0),
    rows=rows,
    mesh=where.mesh,
    rules=where.rules,
    int8=arguments.int8,
  )
  prompt = np.full(arguments.prompt, 7, np.int32)
  requests = [engine_lib.Request(prompt, arguments.tokens)] * rows

  def prefill() -> decoding.State:
    """Reads all prompts."""
    given = engine.prefill_arguments(requests, rows)
    return jax.block_until_ready(engine.programs.run(decoding.prefill, *given))

  def decode(state: decoding.State, steps: int) -> decoding.State:
    """Generates tokens for all rows."""
    eos = jnp.array([-1], jnp.int32)
    wake, count = np.int32(rows + 1), np.int32(steps)
    return jax.block_until_ready(
      engine.programs.run(
        decoding.decode, engine.params, state, eos, wake, count
      )
    )

  state = decode(prefill(), 1)  # Compiles both.
  start = time.perf_counter()
  state = decode(state, arguments.steps)
  step = (time.perf_counter() - start) / arguments.steps
  leaves = jax.tree.leaves((engine.params['decoder'], state.cache))
  moved = sum(leaf.nbytes for leaf in leaves)
  kernels = _kernels(functools.partial(decode, state, _PROFILED))
  del state
  start = time.perf_counter()
  prefill()
  reading = time.perf_counter() - start
  peak, bandwidth = gpu_kernels.ceilings()
  flops, _ = forward_flops.generation(where.model.config, arguments.prompt, 1)
  return {
    'rows': rows,
    'ms a step': 1000 * step,
    'tokens/s': rows / step,
    'GB read': moved / 1e9,
    'of bandwidth': moved / bandwidth / step,
    'kernels a step': kernels / _PROFILED,
    'prefill ms': 1000 * reading,
    'prefill MFU': rows * flops / reading / peak,
  }


def _kernels(run: Callable[[], Any]) -> int:
  """Returns how many kernels and copies a call runs on GPUs."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    profile = jax.profiler.ProfileData.from_file(str(path))
    return sum(
      len(list(line.events))
      for plane in profile.planes
      if plane.name.startswith('/device:GPU')
      for line in plane.lines
      if line.name.startswith('Stream')
    )


if __name__ == '__main__':
  main()
