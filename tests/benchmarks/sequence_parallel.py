"""Bytes that attention sends over devices that shard the length, by mask.

One attention of Gemma 2 2B's heads, forward and backward, compiled for fake
devices and not run: the bytes that a device sends, by kind of collective, and
the temporary memory of its program.
"""

from collections.abc import Callable, Sequence
import functools
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from encdec_adapt.ops import attention, masks, partition
from encdec_adapt.planning import hlo
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules
from tests.benchmarks import results


def make_masks(window: int) -> dict[str, Callable[..., masks.MaskSpec]]:
  """Masks of self-attention by name, from (segments, positions)."""
  return {
    'full': functools.partial(masks.bidirectional, aligned=True),
    'causal': functools.partial(masks.causal, aligned=True),
    'full exclusive window': functools.partial(
      masks.bidirectional, window=window, aligned=True
    ),
  }


def gradient(attend, mesh, make_mask) -> Callable[..., Any]:
  """Jitted gradient by q, k and v from (q, k, v, segments, positions)."""

  @jax.jit
  def run(q, k, v, segments, positions):
    with partition.use(mesh, rules.named('fsdp').as_dict()):

      def loss(*arrays):
        return jnp.sum(jnp.sin(attend(*arrays, make_mask(segments, positions))))

      return jax.grad(loss, (0, 1, 2))(q, k, v)

  return run


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compiles and prints."""
  arguments = results.parser(
    __doc__,
    shards=8,
    length=32768,
    window=4096,
    heads=8,
    kv_heads=4,
    head_dim=256,
    chunk=256,
  ).parse_args(argv)
  flag = '--xla_force_host_platform_device_count'
  flags = os.environ.get('XLA_FLAGS', '')
  if flag not in flags:  # Read when the first device is asked for.
    os.environ['XLA_FLAGS'] = f'{flags} {flag}={arguments.shards}'
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(fsdp=1, sequence=arguments.shards),
    jax.devices('cpu')[: arguments.shards],
  )
  rows = []
  options = {'scale': 1.0, 'chunk': arguments.chunk}
  for name, make_mask in make_masks(arguments.window).items():
    attend = functools.partial(attention.attention, **options)
    run = gradient(attend, mesh, make_mask)
    rows.append({'mask': name} | _measure(run, mesh, arguments))
  return results.report('sequence_parallel', rows, arguments)


def _measure(run, mesh, arguments) -> dict[str, float]:
  """Returns what a device sends and keeps."""
  sharding = jax.NamedSharding(mesh, PartitionSpec(None, 'sequence'))

  def describe(*shape, dtype=jnp.float32):
    shape = 1, arguments.length, *shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  q = describe(arguments.heads, arguments.head_dim)
  k = describe(arguments.kv_heads, arguments.head_dim)
  ids = describe(dtype=jnp.int32)
  compiled = run.lower(q, k, k, ids, ids).compile()
  sent: dict[str, float] = {}
  others = (arguments.shards - 1) / arguments.shards
  # On CPU all collectives have one channel, and `hlo.totals` would take them
  # for parts of one.
  text = re.sub(r'channel_id=\d+, ', '', compiled.as_text())
  for one in hlo.totals(text).collectives.values():
    share = {'collective-permute': 1.0, 'all-reduce': 2 * others}
    size = one.bytes * one.times * share.get(one.kind, others)
    sent[one.kind] = sent.get(one.kind, 0.0) + size / 2**20
  kinds = 'all-gather', 'reduce-scatter', 'all-reduce', 'collective-permute'
  return {
    'sent MiB': sum(sent.values()),
    **{f'of it {kind}': sent.get(kind, 0.0) for kind in kinds},
    'temporary MiB': compiled.memory_analysis().temp_size_in_bytes / 2**20,
  }


if __name__ == '__main__':
  main()
