"""Attention and the vocabulary loss alone, against their rooflines.

    python -m tests.benchmarks.gpu_kernels --output=gpu_kernels.json

The attentions of Gemma 2 2B, forward and with their backward pass, packed and
not, by every backend; and the loss with its gradient. FLOPs are model FLOPs:
of pairs of positions inside the mask and window (packing does not change the
number, so kernels that skip other examples' keys may pass the roofline),
three passes for training; bytes are those of the arguments, results
and cotangents, once. The roofline is the longer of FLOPs at the device's
dense bf16 peak and bytes at its memory's bandwidth.

Attention that XLA computes, whole or its gradients, is measured with each loop
of `ops.attention_tiles`. 'turns' are those of a loop over all rows, 'with work'
those that compute: with `while` XLA:GPU waits on the host for each turn and
once more a row, with `cond` for each turn.
"""

from collections.abc import Callable, Sequence
import functools
import statistics
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.models import forward_flops
from encdec_adapt.ops import (
  attention,
  attention_gradients,
  attention_tiles,
  attention_tokamax,
  masks,
  vocabulary_loss,
)
from encdec_adapt.planner import chips
from encdec_adapt.telemetry import peak_flops
from tests.benchmarks import results


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    batch=4,
    length=4096,
    window=4096,
    heads=8,
    kv_heads=4,
    head_dim=256,
    width=2304,
    vocab_size=256_000,
    loss_chunk=1024,
    steps=10,
    backends=['tokamax', 'chunked'],
    loops=['while', 'cond'],
    examples=[1, 8],
    dtype='bfloat16',
  ).parse_args(argv)
  rows = []
  for examples in arguments.examples:
    for backend in arguments.backends:
      for mask, spec in make_masks(arguments, examples).items():
        size = _tile(backend, arguments.head_dim)
        for loop in arguments.loops if size else ['']:
          turns = _turns(spec, size, loop)
          with mock.patch.object(attention_tiles, 'LOOP', loop):
            attentions = _attention(backend, mask, spec, examples, arguments)
          rows += [row | turns for row in attentions]
  rows.append(_loss(arguments))
  return results.report('gpu_kernels', rows, arguments)


def make_masks(arguments, examples: int) -> dict[str, masks.MaskSpec]:
  """Returns the masks of a pair, by name, for rows of equal examples."""
  length = arguments.length
  index = np.arange(length)
  size = -(-length // examples)
  shape = arguments.batch, length
  segments, positions = (
    jnp.asarray(np.broadcast_to(x, shape), jnp.int32)
    for x in (1 + index // size, index % size)
  )
  tokens = {'segments': segments, 'positions': positions, 'aligned': True}
  window = {'window': arguments.window}
  return {
    'causal': masks.causal(**tokens),
    'causal window': masks.causal(**tokens, **window),
    'full': masks.bidirectional(**tokens),
    'full exclusive window': masks.bidirectional(**tokens, **window),
    'cross': masks.cross(segments, segments),
  }


def _tile(backend: str, head_dim: int) -> int:
  """Returns the size of tiles; 0 for a backend of kernels alone."""
  if backend == 'chunked':
    return attention.DEFAULT_CHUNK
  by_xla = head_dim > attention_tokamax.KERNEL_HEAD_DIM
  return attention_gradients.SIZE if backend == 'tokamax' and by_xla else 0


def _turns(spec: masks.MaskSpec, size: int, loop: str) -> dict[str, Any]:
  """Returns the turns of a loop over the pairs of tiles of all rows."""
  if not size:
    return {}
  work = attention_tiles.Tiling(size, 1.0, None).work(spec)
  count = int(jnp.sum(work))
  turns = count if loop == 'while' else work.size
  return {'loop': loop, 'turns': turns, 'with work': count}


def _attention(backend, mask, spec, examples, arguments):
  """Measures one attention, forward and with its backward pass."""
  batch, length, head_dim = (
    arguments.batch,
    arguments.length,
    arguments.head_dim,
  )
  heads = arguments.heads, arguments.kv_heads, arguments.kv_heads
  keys = jax.random.split(jax.random.key(0), 3)
  arrays = [
    jax.random.normal(key, (batch, length, n, head_dim), arguments.dtype)
    for key, n in zip(keys, heads, strict=True)
  ]
  attend = functools.partial(
    attention.attention, scale=head_dim**-0.5, softcap=50.0, backend=backend
  )

  def loss(q, k, v, spec):
    return jnp.sum(attend(q, k, v, spec).astype(jnp.float32))

  pairs = forward_flops.visible_pairs(
    length, causal=spec.kind == 'causal', window=spec.window
  )
  work = batch * 4 * arguments.heads * head_dim * pairs
  size = sum(x.nbytes for x in arrays) + arrays[0].nbytes
  what = {'kernel': f'attention, {mask}', 'backend': backend}
  return [
    what
    | {'examples': examples, 'passes': passes}
    | _timed(
      jax.jit(run), (*arrays, spec), factor * work, size * factor, arguments
    )
    for passes, run, factor in (
      ('forward', attend, 1),
      ('both', jax.grad(loss, (0, 1, 2)), forward_flops.TRAINING),
    )
  ]


def _loss(arguments) -> dict[str, Any]:
  """Measures the vocabulary loss with its gradient."""
  tokens, width = arguments.batch * arguments.length, arguments.width
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (1, tokens, width), arguments.dtype)
  table = jax.random.normal(keys[1], (arguments.vocab_size, width))
  targets = jax.random.randint(keys[2], (1, tokens), 0, arguments.vocab_size)

  @jax.jit
  def run(hidden, table, targets):
    def loss(hidden, table):
      return vocabulary_loss.cross_entropy(
        hidden,
        table,
        targets,
        jnp.ones(targets.shape),
        vocab_size=arguments.vocab_size,
        softcap=30.0,
        chunk=arguments.loss_chunk,
      ).total

    return jax.grad(loss, (0, 1))(hidden, table)

  forward = forward_flops.vocabulary(width, arguments.vocab_size, tokens)
  work = forward_flops.TRAINING * forward
  size = 2 * (hidden.nbytes + table.nbytes)
  what = {'kernel': 'vocabulary loss', 'backend': 'xla'}
  return (
    what
    | {'examples': 1, 'passes': 'both'}
    | _timed(run, (hidden, table, targets), work, size, arguments)
  )


def _timed(
  run: Callable[..., Any], operands, work: float, size: float, arguments
) -> dict[str, float]:
  """Returns the median time and its share of the roofline."""
  call = functools.partial(
    results.seconds, lambda: jax.block_until_ready(run(*operands))
  )
  seconds = results.take_turns({'': call}, arguments.steps)['']
  middle, (peak, bandwidth) = statistics.median(seconds[1:]), ceilings()
  limit = float(np.fmax(work / peak, size / bandwidth))
  return {
    'ms': 1e3 * middle,
    'TFLOP/s': work / middle / 1e12,
    'roofline ms': 1e3 * limit,
    'of roofline': limit / middle,
  }


@functools.cache
def ceilings() -> tuple[float, float]:
  """Returns FLOP/s and bytes/s of the device; nan where unknown."""
  device = jax.devices()[0]
  kind = device.device_kind.lower()
  bandwidth = next(
    (c.hbm_bandwidth for c in chips.CHIPS.values() if c.name in kind),
    float('nan'),
  )
  return peak_flops.peak([device]) or float('nan'), bandwidth


if __name__ == '__main__':
  main()
