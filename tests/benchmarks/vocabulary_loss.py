"""Our one-pass vocabulary loss against the dense one, at V = 256,000.

Loss and gradients of hidden states and table. Memory is what XLA plans for
temporaries and results besides the arguments (`memory_analysis`).
"""

from collections.abc import Sequence
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from encdec_adapt.ops import vocabulary_loss
from tests.benchmarks import results
from tests.ops import dense_loss

SOFTCAP = 30.0


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints; ratios are ours over the dense loss."""
  arguments = results.parser(
    __doc__,
    tokens=512,
    width=256,
    vocab_size=256_000,
    chunk=128,
    dtypes=['float32', 'bfloat16'],
    steps=3,
  ).parse_args(argv)
  rows = []
  for dtype in arguments.dtypes:
    rows += _compare(dtype, arguments)
  return results.report('vocabulary_loss', rows, arguments)


def _compare(dtype: str, arguments) -> list[dict[str, Any]]:
  """Rows of both losses with products in `dtype`."""
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (1, arguments.tokens)
  hidden = jax.random.normal(keys[0], (*shape, arguments.width), dtype)
  table = jax.random.normal(keys[1], (arguments.vocab_size, arguments.width))
  table *= arguments.width**-0.5
  targets = jax.random.randint(keys[2], shape, 0, arguments.vocab_size)
  options = {'vocab_size': arguments.vocab_size, 'softcap': SOFTCAP}
  losses = {
    'ours': functools.partial(
      vocabulary_loss.cross_entropy, chunk=arguments.chunk, **options
    ),
    'dense': functools.partial(dense_loss.cross_entropy, **options),
  }
  weights = jnp.ones(shape)
  compiled, compiling = {}, {}
  for name, loss in losses.items():

    def objective(hidden, table, loss=loss):
      return loss(hidden, table, targets, weights).total / jnp.sum(weights)

    start = time.perf_counter()
    gradient = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))
    compiled[name] = gradient.lower(hidden, table).compile()
    compiling[name] = time.perf_counter() - start

  def call(gradient):
    """Runs a program to its end."""
    return results.seconds(
      lambda: jax.block_until_ready(gradient(hidden, table))
    )

  runs = {name: functools.partial(call, one) for name, one in compiled.items()}
  seconds = results.take_turns(runs, arguments.steps)
  rows = []
  for name, gradient in compiled.items():
    memory = gradient.memory_analysis()
    rows.append(
      {
        'dtype': dtype,
        'loss': name,
        'MiB': (memory.temp_size_in_bytes + memory.output_size_in_bytes)
        / 2**20,
        'of it gradients MiB': memory.output_size_in_bytes / 2**20,
        'seconds': statistics.median(seconds[name][1:]),
        'compile s': compiling[name],
        'value': float(gradient(hidden, table)[0]),
      }
    )
  dense = rows[1]
  for row in rows:
    row['memory ratio'] = row['MiB'] / dense['MiB']
    row['time ratio'] = row['seconds'] / dense['seconds']
  return rows


if __name__ == '__main__':
  main()
